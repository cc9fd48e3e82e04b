"""What a user does wrong is one message that names file and key, and exit code 2: never a traceback."""

import os
import subprocess
import sys
from typing import Any

import pytest

from experiment.tiny import SADDLE, changed, write
from fedbilevel.experiment.registry import ConfigError

pytestmark = pytest.mark.usefixtures("no_figures")

FILES = {
    "steps": (("steps = 6", "steps = -1"), "tiny.toml: steps is -1; it must"),
    "seeds": (("steps = 6", 'steps = 6\nseeds = "a"'), "tiny.toml: seeds is 'a'; it must be a list"),
    "key": (("[algorithm]", "[algoritm]"), "tiny.toml: there is no algoritm; did you mean 'algorithm'?"),
    "kind": (
        ('"FedAvgS"', '"FedAvgs"'),
        "tiny.toml: algorithm.kind: there is no algorithm 'FedAvgs'; did you mean",
    ),
    "inner key": (
        ("upper_lr", "uper_lr"),
        "tiny.toml: there is no algorithm.uper_lr; did you mean 'upper_lr'?",
    ),
    "syntax": (("[problem]", "[problem"), "tiny.toml cannot be read as TOML: "),
    "type": (("lower_lr = 0.1", "lower_lr = []"), "tiny.toml: "),
    "missing": (("d = 2", ""), "tiny.toml: problem.d is missing"),
    "measure": (("steps = 6", 'steps = 6\nmeasure = ["drift"]'), "tiny.toml: there is no measure 'drift'"),
    "logger": (("steps = 6", 'steps = 6\nloggers = ["tensorbord"]'), "did you mean 'tensorboard'?"),
    "best": (("[problem]", '[best]\nmetric = "eror"\n[problem]'), "did you mean 'error'?"),
    "cohort": (("cohort = 2", "cohort = 7"), "tiny.toml: "),
}


@pytest.mark.parametrize("case", FILES)
def test_a_mistake_in_a_file(fedbilevel: Any, tmp_path: Any, case: str) -> None:
    change, message = FILES[case]
    said = fedbilevel("run", write(tmp_path, changed(SADDLE, change)), "-o", "o")
    assert said.code == 2
    assert said.out == ""
    assert said.err.startswith("Error: ")
    assert message in said.err
    assert "tiny.toml" in said.err
    assert not os.path.exists("o") or case == "best", "only a first evaluation knows the metrics"


@pytest.mark.parametrize("command", ["run", "sweep", "cite"])
def test_a_mistake_is_one_of_every_command(fedbilevel: Any, tmp_path: Any, command: str) -> None:
    file = write(tmp_path, changed(SADDLE, ("steps = 6", "steps = -1")))
    more = ["-p", "algorithm.upper_lr=0.1"] if command == "sweep" else []
    said = fedbilevel(command, file, *more)
    assert (said.code, said.out) == (2, "")
    assert "steps is -1" in said.err
    assert fedbilevel(command, "nowhere.toml", *more).err == "Error: there is no file nowhere.toml\n"


OPTIONS = {
    "no value": (["--set", "nonsense"], "'nonsense' is not of the form key=value"),
    "key": (["--set", "stepss=3"], "there is no stepss; did you mean 'steps'?"),
    "inner key": (["-s", "algorithm.uper_lr=3"], "there is no algorithm.uper_lr; did you mean 'upper_lr'?"),
    "value": (["-s", "algorithm.upper_lr=fast"], "algorithm.upper_lr"),
    "date": (["-s", "algorithm.upper_lr=2020-01-01"], "2020"),
    "engine": (["--engine", "simulater"], "did you mean 'simulator'?"),
    "preset": (["--preset", "small"], "there is no preset 'small'. The file has: none"),
    "variant": (["--only", "A"], "there is no variant 'A'"),
    "seed": (["--seed", str(2**70)], "seed is 1180591620717411303424; it must"),
    "steps": (["--steps", "-3"], "steps is -3; it must"),
    "dry": (["--dry-run", "-s", "problem.d=-1"], "tiny.toml: problem: "),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_a_mistake_in_an_option(fedbilevel: Any, tmp_path: Any, case: str) -> None:
    options, message = OPTIONS[case]
    said = fedbilevel("run", write(tmp_path), *options)
    assert (said.code, said.out) == (2, "")
    assert message in said.err
    assert os.listdir(tmp_path) == ["tiny.toml"]


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_mistake_names_the_variant(fedbilevel: Any, tmp_path: Any, options: list[str]) -> None:
    """Also one that only the clients show: there are three."""
    text = f"{SADDLE}\n[variants.good]\n[variants.bad]\nalgorithm.steps = [1, 2]\n"
    said = fedbilevel("run", write(tmp_path, text), "-o", "o", "--only", "bad", *options)
    assert said.code == 2
    assert said.err.startswith("Error: ")
    assert "tiny.toml (bad): steps has 2 numbers, but there are 3 clients" in said.err


def test_unknown_commands_and_options_name_the_nearest(fedbilevel: Any) -> None:
    for arguments, near in ((["rum"], "run"), (["run", "x.toml", "--stpes", "3"], "--steps")):
        said = fedbilevel(*arguments)
        assert said.code == 2
        assert near in said.err


def test_folders_without_runs(fedbilevel: Any, tmp_path: Any) -> None:
    (tmp_path / "empty").mkdir()
    for command in ("resume", "compare"):
        for folder in ("empty", "nowhere"):
            said = fedbilevel(command, folder)
            assert (said.code, said.out) == (2, "")
            assert folder in said.err
            assert "config.toml" in said.err, "it says what a run is"
    assert os.listdir(tmp_path) == ["empty"]


def test_a_folder_that_holds_another_experiment(fedbilevel: Any, tmp_path: Any) -> None:
    file = write(tmp_path)
    fedbilevel("run", file, "-o", "o")
    said = fedbilevel("run", file, "-o", "o", "-s", "algorithm.upper_lr=0.06")
    assert said.code == 2
    for part in ("o/seed-0", "other settings", "--out", "--again"):
        assert part in said.err


def test_a_metric_that_runs_do_not_have(fedbilevel: Any, tmp_path: Any) -> None:
    fedbilevel("run", write(tmp_path), "-o", "o")
    said = fedbilevel("compare", "o", "-m", "eror")
    assert (said.code, said.out) == (2, "")
    assert "did you mean 'error'?" in said.err


def test_a_damaged_folder(fedbilevel: Any, tmp_path: Any) -> None:
    fedbilevel("run", write(tmp_path), "-o", "o")
    (tmp_path / "o" / "seed-0" / "manifest.json").write_text("{")
    for command in (["run", "tiny.toml", "-o", "o"], ["resume", "o"], ["compare", "o"]):
        said = fedbilevel(*command)
        assert said.code == 2
        assert "o/seed-0/manifest.json" in said.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(fedbilevel: Any, tmp_path: Any) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    said = fedbilevel("run", write(tmp_path), "-o", "locked/o")
    assert said.code == 2
    assert "locked" in said.err


def test_a_file_in_the_place_of_the_folder(fedbilevel: Any, tmp_path: Any) -> None:
    (tmp_path / "taken").write_text("a file")
    said = fedbilevel("run", write(tmp_path), "-o", "taken")
    assert said.code == 2
    assert "taken" in said.err
    assert (tmp_path / "taken").read_text() == "a file"


def test_names_that_do_not_exist(fedbilevel: Any) -> None:
    assert "did you mean 'FedNest'?" in fedbilevel("show", "FedNst").err
    assert "did you mean 'algorithms'?" in fedbilevel("list", "algorithm").err
    said = fedbilevel("data", "describe", "mnist-mino")
    assert said.code == 2
    assert "mnist-mini" in said.err
    assert fedbilevel("data", "get", "mnistt").code == 2


def test_a_method_for_another_structure(fedbilevel: Any, tmp_path: Any) -> None:
    bilevel = changed(SADDLE, ('"Saddle"', '"Quadratic"'), ("d = 2\ncentred = false", "dx = 2\ndy = 2"))
    said = fedbilevel("run", write(tmp_path, bilevel))
    assert said.code == 2
    assert "tiny.toml: FedAvgS finds saddle points of minimax problems; this one is bilevel" in said.err


def test_a_traceback_is_shown_to_who_asks(fedbilevel: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("FEDBILEVEL_DEBUG", "1")
    with pytest.raises(ConfigError, match="steps is -1"):
        fedbilevel("run", write(tmp_path), "-n", "-1")


def test_the_program_itself_shows_no_traceback(tmp_path: Any) -> None:
    file = write(tmp_path, changed(SADDLE, ("steps = 6", "steps = -1")))
    command = [sys.executable, "-m", "fedbilevel", "run", str(file)]
    plain = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (plain.returncode, plain.stdout) == (2, "")
    assert plain.stderr == f"Error: {file}: steps is -1; it must lie between 0 and {2**62}\n"
