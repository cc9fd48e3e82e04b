"""A run's folder: what is kept, and what is recognised as damaged or foreign."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest

from experiment.tiny import SADDLE, checkpoints, manifest, plan, rows
from fedbilevel import Best, FedNest, Quadratic, solve
from fedbilevel.experiment.build import build
from fedbilevel.experiment.directory import Directory
from fedbilevel.experiment.recorded import RunError, read_run


def steps_of(folder: Any) -> list[int]:
    return [int(file.name.split("-")[1]) for file in checkpoints(folder)]


def fill(directory: Directory, wanted: Any, steps: int = 10, best: Best | None = None) -> Any:
    """A run whose every evaluation is recorded, but not its end."""
    start = directory.begin(wanted)
    problem, clients, algorithm, *_ = build(wanted)
    return solve(
        *(problem, clients, algorithm, steps),
        every=2,
        best=best,
        callback=directory.record,
        start=start,
    )


def test_the_last_checkpoints_and_that_of_the_best_row_are_kept(tmp_path: Any) -> None:
    fill(Directory(tmp_path / "a"), plan(tmp_path))
    assert steps_of(tmp_path / "a") == [8, 10]
    fill(Directory(tmp_path / "b", keep=1), plan(tmp_path))
    assert steps_of(tmp_path / "b") == [10]
    fill(Directory(tmp_path / "c", keep=1), plan(tmp_path), best=Best("error", "max"))
    assert steps_of(tmp_path / "c") == [0, 10]
    fill(Directory(tmp_path / "d", keep=9, every=2), plan(tmp_path))
    assert steps_of(tmp_path / "d") == [0, 4, 8]


def test_the_newest_checkpoint_is_what_solve_had_reached(tmp_path: Any) -> None:
    directory = Directory(tmp_path / "run")
    result = fill(directory, plan(tmp_path))
    last = directory.last()
    assert last is not None
    assert (last.steps, last.ledger, list(last.history)) == (10, result.ledger, list(result.history))
    np.testing.assert_array_equal(last.x, result.x)


def test_a_running_folder_can_be_read(tmp_path: Any) -> None:
    fill(Directory(tmp_path / "run"), plan(tmp_path))
    run = read_run(tmp_path / "run")
    assert (run.status, run.name, run.seed, len(run.rows)) == ("running", "tiny", 0, 6)
    assert all(row["seconds"] >= 0 for row in run.rows)


def not_json(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def test_what_is_not_finite_is_null_for_programs_that_know_json_only(tmp_path: Any) -> None:
    directory, wanted = Directory(tmp_path / "run"), plan(tmp_path)
    problem, clients, algorithm, *_ = build(wanted)
    odd = {"lost": lambda x, y: x[0] * np.nan, "large": lambda x, y: x[0] * np.inf}
    problem = dataclasses.replace(problem, metrics=odd, client_metrics={"far": lambda x, *_: -x[0] * np.inf})
    directory.begin(wanted)
    solve(problem, clients, algorithm, 2, callback=directory.record)
    for name, seen in (
        ("history.jsonl", {"lost": None, "large": None}),
        ("clients.jsonl", {"far": [None] * 3}),
    ):
        lines = (tmp_path / "run" / name).read_text().splitlines()
        read = [json.loads(line, parse_constant=not_json) for line in lines]
        assert [{key: row[key] for key in seen} for row in read] == [seen] * 3
    assert np.isnan(read_run(tmp_path / "run").rows.column("large")).all()


def test_seconds_go_on_from_where_they_were(tmp_path: Any) -> None:
    fill(Directory(tmp_path / "run"), plan(tmp_path, steps=20))
    lines = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(line | {"seconds": 1000.0 + line["step"]}) + "\n" for line in lines)
    (tmp_path / "run" / "history.jsonl").write_text(text)
    fill(Directory(tmp_path / "run"), plan(tmp_path, steps=20), steps=2)
    seconds = read_run(tmp_path / "run").rows.column("seconds")
    assert seconds[:6].tolist() == [1000.0 + step for step in range(0, 11, 2)]
    assert 1010.0 <= seconds[6] < 1100


def test_clients_own_values_are_written_row_by_row(tmp_path: Any) -> None:
    known = Quadratic.random(jax.random.key(0), 3, 2, 2)
    problem = known.problem(client_metrics={"gap": gap})
    directory = Directory(tmp_path / "run")
    for steps in (2, 2):
        start = directory.begin(plan(tmp_path))
        method = FedNest(0.05, 0.1, series="cg", terms=2)
        result = solve(
            problem, known.clients(), method, steps, every=2, callback=directory.record, start=start
        )
    found = rows(tmp_path / "run", "clients.jsonl")
    assert [row["step"] for row in found] == [0, 2, 4]
    np.testing.assert_allclose([row["gap"] for row in found], result.history.clients("gap"))


def gap(x: Any, y: Any, samples: Any) -> Any:
    return ((y - samples["c"]) ** 2).mean()


def test_other_settings_are_refused_unless_there_is_nothing_to_lose(tmp_path: Any) -> None:
    directory, other = Directory(tmp_path / "run"), plan(tmp_path, algorithm__upper_lr=0.06)
    fill(directory, plan(tmp_path))
    with pytest.raises(RunError, match=r"run holds a run with other settings.*--out.*--again"):
        directory.begin(other)
    assert len(rows(tmp_path / "run")) == 6
    assert directory.begin(other, again=True) is None
    assert (rows(tmp_path / "run"), checkpoints(tmp_path / "run")) == ([], [])
    assert manifest(tmp_path / "run")["config_hash"] == other.hash
    assert directory.begin(plan(tmp_path)) is None, "nothing had been reached"


def test_a_finished_run_is_something_to_lose_also_without_checkpoints(tmp_path: Any) -> None:
    directory = Directory(tmp_path / "run")
    directory.finish(fill(directory, plan(tmp_path), steps=6), "done")
    for file in checkpoints(tmp_path / "run"):
        file.unlink()
    assert directory.is_done(plan(tmp_path))
    with pytest.raises(RunError, match="other settings"):
        directory.begin(plan(tmp_path, algorithm__upper_lr=0.06))
    assert (tmp_path / "run" / "result.npz").exists()


def test_what_is_done(tmp_path: Any) -> None:
    directory, wanted = Directory(tmp_path / "run"), plan(tmp_path)
    assert not directory.is_done(wanted)
    result = fill(directory, wanted, steps=6)
    assert not directory.is_done(wanted)
    directory.finish(result, "done")
    assert directory.is_done(wanted)
    assert directory.is_done(plan(tmp_path, steps=5))
    assert not directory.is_done(plan(tmp_path, steps=7)), "more steps are to be done"
    assert not directory.is_done(plan(tmp_path, algorithm__upper_lr=0.06))
    directory.finish(result, "stopped")
    assert directory.is_done(plan(tmp_path, steps=7)), "it had stopped by itself"


@pytest.mark.parametrize("text", ["", "{", "[]", "[1]", '"a"', "3"])
def test_a_manifest_that_is_none_is_an_error_that_names_it(tmp_path: Any, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(RunError, match=r"manifest\.json"):
        Directory(tmp_path).is_done(plan(tmp_path))


def test_files_of_others_are_left_alone(tmp_path: Any) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    names = ("notes.txt", "checkpoint-mine.npz", ".hidden", "comparison.png")
    for name in names:
        (folder / name).write_text("mine")
    fill(Directory(folder), plan(tmp_path))
    Directory(folder).begin(plan(tmp_path), again=True)
    assert [(folder / name).read_text() for name in names] == ["mine"] * 4


def test_how_much_is_kept_must_be_a_number_from_one(tmp_path: Any) -> None:
    for settings in ({"keep": 0}, {"every": 0}):
        with pytest.raises(RunError, match=r"checkpoint\.keep .* at least 1"):
            Directory(tmp_path, **settings)


def test_it_is_written_with_the_settings_of_the_file(tmp_path: Any) -> None:
    Directory(tmp_path / "run").begin(plan(tmp_path, SADDLE))
    text = (tmp_path / "run" / "config.toml").read_text()
    assert text == plan(tmp_path, SADDLE).toml()
