"""Looking things up: what there is, what it needs, what to cite; help for newcomers."""

import importlib.resources
import re
from typing import Any

import pytest
from typer.testing import CliRunner

import fedbilevel as fb
from experiment.recorded_rows import run
from experiment.tiny import IMAGES, SADDLE, changed, write
from fedbilevel.cli.demo import finding
from fedbilevel.cli.main import app
from fedbilevel.experiment.config import plans
from fedbilevel.experiment.registry import ALGORITHMS, GROUPS, parameters
from fedbilevel.experiment.report import compare


def words(text: str) -> str:
    """A text whose lines were folded, on one line."""
    return " ".join(text.split())


# --------------------------------------------------------------------- list and show


def test_list_has_every_name_of_every_group(fedbilevel: Any) -> None:
    said = fedbilevel("list")
    assert said.code == 0
    for group, things in GROUPS.items():
        assert group in said.out
        assert all(name in said.out for name in things)
    alone = fedbilevel("list", "algorithms").out
    assert "LFedNest" in alone
    assert "Dirichlet" not in alone


def test_list_shows_the_papers_that_stand_here(fedbilevel: Any, tmp_path: Any) -> None:
    (tmp_path / "papers" / "fednest").mkdir(parents=True)
    (tmp_path / "papers" / "fednest" / "figure2a.toml").write_text("# Figure 2a: minimax\nsteps = 1\n")
    said = fedbilevel("list", "papers")
    assert "papers/fednest/figure2a.toml" in said.out
    assert "Figure 2a: minimax" in said.out


def test_every_name_can_be_shown(fedbilevel: Any) -> None:
    """All but a few of a kind: the watching of a method takes its time."""
    for group, things in GROUPS.items():
        if group != "algorithms":
            for name in list(things)[:2]:
                said = fedbilevel("show", name)
                assert said.code == 0
                assert name in said.out
                assert "object at 0x" not in said.out
                assert "<function" not in said.out


def test_show_tells_all_of_a_method(fedbilevel: Any) -> None:
    text = words(fedbilevel("show", "FedNest").out)
    for name in parameters(ALGORITHMS["FedNest"]):
        assert name in text
    for part in ("α, step size for x", "Cost a step and client", "Reference: D. A. Tarzanagh", "ICML 2022"):
        assert part in text
    answers = dict(re.findall(r"(state kept|values read|derivatives of g|convex in y)\D*?(yes|no)", text))
    assert answers == {
        "state kept": "no",
        "values read": "no",
        "derivatives of g": "yes",
        "convex in y": "yes",
    }


def test_what_others_refer_to_and_what_is_ones_own_can_be_shown(fedbilevel: Any, tmp_path: Any) -> None:
    assert "Cost a" in fedbilevel("show", "Heterogeneous").out
    (tmp_path / "shown_method.py").write_text(
        "import fedbilevel as fb\n\n\nclass Mine(fb.FedAvg):\n"
        '    """My own.\n\n    Args:\n        lr: how far.\n    """\n'
    )
    said = fedbilevel("show", "shown_method:Mine").out
    assert "My own." in said
    assert "how far." in said
    assert "oracles" in said


def test_brackets_in_a_description_are_shown(fedbilevel: Any) -> None:
    assert "`[i, j]` how often i hears j" in words(fedbilevel("show", "Stochastic").out)


@pytest.mark.parametrize(("typed", "meant"), [("pdbo", "PDBO"), ("FEDSEP", "FedSep"), ("vr-hgp", "VRHGP")])
def test_a_name_is_found_in_any_case(fedbilevel: Any, typed: str, meant: str) -> None:
    said = fedbilevel("show", typed)
    assert said.code == 2
    assert f"did you mean {meant!r}?" in said.err


def test_show_leaves_out_what_a_file_need_not_give(fedbilevel: Any) -> None:
    text = fedbilevel("show", "Saddle").out
    assert re.search(r"^penalty +10\.0", text, re.MULTILINE)
    assert not re.search(r"^key ", text, re.MULTILINE)


# ------------------------------------------------------------------------------ cite


def test_cite_gives_the_entries_of_what_a_file_uses(fedbilevel: Any, tmp_path: Any) -> None:
    keys = re.findall(r"@\w+\{(\w+),", fedbilevel("cite", write(tmp_path, IMAGES)).out)
    assert {"fedbilevel", "tarzanagh2022fednest", "lecun1998gradient", "mcmahan2017communication"} <= set(
        keys
    )
    assert len(keys) == len(set(keys))
    saddle = changed(SADDLE, ('"tiny"', '"mnist"'))
    other = re.findall(r"@\w+\{(\w+),", fedbilevel("cite", write(tmp_path, saddle)).out)
    assert "hou2021efficient" in other
    assert "lecun1998gradient" not in other, "the experiment is called so, the data are not"


def test_cite_knows_schedules(fedbilevel: Any, tmp_path: Any) -> None:
    decay = '{kind = "cosine_decay_schedule", init_value = 0.1, decay_steps = 5}'
    text = changed(SADDLE, ("upper_lr = 0.05", f"upper_lr = {decay}"))
    assert "deepmind2020jax" in fedbilevel("cite", write(tmp_path, text)).out
    assert "deepmind2020jax" not in fedbilevel("cite", write(tmp_path)).out


# ------------------------------------------------------------------------------ data


def test_data_are_listed_and_described(fedbilevel: Any, tmp_path: Any) -> None:
    listed = words(fedbilevel("data", "list").out)
    assert all(part in listed for part in ("mnist-mini", "cifar10", "CC BY-SA"))
    said = fedbilevel("data", "describe", "mnist-mini", "--set", "partition.clients=3")
    assert said.code == 0
    assert "mnist-mini" in said.out
    assert "10,000" in said.out
    of_file = fedbilevel("data", "describe", write(tmp_path, IMAGES))
    assert of_file.code == 0
    without = fedbilevel("data", "describe", write(tmp_path))
    assert without.code == 2
    assert "tiny.toml has no [data]" in without.err


# ------------------------------------------------------------------- help and the rest


COMMANDS = ("run", "sweep", "resume", "compare", "list", "show", "cite", "demo", "data")


def test_help_names_every_command_and_the_exit_codes(fedbilevel: Any) -> None:
    text = words(fedbilevel("--help").out)
    assert all(command in text for command in COMMANDS)
    assert "130 interrupted" in text
    assert words(fedbilevel("-h").out) == text
    assert fedbilevel("--version").out == f"fedbilevel {fb.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(fedbilevel: Any, command: str) -> None:
    said = fedbilevel(command, "--help")
    assert said.code == 0
    assert "Usage" in said.out
    assert len(words(said.out)) > 150


def test_run_explains_its_options(fedbilevel: Any) -> None:
    text = words(fedbilevel("run", "--help").out)
    for option in ("--set", "--seed", "--steps", "--engine", "--out", "--dry-run", "--preset", "--again"):
        assert option in text
    assert "algorithm.upper_lr=0.01" in text


def test_shells_can_complete() -> None:
    asked = {"_FEDBILEVEL_COMPLETE": "complete_bash", "COMP_WORDS": "fedbilevel re", "COMP_CWORD": "1"}
    done = CliRunner().invoke(app, env=asked, prog_name="fedbilevel")
    assert done.output.split() == ["resume"]


# ------------------------------------------------------------------------------ demo


def test_the_demonstration_can_be_read(tmp_path: Any) -> None:
    text = importlib.resources.files("fedbilevel.experiment").joinpath("demo.toml").read_text()
    assert {plan.variant for plan in plans(write(tmp_path, text))} == {"not tuned", "LFedNest", "FedNest"}


def test_the_demonstration_says_what_it_found() -> None:
    ends = {"not tuned": 0.5, "LFedNest": 0.625, "FedNest": 0.75}
    runs = [run(name, 0, [0.1, end], (1, 1, 1), metric="balanced_accuracy") for name, end in ends.items()]
    assert re.findall(r"[\d.]+%", finding(compare(runs))) == ["50.0%", "75.0%", "62.5%"]
