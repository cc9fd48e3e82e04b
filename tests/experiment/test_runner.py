"""Plans to folders: a run that was killed at any moment ends in the same bits as one that was not."""

import itertools
import logging
import pathlib
import shutil
import sys
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from experiment.tiny import (
    SADDLE,
    changed,
    checkpoints,
    manifest,
    plan,
    rows,
    same_run,
    write,
)
from fedbilevel import load, solve
from fedbilevel.experiment import runner
from fedbilevel.experiment.build import build
from fedbilevel.experiment.config import plans
from fedbilevel.experiment.directory import Directory
from fedbilevel.experiment.recorded import RunError
from fedbilevel.experiment.registry import ConfigError
from fedbilevel.experiment.runner import Outcome, run_all
from fedbilevel.experiment.sweep import lanes, sweep

BEST = '\n[best]\nmetric = "error"\n'


def run(plan: Any, folder: pathlib.Path, **options: Any) -> Outcome:
    (outcome,) = run_all([(plan, folder)], **options)
    return outcome


@pytest.fixture(scope="module")
def finished(tmp_path_factory: Any) -> Any:
    """A plan, and the folder of a run of it that was never interrupted."""
    folder = tmp_path_factory.mktemp("finished")
    wanted = plan(folder, SADDLE + BEST)
    return wanted, run(wanted, folder / "run").folder


@pytest.fixture
def copy(finished: Any, tmp_path: Any) -> pathlib.Path:
    """The finished run as if it had been killed just before its result was written."""
    folder = pathlib.Path(shutil.copytree(finished[1], tmp_path / "copy"))
    (folder / "result.npz").unlink()
    Directory(folder).note(status="running")
    return folder


def check_the_same(folder: pathlib.Path, finished: Any) -> None:
    """Whether going on in a folder gives what the uninterrupted run has."""
    wanted, original = finished
    outcome = run(wanted, folder)
    assert outcome.status == "done"
    assert same_run(outcome.result, load(original / "result.npz"))
    assert same_run(load(folder / "result.npz"), outcome.result)
    assert rows(folder) == rows(original)
    assert [file.name for file in checkpoints(folder)] == [file.name for file in checkpoints(original)]
    assert manifest(folder) == manifest(original)


# ---------------------------------------------------------------------- a whole run


def test_a_folder_holds_what_solve_gives(finished: Any) -> None:
    wanted, folder = finished
    problem, clients, algorithm, _, best = build(wanted)
    alone = solve(problem, clients, algorithm, 6, every=2, best=best)
    assert same_run(load(folder / "result.npz"), alone)
    assert rows(folder) == list(alone.history)


def test_the_manifest_says_what_was_run(finished: Any) -> None:
    facts = manifest(finished[1])
    assert facts["status"] == "done"
    assert [facts[key] for key in ("steps", "seed", "name", "variant")] == [6, 0, "tiny", "tiny"]
    assert facts["config_hash"] == finished[0].hash
    assert {"python", "jax", "numpy", "fedbilevel"} <= set(facts["versions"])


def test_the_settings_of_a_folder_can_be_run_themselves(finished: Any, tmp_path: Any) -> None:
    wanted, folder = finished
    (again,) = plans(folder / "config.toml")
    assert again.hash == wanted.hash
    assert same_run(run(again, tmp_path / "again").result, load(folder / "result.npz"))


def test_what_is_done_is_not_done_again(finished: Any, monkeypatch: Any) -> None:
    wanted, folder = finished
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    outcome = run(wanted, folder)
    assert (outcome.status, outcome.fresh) == ("done", False)
    assert same_run(outcome.result, load(folder / "result.npz"))
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_more_steps_go_on_from_the_end(finished: Any, copy: Any, tmp_path: Any) -> None:
    long = plan(tmp_path, SADDLE + BEST, steps=10)
    outcome = run(long, copy)
    assert outcome.fresh
    assert same_run(outcome.result, run(long, tmp_path / "long").result)
    assert rows(copy) == rows(tmp_path / "long")
    assert rows(copy)[:4] == rows(finished[1])


def test_fewer_steps_than_were_done_are_done(finished: Any, tmp_path: Any) -> None:
    outcome = run(plan(tmp_path, SADDLE + BEST, steps=4), finished[1])
    assert not outcome.fresh
    assert outcome.result.steps == 6


def test_again_begins_anew(finished: Any, tmp_path: Any) -> None:
    folder = pathlib.Path(shutil.copytree(finished[1], tmp_path / "old"))
    other = plan(tmp_path, changed(SADDLE, ("0.05", "0.06")))
    with pytest.raises(RunError, match=r"old holds a run with other settings.*--out.*--again"):
        run(other, folder)
    assert rows(folder) == rows(finished[1]), "what was there is untouched"
    outcome = run(other, folder, again=True)
    assert outcome.fresh
    assert same_run(outcome.result, run(other, tmp_path / "new").result)
    assert run(other, folder, again=True).fresh, "also what was done already"
    assert [file.name for file in checkpoints(folder)] == [f.name for f in checkpoints(tmp_path / "new")]


def test_a_diverged_run_is_noted_and_not_repeated(tmp_path: Any) -> None:
    wanted = plan(tmp_path, algorithm__upper_lr=1e30)
    outcome = run(wanted, tmp_path / "run")
    assert (outcome.status, outcome.result.diverged, outcome.fresh) == ("diverged", True, True)
    assert manifest(tmp_path / "run")["status"] == "diverged"
    again = run(wanted, tmp_path / "run")
    assert (again.status, again.fresh) == ("diverged", False)


def test_a_diverged_run_that_was_killed_diverges_again(tmp_path: Any) -> None:
    wanted = plan(tmp_path, algorithm__upper_lr=1e30)
    first = run(wanted, tmp_path / "run")
    (tmp_path / "run" / "result.npz").unlink()
    history = rows(tmp_path / "run")
    second = run(wanted, tmp_path / "run")
    assert same_run(first.result, second.result)
    assert rows(tmp_path / "run") == history


def test_early_stopping_is_noted_and_final(tmp_path: Any) -> None:
    text = (
        changed(SADDLE, ("steps = 6", "steps = 20"))
        + '\n[best]\nmetric = "error"\nmode = "max"\npatience = 2\n'
    )
    outcome = run(plan(tmp_path, text), tmp_path / "run")
    assert (outcome.status, outcome.result.steps) == ("stopped", 4)
    assert outcome.result.best.step == 0
    assert not run(plan(tmp_path, text), tmp_path / "run").fresh


def test_double_precision_is_only_for_the_runs_that_ask(tmp_path: Any) -> None:
    single, double = plan(tmp_path), plan(tmp_path, precision="float64")
    outcomes = [*run_all([(double, tmp_path / "double"), (single, tmp_path / "single")])]
    assert [outcome.result.x.dtype for outcome in outcomes] == ["float64", "float32"]
    assert jnp.ones(1).dtype == "float32"


# -------------------------------------------------------------------------- killed


class Snapshots:
    """Copies of a folder, one before every change of a file in it: what a kill at that moment leaves."""

    def __init__(self, folder: pathlib.Path, into: pathlib.Path) -> None:
        self.folder, self.into, self.busy = folder, into, False
        self.taken: list[pathlib.Path] = []
        sys.addaudithook(self.see)

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        changes = event in ("os.rename", "os.remove", "os.truncate") or (
            event == "open" and isinstance(arguments[1], str) and set("wax+") & set(arguments[1])
        )
        if changes and not self.busy and str(arguments[0]).startswith(str(self.folder)):
            self.take()

    def take(self) -> None:
        self.busy = True
        if self.folder.exists():
            self.taken.append(self.into / str(len(self.taken)))
            shutil.copytree(self.folder, self.taken[-1])
        self.busy = False


@pytest.fixture(scope="module")
def cuts(finished: Any, tmp_path_factory: Any) -> list[pathlib.Path]:
    folder = tmp_path_factory.mktemp("cuts")
    snapshots = Snapshots(folder / "run", folder / "taken")
    run(finished[0], folder / "run")
    snapshots.take()
    snapshots.busy = True  # a hook cannot be removed
    return snapshots.taken


def test_the_cuts_are_many_and_differ(cuts: Any) -> None:
    lengths = [len(rows(cut)) if (cut / "history.jsonl").exists() else -1 for cut in cuts]
    assert sorted(set(lengths)) == [-1, 0, 1, 2, 3, 4]
    assert len({str(sorted((f.name, f.stat().st_size) for f in cut.iterdir())) for cut in cuts}) > 15
    assert sum(any(f.name.startswith(".") for f in cut.iterdir()) for cut in cuts) >= 3, "with drafts"


def test_killed_at_any_moment_it_ends_in_the_same_bits(cuts: Any, finished: Any, tmp_path: Any) -> None:
    for cut in cuts:
        check_the_same(pathlib.Path(shutil.copytree(cut, tmp_path / cut.name)), finished)


def test_killed_within_a_line_it_ends_in_the_same_bits(cuts: Any, finished: Any, tmp_path: Any) -> None:
    """Of a line that was just appended, all that can be there after a kill is a beginning."""
    tried = 0
    for before, cut in itertools.pairwise(cuts):
        old, new = (len(f.read_bytes()) if (f := c / "history.jsonl").exists() else 0 for c in (before, cut))
        if new > old:
            for length in (old + 1, (old + new) // 2, new - 1):
                folder = pathlib.Path(shutil.copytree(cut, tmp_path / f"{cut.name}-{length}"))
                content = (folder / "history.jsonl").read_bytes()
                (folder / "history.jsonl").write_bytes(content[:length])
                check_the_same(folder, finished)
                tried += 1
    assert tried == 12


def flip(file: pathlib.Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def halve(file: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def swap(file: pathlib.Path) -> None:
    """The content of another checkpoint, sound in itself."""
    file.write_bytes(checkpoints(file.parent)[0].read_bytes())


@pytest.mark.parametrize("damage", [flip, halve, swap, pathlib.Path.unlink])
def test_the_newest_checkpoint_may_be_damaged_or_gone(
    copy: Any, finished: Any, damage: Callable[[pathlib.Path], None], caplog: Any
) -> None:
    newest = checkpoints(copy)[-1]
    damage(newest)
    with caplog.at_level(logging.WARNING):
        check_the_same(copy, finished)
    if damage is not pathlib.Path.unlink:
        (record,) = caplog.records
        assert newest.name in record.getMessage()
        assert "\n" not in record.getMessage()


def test_without_any_sound_checkpoint_it_begins_anew(copy: Any, finished: Any, caplog: Any) -> None:
    for file in checkpoints(copy):
        halve(file)
    check_the_same(copy, finished)
    assert len(caplog.records) == 2


def test_strays_of_killed_runs_do_no_harm_and_go(copy: Any, finished: Any) -> None:
    for name in (".checkpoint.npz", "..checkpoint.npz.123", ".result.npz.99", ".manifest.json.7"):
        (copy / name).write_bytes(b"half")
    check_the_same(copy, finished)
    assert [file.name for file in copy.iterdir() if file.name.startswith(".")] == [".lock"]


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
def test_a_history_that_lost_rows_gets_them_back(copy: Any, finished: Any, keep: int) -> None:
    """After a power cut a file system may have the checkpoint, but not the lines before it."""
    lines = (copy / "history.jsonl").read_text().splitlines(keepends=True)
    (copy / "history.jsonl").write_text("".join(lines[:keep]) + '{"ste' * (keep > 0))
    check_the_same(copy, finished)


def test_a_damaged_result_is_made_again(finished: Any, tmp_path: Any) -> None:
    folder = pathlib.Path(shutil.copytree(finished[1], tmp_path / "copy"))
    halve(folder / "result.npz")
    check_the_same(folder, finished)


def test_checkpoints_may_be_rarer_than_rows(finished: Any, tmp_path: Any) -> None:
    text = SADDLE + BEST + "\n[checkpoint]\nevery = 3\nkeep = 1\n"
    run(plan(tmp_path, text), tmp_path / "run")
    assert [int(file.name.split("-")[1]) for file in checkpoints(tmp_path / "run")] == [6]
    (tmp_path / "run" / "result.npz").unlink()
    again = run(plan(tmp_path, text), tmp_path / "run")
    assert same_run(again.result, load(finished[1] / "result.npz"))
    assert rows(tmp_path / "run") == rows(finished[1])


# ------------------------------------------------------------- interrupted and failed


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), "interrupted"), (OSError("disk full"), "failed")]
)
def test_how_a_run_broke_off_is_noted(
    tmp_path: Any, finished: Any, monkeypatch: Any, error: BaseException, status: str
) -> None:
    record = Directory.record

    def broken(self: Directory, seen: Any) -> None:
        record(self, seen)
        if seen.row["step"] == 4:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "record", broken)
        with pytest.raises(type(error)):
            run(finished[0], tmp_path / "run")
    assert manifest(tmp_path / "run")["status"] == status
    check_the_same(tmp_path / "run", finished)


MISTAKES = {
    "every": ("every = 2", "every = 0"),
    "measure": ("every = 2", 'every = 2\nmeasure = ["client_drif"]'),
    "loggers": ("every = 2", 'every = 2\nloggers = ["tensorbord"]'),
    "cohort": ("cohort = 2", "cohort = 4"),
    "structure": ('"FedAvgS"', '"LFedNest"\nsmoothness = 1.0\nouter = "local"'),
    "best": ("[problem]", '[best]\nmetric = "eror"\n[problem]'),
}


@pytest.mark.parametrize("case", ["every", "measure", "loggers", "cohort"])
def test_a_mistake_leaves_no_folder_behind(tmp_path: Any, case: str) -> None:
    with pytest.raises(ValueError, match=r"tiny\.toml: .*" + case):
        run(plan(tmp_path, changed(SADDLE, MISTAKES[case])), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("case", ["measure", "best"])
def test_a_mistake_can_be_corrected(tmp_path: Any, case: str) -> None:
    with pytest.raises(ValueError, match=r"did you mean 'client_drift'|did you mean 'error'"):
        run(plan(tmp_path, changed(SADDLE, MISTAKES[case])), tmp_path / "run")
    assert run(plan(tmp_path), tmp_path / "run").status == "done"


# ------------------------------------------------------------------------- together


def grid(folder: pathlib.Path, *rates: float) -> list[Any]:
    todo = plans(write(folder), grid={"algorithm.upper_lr": rates}, seeds=[0, 1])
    return [(plan, folder / plan.folder) for plan in todo]


def test_runs_together_are_the_runs_alone(tmp_path: Any) -> None:
    (tmp_path / "alone").mkdir()
    together = [*run_all(grid(tmp_path, 0.05, 0.1), together=True)]
    alone = [*run_all(grid(tmp_path / "alone", 0.05, 0.1))]
    assert [outcome.plan.hash for outcome in together] == [outcome.plan.hash for outcome in alone]
    for a, b in zip(together, alone, strict=True):
        assert a.result.ledger == b.result.ledger
        assert a.result.x == pytest.approx(b.result.x, rel=1e-5)
        assert [row["step"] for row in rows(a.folder)] == [0, 2, 4, 6]
        assert manifest(a.folder)["status"] == "done"


def test_runs_together_are_one_program(tmp_path: Any, monkeypatch: Any) -> None:
    seen: list[list[int]] = []

    def watched(jobs: Any, *arguments: Any, **options: Any) -> Any:
        seen.extend(lanes(jobs))
        return sweep(jobs, *arguments, **options)

    monkeypatch.setattr(runner, "sweep", watched)
    [*run_all(grid(tmp_path, 0.05, 0.1), together=True)]
    assert seen == [[0, 1, 2, 3]]


def test_a_run_that_diverges_does_not_disturb_the_others(tmp_path: Any) -> None:
    outcomes = [*run_all(grid(tmp_path, 0.05, 1e30), together=True)]
    assert [outcome.status for outcome in outcomes] == ["done", "done", "diverged", "diverged"]
    assert outcomes[0].result.x == pytest.approx(run(outcomes[0].plan, tmp_path / "alone").result.x, rel=1e-5)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('kind = "FedBiO"', r"tiny\.toml \(B\): algorithm\.adjoint_lr is missing"),
        ("upper_lr = -1", r"tiny\.toml \(B\): algorithm: a step size is -1"),
        ("scale_by_steps = 3", r"tiny\.toml \(B\): algorithm\.scale_by_steps is 3"),
    ],
)
def test_a_mistake_in_the_last_variant_shows_before_the_first_runs(
    tmp_path: Any, setting: str, said: str
) -> None:
    file = write(tmp_path, f"{SADDLE}\n[variants.A]\n[variants.B]\nalgorithm.{setting}\n")
    tasks = [(own, tmp_path / own.folder) for own in plans(file)]
    with pytest.raises(ConfigError, match=said):
        list(run_all(tasks))
    assert not any(folder.exists() for _, folder in tasks)
