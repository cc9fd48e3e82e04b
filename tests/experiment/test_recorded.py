"""Runs read back from their folders, and their curves."""

import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest

from experiment.recorded_rows import row, run
from fedbilevel.experiment.record import History
from fedbilevel.experiment.recorded import (
    COSTS,
    RecordedRun,
    RunError,
    at,
    choose_metric,
    curve,
    find_runs,
    read_run,
)
from fedbilevel.fed.ledger import Ledger

MANIFEST = {"format": "fedbilevel run 1", "name": "figure 1", "variant": "A", "seed": 0, "status": "done"}


def written(folder: pathlib.Path, rows: Any = (), tail: str = "", **changes: Any) -> pathlib.Path:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(MANIFEST | changes))
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return folder


def test_a_run_comes_back(tmp_path: Any) -> None:
    rows = [row(0, 0, 0, 0, error=math.inf), row(5, 3, 10, 8, error=math.nan), row(9, 6, 20, 16, error=0.5)]
    back = read_run(written(tmp_path / "run", rows, variant="B", seed=7, status="stopped"))
    assert (back.name, back.variant, back.seed, back.status) == ("figure 1", "B", 7, "stopped")
    np.testing.assert_array_equal(back.rows.column("error"), [np.inf, np.nan, 0.5])
    assert back.rows[2] == rows[2]
    assert not back.diverged


@pytest.mark.parametrize("tail", ['{"step": 9, "err', "{", '{"step": 9, "error": 0.', "\x00\x00\x00"])
def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Any, tail: str) -> None:
    back = read_run(written(tmp_path / "run", [row(0, 0, 0, 0, error=1.0)], tail))
    assert [one["step"] for one in back.rows] == [0]


def test_a_last_line_cut_within_a_character_is_left_out(tmp_path: Any) -> None:
    folder = written(tmp_path / "run", [row(0, 0, 0, 0, error=1.0)])
    with open(folder / "history.jsonl", "ab") as file:
        file.write('{"é'.encode()[:-1])
    assert len(read_run(folder).rows) == 1


def test_a_damaged_line_before_the_last_is_an_error(tmp_path: Any) -> None:
    folder = written(tmp_path / "run", [row(0, 0, 0, 0)], '{"step"\n' + json.dumps(row(2, 1, 1, 1)) + "\n")
    with pytest.raises(RunError, match=r"history\.jsonl, line 2 is damaged.*Only the last may be"):
        read_run(folder)


def test_a_run_that_was_not_evaluated_has_no_rows(tmp_path: Any) -> None:
    folder = written(tmp_path / "run", status="running")
    (folder / "history.jsonl").unlink()
    assert len(read_run(folder).rows) == 0


REFUSED = {
    "no manifest": (None, "", r"has no manifest\.json: it is not a run folder"),
    "not JSON": ("{", "", "is not JSON"),
    "not an object": ("[]", "", r"format \[\], not 'fedbilevel run 1'"),
    "other format": (json.dumps(MANIFEST | {"format": "fedbilevel run 9"}), "", "format 'fedbilevel run 9'"),
    "lacks a field": (
        json.dumps({name: value for name, value in MANIFEST.items() if name != "variant"}),
        "",
        "lacks variant, or has another type",
    ),
    "wrong type": (json.dumps(MANIFEST | {"seed": "0"}), "", "lacks seed, or has another type"),
    "row is a list": (json.dumps(MANIFEST), "[1]\n", "line 1 is not an object of numbers"),
    "row has text": (json.dumps(MANIFEST), '{"step": "1"}\n', "line 1 is not an object of numbers"),
    "row has no cost": (json.dumps(MANIFEST), '{"step": 1}\n', "line 1 has no rounds, bytes_down.*its cost"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_is_no_run_is_refused_with_a_reason(tmp_path: Any, case: str) -> None:
    manifest, history, message = REFUSED[case]
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    (tmp_path / "history.jsonl").write_text(history)
    with pytest.raises(RunError, match=message):
        read_run(tmp_path)


def test_runs_are_found_below_folders_each_once(tmp_path: Any) -> None:
    for name in ("b/1", "a/2", "a/1", "c"):
        written(tmp_path / name, variant=name)
    assert [one.variant for one in find_runs(tmp_path)] == ["a/1", "a/2", "b/1", "c"]
    assert [one.variant for one in find_runs([tmp_path / "c", str(tmp_path / "a")])] == ["c", "a/1", "a/2"]
    assert len(find_runs([tmp_path, tmp_path / "a" / ".." / "a"])) == 4


def test_a_folder_without_runs_is_an_error_that_says_what_a_run_is(tmp_path: Any) -> None:
    written(tmp_path / "full")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"no run at or below .*empty\. A run folder is .*history\.jsonl"):
        find_runs([tmp_path / "full", tmp_path / "empty"])
    with pytest.raises(RunError, match=r"there is no folder .*typo"):
        find_runs(tmp_path / "typo")
    with pytest.raises(RunError, match="no folder was given"):
        find_runs([])


# ----------------------------------------------------------------------- curves


def test_costs_are_sums_over_directions_and_oracles() -> None:
    one = run("A", 0, [0.1, 0.2], (3, 101, 41))
    assert {cost: curve(one, "accuracy", cost)[0].tolist() for cost in COSTS} == {
        "rounds": [0, 3],
        "bytes": [0, 101],
        "calls": [0, 41],
    }
    counted = {column for columns in COSTS.values() for column in columns}
    assert counted == set(Ledger().columns()) - {"samples"}


def test_a_curve_is_read_stepwise_without_extrapolation() -> None:
    steps = np.array([2.0, 4.0, 4.0, 6.0]), np.array([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_array_equal(at(steps, [1.9, 2, 3.9, 4, 5.9, 6, 99]), [np.nan, 1, 1, 3, 3, 4, 4])


METRICS = {
    ("train_loss", "accuracy", "test_accuracy"): "test_accuracy",
    ("test_loss", "train_accuracy"): "train_accuracy",
    ("accuracy", "balanced_accuracy", "test_accuracy"): "balanced_accuracy",
    ("loss", "y_error"): "y_error",
    ("gap", "test_loss", "loss"): "test_loss",
    ("gap", "adjoint_growth"): "gap",
}


@pytest.mark.parametrize("names", METRICS)
def test_a_sensible_metric_is_chosen(names: tuple[str, ...]) -> None:
    rows = History((row(0, 0, 0, 0, **dict.fromkeys(names, 1.0)),))
    assert choose_metric([RecordedRun(pathlib.Path("A"), "", "A", 0, "done", rows)]) == METRICS[names]
