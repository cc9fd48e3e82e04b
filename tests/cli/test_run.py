"""Running, going on, sweeping and comparing from the command line."""

import json
import os
import pathlib
import tomllib
from typing import Any

import pytest

from experiment.tiny import SADDLE, changed, manifest, rows, same_run, write
from fedbilevel import load
from fedbilevel.experiment.config import plans
from fedbilevel.experiment.directory import Directory

TWO = SADDLE + "\n[variants.slow]\nalgorithm.upper_lr = 0.01\n[variants.fast]\n[presets.short]\nsteps = 2\n"
DIVERGES = changed(SADDLE, ("upper_lr = 0.05", "upper_lr = 1e30"))

pytestmark = pytest.mark.usefixtures("no_figures")


def config(folder: str | pathlib.Path) -> dict[str, Any]:
    return tomllib.loads((pathlib.Path(folder) / "config.toml").read_text())


# ------------------------------------------------------------------------------ run


def test_a_file_is_run_with_every_variant_and_seed(fedbilevel: Any, tmp_path: Any) -> None:
    said = fedbilevel("run", write(tmp_path, "seeds = 2\n" + TWO))
    assert said.code == 0
    folders = ["slow/seed-0", "slow/seed-1", "fast/seed-0", "fast/seed-1"]
    for number, folder in enumerate(folders, start=1):
        assert f"[{number}/4]" in said.err
        assert f"runs/tiny/{folder}" in said.err
        assert manifest(tmp_path / "runs" / "tiny" / folder)["status"] == "done"
    assert "error (best: min, marked *)" in said.out
    assert "runs/tiny/comparison.png" in said.err


def test_a_second_time_nothing_is_done_again(fedbilevel: Any, tmp_path: Any) -> None:
    file = write(tmp_path)
    first = fedbilevel("run", file, "--out", "there")
    before = (tmp_path / "there" / "seed-0" / "result.npz").stat().st_mtime_ns
    second = fedbilevel("run", file, "--out", "there")
    assert (second.code, second.out) == (0, first.out)
    assert "done before" in second.err
    assert (tmp_path / "there" / "seed-0" / "result.npz").stat().st_mtime_ns == before
    again = fedbilevel("run", file, "--out", "there", "--again")
    assert "before" not in again.err
    assert (tmp_path / "there" / "seed-0" / "result.npz").stat().st_mtime_ns > before


def test_options_change_the_file(fedbilevel: Any, tmp_path: Any) -> None:
    options = ["--set", "algorithm.upper_lr=0.02", "-s", "problem.penalty=5.0", "--seed", "3", "--steps", "4"]
    said = fedbilevel("run", write(tmp_path, TWO), "--only", "fast", "-P", "short", *options, "-o", "o")
    assert said.code == 0
    assert sorted(os.listdir("o")) == ["comparison.png", "fast"]
    settings = config("o/fast/seed-3")
    assert settings["algorithm"]["upper_lr"] == 0.02
    assert (settings["problem"]["penalty"], settings["steps"], settings["seed"]) == (5.0, 4, 3)
    assert load("o/fast/seed-3/result.npz").steps == 4


def test_a_preset_has_a_folder_of_its_own(fedbilevel: Any, tmp_path: Any) -> None:
    assert fedbilevel("run", write(tmp_path, TWO), "--preset", "short").code == 0
    assert load("runs/tiny-short/slow/seed-0/result.npz").steps == 2


def test_a_dry_run_estimates_and_writes_nothing(fedbilevel: Any, tmp_path: Any) -> None:
    file = write(tmp_path, "seeds = 3\n" + TWO)
    said = fedbilevel("run", file, "--dry-run")
    assert said.code == 0
    assert "slow, 3 seeds" in said.out
    assert "fast, 3 seeds" in said.out
    for part in ("6 steps", "MB sent in 6 rounds", "GiB of memory", "one step", "an evaluation"):
        assert part in said.out
    assert os.listdir(tmp_path) == ["tiny.toml"]


def test_a_run_that_diverges_is_exit_code_1(fedbilevel: Any, tmp_path: Any) -> None:
    said = fedbilevel("run", write(tmp_path, DIVERGES), "-o", "o")
    assert said.code == 1
    assert "1 of 1 runs diverged" in said.err
    assert fedbilevel("resume", "o").code == 1
    some = fedbilevel("run", write(tmp_path, TWO), "-s", "variants.slow=1", "-o", "p")
    assert some.code == 2, "variants are not settings"


def test_others_are_compared_if_one_diverges(fedbilevel: Any, tmp_path: Any) -> None:
    text = SADDLE + "\n[variants.good]\n[variants.bad]\nalgorithm.upper_lr = 1e30\n"
    said = fedbilevel("run", write(tmp_path, text), "-o", "o")
    assert said.code == 1
    assert "good" in said.out
    assert "bad: of 1 runs, those of seed 0 diverged" in said.out


def test_a_problem_without_metrics_is_run_all_the_same(fedbilevel: Any, tmp_path: Any) -> None:
    (tmp_path / "bare_problem.py").write_text(
        "import jax\nfrom fedbilevel import Saddle\n\n\n"
        "def make():\n    known = Saddle.random(jax.random.key(0), 3, 2)\n"
        "    return known.problem(metrics={}), known.clients()\n"
    )
    text = 'steps = 2\nproblem = "bare_problem:make"\n' + SADDLE[SADDLE.index("[algorithm]") :]
    said = fedbilevel("run", write(tmp_path, text), "-o", "o")
    assert said.code == 0, said.err
    assert manifest(tmp_path / "o" / "seed-0")["status"] == "done"


OWN = (
    "import jax\nfrom fedbilevel import Saddle\n\n\n"
    "def make():\n    known = Saddle.random(jax.random.key(0), 3, 2)\n"
    "    return known.problem(), known.clients()\n"
)


def own(folder: Any, module: str, code: str = OWN) -> str:
    """Writes a module of the user's own, and gives an experiment whose problem it makes."""
    (folder / f"{module}.py").write_text(code)
    return f'steps = 2\nproblem = "{module}:make"\n' + SADDLE[SADDLE.index("[algorithm]") :]


@pytest.mark.parametrize("place", ["reader", "file"])
def test_modules_are_found_beside_the_reader_and_beside_the_file(
    fedbilevel: Any, tmp_path: Any, place: str
) -> None:
    (deep := tmp_path / "deep").mkdir()
    text = own(tmp_path if place == "reader" else deep, f"beside_the_{place}")
    said = fedbilevel("run", write(deep, text).relative_to(tmp_path))
    assert said.code == 0, said.err
    assert (tmp_path / "runs" / "tiny" / "seed-0").is_dir()


def test_a_module_that_is_nowhere(fedbilevel: Any, tmp_path: Any) -> None:
    text = 'steps = 2\nproblem = "nowhere_at_all:make"\n' + SADDLE[SADDLE.index("[algorithm]") :]
    said = fedbilevel("run", write(tmp_path, text))
    assert said.code == 2
    assert "cannot be imported: No module named 'nowhere_at_all'. It is looked for in" in said.err


@pytest.mark.parametrize(
    ("code", "words"),
    [("import numpyy\n", "No module named 'numpyy' ("), ("\nraise OSError('boom')\n", "OSError: boom (")],
)
def test_a_module_that_breaks_is_named_with_its_line(
    fedbilevel: Any, tmp_path: Any, code: str, words: str
) -> None:
    module = f"breaks_{len(code)}"
    said = fedbilevel("run", write(tmp_path, own(tmp_path, module, code)))
    assert said.code == 2
    assert words in said.err
    assert f"{module}.py, line {code.count(chr(10))})" in said.err


def test_syntax_errors_and_exits_of_a_module_are_said(fedbilevel: Any, tmp_path: Any) -> None:
    for module, code, words in (
        ("no_syntax", "def (:\n", "SyntaxError: invalid syntax (no_syntax.py, line 1)\n"),
        ("leaves_at_once", "import sys\nsys.exit(3)\n", "SystemExit: 3 ("),
    ):
        said = fedbilevel("run", write(tmp_path, own(tmp_path, module, code)))
        assert said.code == 2
        assert words in said.err


def test_all_runs_have_the_hash_of_the_code_that_they_ran(tmp_path: Any, monkeypatch: Any) -> None:
    """A module is imported once, and what is in its file later is not what runs."""
    monkeypatch.syspath_prepend(tmp_path)
    (plan,) = plans(write(tmp_path, own(tmp_path, "edited_meanwhile")))
    before = plan.hash
    (tmp_path / "edited_meanwhile.py").write_text("# nothing is left\n")
    assert plan.hash == before


def test_names_that_look_like_modules_are_not_read(tmp_path: Any) -> None:
    first, second = (plans(write(tmp_path, SADDLE.replace("tiny", name)))[0] for name in ("json:a", "b"))
    assert first.hash == second.hash


def test_a_run_of_changed_code_is_another_run(fedbilevel: Any, tmp_path: Any) -> None:
    file = write(tmp_path, own(tmp_path, "changing"))
    assert fedbilevel("run", file, "-o", "o").code == 0
    assert "done before" in fedbilevel("run", file, "-o", "o").err
    (tmp_path / "changing.py").write_text(OWN.replace("key(0)", "key(1)"))
    said = fedbilevel("run", file, "-o", "o")
    assert said.code == 2
    assert "of other code (modules that its settings name have changed)" in said.err
    assert fedbilevel("run", file, "-o", "o", "--again").code == 0


def test_results_cannot_be_written_below_a_file(fedbilevel: Any, tmp_path: Any) -> None:
    (tmp_path / "taken").write_text("a file of mine")
    said = fedbilevel("run", write(tmp_path), "-o", "taken")
    assert said.code == 2
    assert "taken is a file: results need a folder; name another one" in said.err
    assert (tmp_path / "taken").read_text() == "a file of mine"


def test_tables_of_the_file_are_not_set_from_outside(fedbilevel: Any, tmp_path: Any) -> None:
    said = fedbilevel("run", write(tmp_path), "-s", "grid.algorithm.upper_lr=[0.1]")
    assert said.code == 2
    assert "grid.algorithm.upper_lr cannot be set from outside" in said.err
    assert "fedbilevel sweep -p" in said.err


# ------------------------------------------------------------------- interrupted, resumed


@pytest.fixture
def interrupted(monkeypatch: Any) -> Any:
    """A context in which Ctrl-C is pressed after the second evaluation."""
    record = Directory.record

    def broken(self: Directory, seen: Any) -> None:
        record(self, seen)
        if seen.row["step"] == 2:
            raise KeyboardInterrupt

    context = monkeypatch.context()
    with context as patch:
        patch.setattr(Directory, "record", broken)
        yield patch


def test_an_interrupted_run_of_own_modules_goes_on_with_the_same_command(
    fedbilevel: Any, tmp_path: Any, interrupted: Any
) -> None:
    (deep := tmp_path / "deep").mkdir()
    file = write(deep, own(deep, "goes_on").replace("steps = 2", "steps = 4"))
    said = fedbilevel("run", file, "-o", "o")
    assert said.code == 130
    assert "The same command again goes on from the last checkpoints" in said.err
    interrupted.undo()
    assert fedbilevel("run", file, "-o", "o").code == 0
    assert manifest(tmp_path / "o" / "seed-0")["status"] == "done"


def test_an_interrupted_run_says_how_to_go_on(
    fedbilevel: Any, tmp_path: Any, interrupted: Any, monkeypatch: Any
) -> None:
    file = write(tmp_path)
    said = fedbilevel("run", file, "-o", "o")
    assert said.code == 130
    assert "fedbilevel resume o" in said.err
    assert manifest(tmp_path / "o" / "seed-0")["status"] == "interrupted"
    assert len(rows(tmp_path / "o" / "seed-0")) == 2
    interrupted.undo()
    assert fedbilevel("resume", "o").code == 0
    assert fedbilevel("run", file, "-o", "whole").code == 0
    assert same_run(load("o/seed-0/result.npz"), load("whole/seed-0/result.npz"))
    assert rows(tmp_path / "o" / "seed-0") == rows(tmp_path / "whole" / "seed-0")


def test_runs_that_had_not_begun_are_told_and_begun_by_the_same_command(
    fedbilevel: Any, tmp_path: Any, interrupted: Any, no_figures: None
) -> None:
    file = write(tmp_path, "seeds = [0, 1]\n" + SADDLE)
    said = fedbilevel("run", file, "-o", "o")
    assert said.code == 130
    assert "1 of 2 runs have not begun: the same command again begins them, and goes on from" in said.err
    interrupted.undo()
    assert fedbilevel("run", file, "-o", "o").code == 0
    assert {manifest(tmp_path / "o" / f"seed-{seed}")["status"] for seed in (0, 1)} == {"done"}


def test_interrupting_a_resumed_run_is_exit_code_130_too(
    fedbilevel: Any, tmp_path: Any, interrupted: Any
) -> None:
    interrupted.undo()
    file = write(tmp_path)
    fedbilevel("run", file, "-o", "o", "-n", "2")
    record = Directory.record
    interrupted.setattr(Directory, "record", lambda self, seen: record(self, seen) or _ctrl_c())
    assert fedbilevel("resume", "o", "-n", "6").code == 130


def _ctrl_c() -> None:
    raise KeyboardInterrupt


def test_resume_goes_on_with_all_runs_below_a_folder(fedbilevel: Any, tmp_path: Any) -> None:
    fedbilevel("run", write(tmp_path, TWO), "-o", "o", "-n", "2")
    said = fedbilevel("resume", "o", "--steps", "6")
    assert said.code == 0
    assert said.err.count("done, 6 steps") == 2
    one = fedbilevel("resume", "o/slow/seed-0", "-n", "8")
    assert one.code == 0
    assert [load(f"o/{name}/seed-0/result.npz").steps for name in ("slow", "fast")] == [8, 6]


# ---------------------------------------------------------------------------- sweep


def test_a_sweep_is_every_combination(fedbilevel: Any, tmp_path: Any) -> None:
    said = fedbilevel(
        *(
            "sweep",
            write(tmp_path),
            "-p",
            "algorithm.upper_lr=0.01,0.05",
            "-p",
            "problem.penalty=[5.0, 10.0]",
        ),
        *("--seeds", "2", "-n", "2"),
    )
    assert said.code == 0
    assert "[8/8]" in said.err
    folder = tmp_path / "runs" / "tiny-sweep"
    names = sorted(str(file.parent.relative_to(folder)) for file in folder.rglob("result.npz"))
    rates = [f"upper_lr={rate}-penalty={penalty}" for rate in (0.01, 0.05) for penalty in ("10.0", "5.0")]
    assert names == sorted(f"{name}/seed-{seed}" for name in rates for seed in (0, 1))
    assert "upper_lr=0.01, penalty=5.0" in said.out, "names are whole also where nobody looks"


def test_a_sweep_gives_what_single_runs_give(fedbilevel: Any, tmp_path: Any) -> None:
    file = write(tmp_path)
    fedbilevel("sweep", file, "-p", "algorithm.upper_lr=0.01,0.05", "-o", "s")
    fedbilevel("run", file, "-o", "r")
    swept, alone = load("s/upper_lr=0.05/seed-0/result.npz"), load("r/seed-0/result.npz")
    assert swept.x == pytest.approx(alone.x, rel=1e-5)
    assert swept.ledger == alone.ledger


def test_a_sweep_over_words(fedbilevel: Any, tmp_path: Any) -> None:
    assert fedbilevel("sweep", write(tmp_path), "-p", "algorithm=FedAvgS,FedNest", "-n", "1").code == 0
    kinds = [
        config(file.parent)["algorithm"]["kind"] for file in sorted((tmp_path / "runs").rglob("config.toml"))
    ]
    assert kinds == ["FedAvgS", "FedNest"]


# -------------------------------------------------------------------------- compare


def test_runs_are_compared_as_text_and_json(fedbilevel: Any, tmp_path: Any) -> None:
    fedbilevel("run", write(tmp_path, TWO), "-o", "o")
    said = fedbilevel("compare", "o")
    assert said.code == 0
    assert "slow" in said.out
    assert "at 6 rounds" in said.out
    data = json.loads(
        fedbilevel("compare", "o/slow", "o/fast", "--json", "--no-figures", "-m", "lower_error").out
    )
    assert data["metric"] == "lower_error"
    assert [line["variant"] for line in data["lines"]] == ["slow", "fast"]
    assert data["equal"]["rounds"] == 6


def test_figures_go_where_they_are_asked_to(fedbilevel: Any, tmp_path: Any) -> None:
    fedbilevel("run", write(tmp_path), "-o", "o")
    assert fedbilevel("compare", "o", "--out", "new/figures").code == 0
    assert (tmp_path / "new" / "figures" / "comparison.png").exists()
    (tmp_path / "o" / "comparison.png").unlink()
    assert "Figures" not in fedbilevel("compare", "o", "--no-figures").err
    assert not (tmp_path / "o" / "comparison.png").exists()
