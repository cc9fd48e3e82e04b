"""Runs read back from their folders, and compared at equal cost."""

import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedbilevel.experiment.record import History
from fedbilevel.experiment.report import (
    COSTS,
    Run,
    RunError,
    at,
    choose_metric,
    compare,
    curve,
    find_runs,
    read_run,
)
from fedbilevel.fed.ledger import Ledger

MANIFEST = {"format": "fedbilevel run 1", "name": "figure 1", "variant": "A", "seed": 0, "status": "done"}


def row(step: int, rounds: int, size: int, calls: int, **metrics: float) -> dict[str, float]:
    """An evaluation; bytes go down and up, calls to two oracles, so that a sum that forgets one is seen."""
    spent = dict.fromkeys(Ledger().columns(), 0) | {"rounds": rounds}
    spent |= {"bytes_down": size - size // 2, "bytes_up": size // 2}
    spent |= {"calls_f_x": calls - calls // 2, "calls_g_yy": calls // 2, "samples": 99 * calls}
    return {"step": step, **metrics, **spent, "seconds": 0.1 * step}


def run(variant: str, seed: int, values: list[float], per: tuple[int, int, int], **changes: Any) -> Run:
    """A run in memory whose every evaluation cost `per` (rounds, bytes, calls) more than the one before."""
    metric = changes.pop("metric", "accuracy")
    rows = [row(i, *(i * unit for unit in per), **{metric: value}) for i, value in enumerate(values)]
    fields = {"name": "figure 1", "status": "done"} | changes
    return Run(pathlib.Path(variant), variant=variant, seed=seed, rows=History(tuple(rows)), **fields)


def written(folder: pathlib.Path, rows: Any = (), tail: str = "", **changes: Any) -> pathlib.Path:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(MANIFEST | changes))
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return folder


def score(comparison: Any, variant: str, place: str) -> tuple[float, float | None]:
    line = next(line for line in comparison.lines if line.variant == variant)
    return line.scores[place].mean, line.scores[place].std


# ----------------------------------------------------------------------- reading


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


# --------------------------------------------------------------------- comparing


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


def test_variants_are_compared_at_the_largest_amount_that_all_reached() -> None:
    # A ends after 30 rounds, 300 bytes and 3000 calls; B after 40, 80 and 6000. So each bounds some cost.
    runs = [
        run("A", 0, [0.1, 0.3, 0.5, 0.7], (10, 100, 1000)),
        run("A", 1, [0.1, 0.5, 0.7, 0.9], (10, 100, 1000)),
        run("B", 0, [0.0, 0.2, 0.4, 0.6, 0.8], (10, 20, 1500)),
    ]
    comparison = compare(runs)
    assert comparison.metric == "accuracy"
    assert comparison.better == "max"
    assert comparison.equal == {"rounds": 30, "bytes": 80, "calls": 3000}
    deviation = pytest.approx(math.sqrt(0.02))  # of two values 0.2 apart
    assert score(comparison, "A", "rounds") == (pytest.approx(0.8), deviation)
    assert score(comparison, "A", "bytes") == (pytest.approx(0.1), pytest.approx(0.0))
    assert score(comparison, "A", "calls") == (pytest.approx(0.8), deviation)
    assert score(comparison, "A", "end") == (pytest.approx(0.8), deviation)
    at_equal = {place: score(comparison, "B", place) for place in (*COSTS, "end")}
    assert at_equal == {"rounds": (0.6, None), "bytes": (0.8, None), "calls": (0.4, None), "end": (0.8, None)}
    assert [line.seeds for line in comparison.lines] == [2, 1]
    assert comparison.notes == ()


def test_diverged_runs_do_not_count_and_are_not_hidden() -> None:
    good = [run("A", seed, [0.1, 0.5, 0.9], (1, 1, 1)) for seed in (0, 1)]
    bad = run("A", 2, [0.1, math.nan], (1, 1, 1), status="diverged")
    comparison = compare([*good, bad, run("B", 0, [0.1], (1, 1, 1), status="diverged")])
    assert comparison.equal["rounds"] == 2
    assert score(comparison, "A", "end") == (0.9, 0.0)
    assert [(line.seeds, line.diverged) for line in comparison.lines] == [(2, 1), (0, 1)]
    assert "A: of 3 runs, those of seed 2 diverged and do not count" in comparison.notes
    assert math.isnan(score(comparison, "B", "end")[0])
    with pytest.raises(RunError, match="no run that did not diverge has accuracy"):
        compare([bad])


def test_unfinished_empty_and_repeated_runs_are_noted() -> None:
    runs = [
        run("A", 0, [0.1, 0.2], (1, 1, 1), status="running"),
        run("A", 1, [], (1, 1, 1), status="running"),
        run("A", 3, [0.1, 0.2], (1, 1, 1)),
        run("A", 3, [0.1, 0.2], (1, 1, 1)),
    ]
    comparison = compare(runs)
    assert comparison.lines[0].seeds == 3
    assert [note.split("those of ")[1] for note in comparison.notes] == [
        "seed 1 have no accuracy yet and do not count",
        "seed 0 did not run to their end and count as far as they came",
        "seed 3 occur more than once, so ± says too little",
    ]


def test_costs_of_zero_are_no_problem() -> None:
    comparison = compare([run("A", 0, [0.1, 0.4], (0, 0, 0)), run("B", 0, [0.3, 0.2], (0, 0, 0))])
    assert comparison.equal == {"rounds": 0, "bytes": 0, "calls": 0}
    assert score(comparison, "A", "bytes") == (0.4, None)


def test_runs_of_several_experiments_are_not_mixed() -> None:
    comparison = compare([run("A", 0, [0.1], (1, 1, 1)), run("A", 0, [0.2], (1, 1, 1), name="figure 2")])
    assert [line.variant for line in comparison.lines] == ["figure 1: A", "figure 2: A"]


def test_rows_without_the_metric_are_passed_over() -> None:
    rows = (row(0, 0, 0, 0, loss=1.0), row(1, 5, 5, 5, loss=0.5, accuracy=0.7), row(2, 9, 9, 9, loss=0.4))
    one = Run(pathlib.Path("A"), "figure 1", "A", 0, "done", History(rows))
    assert compare([one]).equal["rounds"] == 5
    assert score(compare([one]), "A", "end") == (0.7, None)


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
    assert choose_metric([Run(pathlib.Path("A"), "", "A", 0, "done", rows)]) == METRICS[names]


def test_only_common_metrics_can_be_compared() -> None:
    both = [run("A", 0, [0.1], (1, 1, 1), metric="loss"), run("B", 0, [0.1], (1, 1, 1))]
    with pytest.raises(RunError, match="no metric in common"):
        compare(both)
    with pytest.raises(RunError, match=r"not all runs have a metric 'acuracy'.*did you mean 'accuracy'\?"):
        compare(both[1:], "acuracy")
    with pytest.raises(RunError, match="no metric in common"):
        compare(both, "seconds")
    with pytest.raises(RunError, match="no run has been evaluated"):
        compare([run("A", 0, [], (1, 1, 1))])


def test_the_better_direction_is_known_by_name_or_given() -> None:
    losses = [run(name, 0, [value], (1, 1, 1), metric="loss") for name, value in (("A", 0.1), ("B", 0.2))]
    assert compare(losses).better == "min"
    assert "* 0.1 ± -" in str(compare(losses))
    assert "* 0.2 ± -" in str(compare(losses, better="max"))
    with pytest.raises(RunError, match='must be "max" or "min"'):
        compare(losses, better="least")  # type: ignore[arg-type]


def test_the_table_says_it_all_in_plain_text() -> None:
    runs = [run("A [x]", seed, [0.25 * (seed + 1)] * 2, (1234, 5_600_000, 7)) for seed in (0, 1)]
    runs += [run("B", 0, [0.1, 0.2], (1234, 5_600_000, 7)), run("B", 1, [0.1], (1, 1, 1), status="diverged")]
    lines = str(compare(runs)).splitlines()
    assert lines[0] == "accuracy (best: max, marked *)"
    assert lines[1].endswith("  at the end")
    assert all(title in lines[1] for title in ("at 1,234 rounds", "at 5.6 MB", "at 7 calls"))
    assert lines[3].split() == ["A", "[x]", "2", "0", *["*", "0.375", "±", "0.18"] * 4]
    assert lines[4].split() == ["B", "1", "1", *["0.2", "±", "-"] * 4]
    assert lines[5] == "B: of 2 runs, those of seed 1 diverged and do not count"
    assert len(lines) == 6


def test_the_rich_table_shows_names_and_notes_as_they_are() -> None:
    runs = [run("[red]A", 0, [0.1], (1, 1, 1)), run("[red]A", 1, [0.1], (1, 1, 1), status="diverged")]
    with (console := Console(width=150, record=True, quiet=False)).capture() as shown:
        console.print(compare(runs).table())
    assert shown.get().count("[red]A") == 2


def test_json_is_strict() -> None:
    runs = [run("A", 0, [0.5], (1, 1, 1)), run("B", 0, [0.5], (1, 1, 1), status="diverged")]
    data = json.loads(compare(runs).to_json(), parse_constant=pytest.fail)
    assert data["equal"] == {"rounds": 0, "bytes": 0, "calls": 0}
    assert data["lines"][0]["scores"]["end"] == {"mean": 0.5, "std": None}
    assert data["lines"][1] == {
        "variant": "B",
        "seeds": 0,
        "diverged": 1,
        "scores": {place: {"mean": None, "std": None} for place in (*COSTS, "end")},
    }
