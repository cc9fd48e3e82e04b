"""Experiment files: which runs they describe, and what is said of mistakes."""

import pathlib
import tomllib
from typing import Any

import pytest
import tomli_w

from experiment.tiny import SADDLE, changed, plan, write
from fedbilevel.experiment.change import merged, parsed, tree_of
from fedbilevel.experiment.config import plans, read
from fedbilevel.experiment.registry import ConfigError

MANY = (
    SADDLE
    + """
[presets.small]
steps = 3
seeds = [9]
algorithm.lower_lr = 0.7
variants."slow".algorithm.upper_lr = 0.002

[presets.wide]
grid."problem.d" = [2, 4]

[variants."slow"]
algorithm.upper_lr = 0.001

[variants."as FedNest"]
algorithm.kind = "FedNest"
"""
)


def described(folder: pathlib.Path, text: str = MANY, **options: Any) -> list[Any]:
    return plans(write(folder, text), **options)


# -------------------------------------------------------------------- which runs there are


def test_a_file_without_variants_is_one_run(tmp_path: Any) -> None:
    (one,) = described(tmp_path, SADDLE)
    assert (one.seed, one.folder) == (0, "seed-0")
    assert one.source == str(tmp_path / "tiny.toml")


def test_every_variant_runs_with_every_seed(tmp_path: Any) -> None:
    found = described(tmp_path, "seeds = [3, 5]\n" + MANY)
    assert [(one.variant, one.seed) for one in found] == [
        ("slow", 3),
        ("slow", 5),
        ("as FedNest", 3),
        ("as FedNest", 5),
    ]
    assert [one.folder for one in found][1:3] == ["slow/seed-5", "as-fednest/seed-3"]
    assert [one.config["algorithm"]["upper_lr"] for one in found] == [0.001, 0.001, 0.05, 0.05]
    assert [one.config["algorithm"]["kind"] for one in found][1:3] == ["FedAvgS", "FedNest"]
    assert all("seeds" not in one.config for one in found)


@pytest.mark.parametrize(
    ("line", "seeds"), [("seeds = 3", [0, 1, 2]), ("seeds = [4]", [4]), ("seed = 7", [7]), ("", [0])]
)
def test_seeds_are_a_list_or_a_number_of_them(tmp_path: Any, line: str, seeds: list[int]) -> None:
    assert [one.seed for one in described(tmp_path, f"{line}\n{SADDLE}")] == seeds
    assert [one.seed for one in described(tmp_path, f"{line}\n{SADDLE}", seeds=[8, 9])] == [8, 9]


def test_a_preset_changes_the_file_its_variants_and_its_grid(tmp_path: Any) -> None:
    small = described(tmp_path, preset="small")
    assert [(one.variant, one.seed, one.config["steps"]) for one in small] == [
        ("slow", 9, 3),
        ("as FedNest", 9, 3),
    ]
    assert [one.config["algorithm"]["upper_lr"] for one in small] == [0.002, 0.05]
    assert [one.config["algorithm"]["lower_lr"] for one in small] == [0.7, 0.7]
    wide = described(tmp_path, preset="wide", only=["slow"])
    assert [(one.variant, one.config["problem"]["d"]) for one in wide] == [("slow, d=2", 2), ("slow, d=4", 4)]


def test_a_preset_may_have_some_of_the_variants(tmp_path: Any) -> None:
    text = changed(MANY, ("[presets.small]", '[presets.small]\nonly = ["as FedNest"]'))
    assert {one.variant for one in described(tmp_path, text)} == {"slow", "as FedNest"}
    assert {one.variant for one in described(tmp_path, text, preset="small")} == {"as FedNest"}
    assert {one.variant for one in described(tmp_path, text, preset="small", only=["slow"])} == {"slow"}
    with pytest.raises(ConfigError, match=r"no variant 'FedNest'; did you mean 'as FedNest'"):
        described(tmp_path, changed(text, ('["as FedNest"]', '["FedNest"]')), preset="small")
    with pytest.raises(ConfigError, match=r"presets\.small\.only is 'slow'; it must be a list of names"):
        described(tmp_path, changed(text, ('["as FedNest"]', '"slow"')), preset="small")


def test_a_grid_is_every_combination(tmp_path: Any) -> None:
    text = SADDLE + '\n[grid]\n"algorithm.upper_lr" = [0.1, 0.2]\n'
    found = described(tmp_path, text, grid={"problem.d": [2, 3]})
    assert [one.variant for one in found] == [
        "upper_lr=0.1, d=2",
        "upper_lr=0.1, d=3",
        "upper_lr=0.2, d=2",
        "upper_lr=0.2, d=3",
    ]
    assert [(one.config["algorithm"]["upper_lr"], one.config["problem"]["d"]) for one in found] == [
        (0.1, 2),
        (0.1, 3),
        (0.2, 2),
        (0.2, 3),
    ]
    assert found[0].folder == "upper_lr=0.1-d=2/seed-0"


def test_options_have_the_last_word(tmp_path: Any) -> None:
    found = described(tmp_path, preset="small", changes={"algorithm.upper_lr": 5.0, "steps": 1})
    assert {one.config["algorithm"]["upper_lr"] for one in found} == {5.0}
    assert {one.config["steps"] for one in found} == {1}


def test_only_some_variants(tmp_path: Any) -> None:
    assert [one.variant for one in described(tmp_path, only=["as FedNest"])] == ["as FedNest"]


# ---------------------------------------------------------------------- what a plan is


def test_all_defaults_are_written_out(tmp_path: Any) -> None:
    config = plan(tmp_path, changed(SADDLE, ("every = 2", ""), ("steps = 6", "steps = 100"))).config
    assert (config["every"], config["precision"], config["engine"]["kind"]) == (5, "float32", "simulator")
    assert config["problem"]["penalty"] == 10.0
    assert config["algorithm"]["scale_by_steps"] is False


def test_a_plan_written_and_read_is_the_same_plan(tmp_path: Any) -> None:
    for one in described(tmp_path, preset="small"):
        (back,) = plans(write(tmp_path, one.toml(), "back.toml"))
        assert back.config == one.config
        assert (back.hash, back.folder) == (one.hash, one.folder)
        assert tomllib.loads(one.toml())["seed"] == 9


def test_the_hash_is_that_of_what_changes_numbers(tmp_path: Any) -> None:
    one = plan(tmp_path)
    same = [
        {"steps": 9},
        {"name": "b"},
        {"description": "c"},
        {"loggers": ["mlflow"]},
        {"checkpoint.keep": 5},
    ]
    other = [
        *({"seed": 1}, {"precision": "float64"}, {"algorithm.upper_lr": 0.06}, {"problem.penalty": 11.0}),
        *(
            {"measure": ["client_drift"]},
            {"best.metric": "error"},
            {"engine": {"kind": "simulator", "dropout": 0.1}},
            {"data.seed": 1},
        ),
    ]
    file = tmp_path / "tiny.toml"
    assert {plans(file, changes=change)[0].hash for change in same} == {one.hash}
    assert len({one.hash, *(plans(file, changes=change)[0].hash for change in other)}) == 9


def test_a_default_written_by_hand_changes_nothing(tmp_path: Any) -> None:
    assert plan(tmp_path, problem__penalty=10.0).hash == plan(tmp_path).hash


def test_variants_that_would_share_a_folder_are_refused(tmp_path: Any) -> None:
    text = SADDLE + '\n[variants."A b"]\nsteps = 1\n[variants."a-b"]\nsteps = 2\n'
    with pytest.raises(ConfigError, match=r"tiny\.toml: .*'A b' and 'a-b'.*rename"):
        described(tmp_path, text)


# -------------------------------------------------------------------------- changes


def test_merging_is_deep_and_changes_neither_side() -> None:
    base, change = {"a": {"b": 1, "c": [1]}, "d": 2}, {"a": {"b": {"e": 3}}, "f": 4}
    assert merged(base, change) == {"a": {"b": {"e": 3}, "c": [1]}, "d": 2, "f": 4}
    assert base == {"a": {"b": 1, "c": [1]}, "d": 2}
    merged(base, {})["a"]["c"].append(2)
    assert base["a"]["c"] == [1]


def test_another_kind_loses_the_settings_that_it_does_not_have() -> None:
    base = {"algorithm": {"kind": "FedAvgS", "upper_lr": 0.1, "steps": 3, "cohort": 2}}
    new = merged(base, {"algorithm": {"kind": "FedNest"}})["algorithm"]
    assert new == {"kind": "FedNest", "upper_lr": 0.1, "cohort": 2}
    kept = merged(base, {"algorithm": {"kind": "FedAvgS", "lower_lr": 1.0}})["algorithm"]
    assert kept == {"kind": "FedAvgS", "upper_lr": 0.1, "steps": 3, "cohort": 2, "lower_lr": 1.0}


def test_a_string_is_short_for_a_kind_in_changes_too() -> None:
    base = {"algorithm": {"kind": "FedAvgS", "upper_lr": 0.1, "steps": 3}, "engine": "simulator"}
    assert merged(base, {"algorithm": "FedNest"})["algorithm"] == {"kind": "FedNest", "upper_lr": 0.1}
    assert merged(base, {"engine": {"chunk": 2}})["engine"] == {"kind": "simulator", "chunk": 2}


def test_a_word_takes_the_place_of_a_schedule_and_a_schedule_that_of_a_word() -> None:
    falling = {"kind": "exponential_decay", "init_value": 1.0, "transition_steps": 2, "decay_rate": 0.1}
    base = {"algorithm": {"kind": "PDBO", "adjoint_lr": falling}}
    word = merged(base, {"algorithm": {"adjoint_lr": "last"}})
    assert word["algorithm"]["adjoint_lr"] == {"kind": "last"}
    assert merged(word, base) == base


def test_dotted_keys_are_trees() -> None:
    assert tree_of({"a.b.c": 1, "a.d": 2, "e": 3}) == {"a": {"b": {"c": 1}, "d": 2}, "e": 3}
    assert tree_of({"algorithm": "FedNest", "algorithm.upper_lr": 1}) == {
        "algorithm": {"kind": "FedNest", "upper_lr": 1}
    }


VALUES = {
    "a.b=0.01": ("a.b", 0.01),
    "a=3": ("a", 3),
    "a = true": ("a", True),
    "a=[1, 2]": ("a", [1, 2]),
    "a=word": ("a", "word"),
    'a="3"': ("a", "3"),
    "a=x=y": ("a", "x=y"),
    "a={kind='Iid', clients=3}": ("a", {"kind": "Iid", "clients": 3}),
    "a=1e-3": ("a", 0.001),
    "a=": ("a", ""),
}


@pytest.mark.parametrize("text", VALUES)
def test_options_are_read_as_toml_or_else_as_words(text: str) -> None:
    assert parsed(text) == VALUES[text]


@pytest.mark.parametrize("text", ["nonsense", "=3", ""])
def test_an_option_without_a_key_or_a_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not of the form key=value, such as algorithm"):
        parsed(text)


# -------------------------------------------------------------------------- mistakes

LINES = {
    "steps = -1": "steps is -1; it must",
    "steps = 2.5": "steps is 2.5; it must be a whole number",
    "steps = true": "steps is True; it must be a whole number",
    'steps = "a"': "steps is 'a'; it must be a whole number",
    "every = 0": "every is 0; it must",
    'every = "a"': "every is 'a'; it must be a whole number",
    'seeds = "a"': "seeds is 'a'; it must be a list of whole numbers",
    "seeds = []": "seeds is ",
    "seeds = 0": "seeds is 0",
    "seeds = -2": "seeds is -2",
    "seeds = true": "seeds is True",
    "seeds = [1.5]": "seeds is ",
    'seed = "a"': "seeds? is .*'a'",
    "seed = -1": "seed is -1; it must",
    "seeds = [0, 0]": "the same folder",
    'precision = "float16"': 'precision is \'float16\'; it must be "float32" or "float64"',
    "name = 3": "name is 3; it must be a string",
    'measure = "client_drift"': "measure is 'client_drift'; it must be a list",
    'loggers = "mlflow"': "loggers is 'mlflow'; it must be a list",
    "best = 3": "best is 3; it must be a table",
    "checkpoint = 3": "checkpoint is 3; it must be a table",
    "checkpoint.keep = 0": "checkpoint.keep is 0; it must be .* at least 1",
    'checkpoint.every = "a"': "checkpoint.every is 'a'; it must",
    "checkpoint.keepp = 1": "no checkpoint.keepp; did you mean 'keep'",
    "data = 3": "data is 3; it must be a table",
    "variants = 3": "variants is 3; it must be a table",
    "variants.A = 3": "variants is .*; it must be a table of tables",
    "presets = 3": "presets is 3; it must be a table",
    "grid = 3": "grid is 3; it must be a table",
    'grid."algorithm.upper_lr" = 3': 'grid."algorithm.upper_lr" must be a list of values; it is 3',
    'grid."algorithm.uper_lr" = [3]': "no algorithm.uper_lr; did you mean 'upper_lr'",
    "variants.A.algorithm.uper_lr = 3": "no algorithm.uper_lr; did you mean 'upper_lr'",
    "variants.A.algoritm.upper_lr = 3": "no algoritm; did you mean 'algorithm'",
    "variants.A.algorithm.kind = 'FedAvgT'": "algorithm.kind: there is no algorithm 'FedAvgT'; did you mean",
    "algoritm = 3": "no algoritm; did you mean 'algorithm'",
    "engine = 'simulater'": "engine.kind: there is no engine 'simulater'; did you mean 'simulator'",
    "engine = 3": "engine must be a table with a `kind`, one of simulator",
    "engine.chunk = 3": "engine must be a table with a `kind`",
    "engine = {kind = 'simulator', chunks = 3}": "no engine.chunks; did you mean 'chunk'",
}


@pytest.mark.parametrize("line", LINES)
def test_a_mistake_is_an_error_with_file_key_and_advice(tmp_path: Any, line: str) -> None:
    text = SADDLE
    for key in ("steps", "every", "name"):
        if line.startswith(f"{key} ="):
            text = "\n".join(other for other in SADDLE.splitlines() if not other.startswith(f"{key} ="))
    variant = r" \(A\)" if line.startswith("variants.A.") else r"( \(uper_lr=3\))?"
    with pytest.raises(ConfigError, match=rf"^\S*tiny\.toml{variant}: .*{LINES[line]}"):
        described(tmp_path, f"{line}\n{text}")


@pytest.mark.parametrize("key", ["steps", "problem", "algorithm"])
def test_what_is_missing_is_named(tmp_path: Any, key: str) -> None:
    config = {name: value for name, value in read(write(tmp_path)).items() if name != key}
    text = tomli_w.dumps(config)
    with pytest.raises(ConfigError, match=rf"tiny\.toml: {key} is missing"):
        described(tmp_path, text)


CHANGES = {
    "stepss": ("stepss", 3, "no stepss; did you mean 'steps'"),
    "algoritm.upper_lr": ("algoritm.upper_lr", 3, "no algoritm; did you mean 'algorithm'"),
    "problem.dd": ("problem.dd", 3, "no problem.dd; did you mean 'd'"),
    "problem": ("problem", 3, "problem must be a table with a `kind`"),
    "steps.x": ("steps.x", 3, "steps is"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_mistakes_in_options_are_the_files_too(tmp_path: Any, case: str) -> None:
    key, value, message = CHANGES[case]
    with pytest.raises(ConfigError, match=message):
        described(tmp_path, SADDLE, changes={key: value})


def test_unknown_presets_and_variants_are_named_with_those_there_are(tmp_path: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"no preset 'smal'; did you mean 'small'\? The file has: small, wide"
    ):
        described(tmp_path, preset="smal")
    with pytest.raises(ConfigError, match=r"no variant 'slwo'; did you mean 'slow'"):
        described(tmp_path, only=["slwo"])
    with pytest.raises(ConfigError, match=r"no preset 'small'\. The file has: none"):
        described(tmp_path, SADDLE, preset="small")


def test_files_that_cannot_be_read(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"^there is no file .*nowhere\.toml"):
        plans(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match=r"^\S*tiny\.toml cannot be read as TOML: .*line 2"):
        described(tmp_path, "steps = 1\n[[[")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "bytes.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read as TOML"):
            plans(path)


def test_a_setting_cannot_be_both_set_and_varied(tmp_path: Any) -> None:
    file = write(tmp_path, SADDLE)
    with pytest.raises(ConfigError, match=r"algorithm\.upper_lr is set, and varied"):
        plans(file, changes={"algorithm.upper_lr": 1.0}, grid={"algorithm.upper_lr": [0.1, 0.2]})
