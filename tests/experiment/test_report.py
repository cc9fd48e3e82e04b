"""Runs compared at equal cost."""

import json
import math
import pathlib
from typing import Any

import pytest
from rich.console import Console

from experiment.recorded_rows import row, run
from fedbilevel.experiment.record import History
from fedbilevel.experiment.recorded import COSTS, RecordedRun, RunError
from fedbilevel.experiment.report import compare


def score(comparison: Any, variant: str, place: str) -> tuple[float, float | None]:
    line = next(line for line in comparison.lines if line.variant == variant)
    return line.scores[place].mean, line.scores[place].std


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


def test_runs_of_other_lengths_are_noted() -> None:
    runs = [run("A", seed, [0.1, 0.5, 0.9][: 3 - seed], (1, 1, 1)) for seed in (0, 1)]
    (note,) = compare(runs).notes
    assert "those of seed 1 made other numbers of steps than the longest" in note


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
    one = RecordedRun(pathlib.Path("A"), "figure 1", "A", 0, "done", History(rows))
    assert compare([one]).equal["rounds"] == 5
    assert score(compare([one]), "A", "end") == (0.7, None)


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


def test_the_test_metric_is_reported_where_the_validation_metric_was_best(tmp_path: pathlib.Path) -> None:
    """Not where it is best itself, nor at the end."""
    runs = []
    for seed, validation in enumerate(([0.1, 0.9, 0.3], [0.1, 0.2, 0.3])):
        rows = [
            row(i, i, i, i, accuracy=test, validation_accuracy=seen)
            for i, (test, seen) in enumerate(zip([0.8, 0.5, 0.7], validation, strict=True))
        ]
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "config.toml").write_text('[best]\nmetric = "validation_accuracy"\n')
        runs.append(RecordedRun(folder, "figure 1", "A", seed, "done", History(tuple(rows))))
    comparison = compare([*runs, run("B", 0, [0.4, 0.6], (1, 1, 1))], "accuracy")
    assert score(comparison, "A", "best") == (pytest.approx(0.6), pytest.approx(math.sqrt(0.02)))
    assert math.isnan(score(comparison, "B", "best")[0]), "it does not say what its best point is"
    lines = str(comparison).splitlines()
    assert "at the end at best validation_accuracy wobble" in " ".join(lines[1].split())
    assert json.loads(comparison.to_json())["chosen_by"] == ["validation_accuracy"]
    assert "at best" not in str(compare([run("B", 0, [0.4, 0.6], (1, 1, 1))]))


def test_the_table_says_it_all_in_plain_text() -> None:
    runs = [run("A [x]", seed, [0.25 * (seed + 1)] * 2, (1234, 5_600_000, 7)) for seed in (0, 1)]
    runs += [run("B", 0, [0.1, 0.2], (1234, 5_600_000, 7)), run("B", 1, [0.1], (1, 1, 1), status="diverged")]
    lines = str(compare(runs)).splitlines()
    assert lines[0] == "accuracy (best: max, marked *)"
    assert lines[1].split()[-4:] == ["at", "the", "end", "wobble"]
    assert all(title in lines[1] for title in ("at 1,234 rounds", "at 5.6 MB", "at 7 calls"))
    assert lines[3].split() == ["A", "[x]", "2", "0", *["*", "0.375", "±", "0.18"] * 4, "0"]
    assert lines[4].split() == ["B", "1", "1", *["0.2", "±", "-"] * 4, "0.05"]
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
        "wobble": {"mean": None, "std": None},
    }
