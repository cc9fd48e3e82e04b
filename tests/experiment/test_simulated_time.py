"""The simulated time of runs: set in experiment files, recorded, compared and drawn."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import fedbilevel as fb
from experiment.recorded_rows import run
from experiment.tiny import SADDLE, plan
from fedbilevel.experiment import figure
from fedbilevel.experiment.build import build
from fedbilevel.experiment.figure import draw_curves
from fedbilevel.experiment.reach import COLUMNS, reach
from fedbilevel.experiment.record import History
from fedbilevel.experiment.recorded import RecordedRun, choose_metric, costs_of
from fedbilevel.experiment.registry import ConfigError
from fedbilevel.experiment.report import compare

ENGINE = """
[engine]
kind = "simulator"
availability = { kind = "OnOff", leaves = 0.1, returns = 0.4 }
speed = { kind = "Speed", call = { kind = "LogNormal", median = 0.01, between = 0.5 }, sample = 1e-4 }
link = { kind = "Link", latency = [0.01, 0.02, 0.03], up = 1e6 }
deadline = 0.5
"""


def timed(recorded: RecordedRun, seconds: float) -> RecordedRun:
    """The run with so many seconds between two evaluations."""
    rows = tuple(row | {"simulated_seconds": seconds * i} for i, row in enumerate(recorded.rows))
    return dataclasses.replace(recorded, rows=History(rows))


SLOW = timed(run("slow", 0, [0.1, 0.2, 0.4, 0.8], (1, 1, 1)), 10.0)
FAST = timed(run("fast", 0, [0.1, 0.2, 0.3, 0.4], (1, 1, 1)), 5.0)
UNTIMED = run("other", 0, [0.1, 0.2, 0.3, 0.4], (1, 1, 1))


def test_a_file_says_all_that_python_can(tmp_path: Any) -> None:
    conditions = fb.conditions
    built = build(plan(tmp_path, SADDLE + ENGINE)).engine
    speed = conditions.Speed(call=conditions.LogNormal(0.01, between=0.5), sample=1e-4)
    link = conditions.Link(latency=[0.01, 0.02, 0.03], up=1e6)
    expected = fb.Simulator(availability=conditions.OnOff(0.1, 0.4), speed=speed, link=link, deadline=0.5)
    assert str(built) == str(expected)
    assert [float(v) for v in built.link.latency.median] == pytest.approx([0.01, 0.02, 0.03])
    assert (float(built.speed.call.median), float(built.deadline)) == (pytest.approx(0.01), 0.5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"OnOff", leaves', '"OnOf", leaves', "engine.availability.kind: .*did you mean 'OnOff'"),
        ("returns = 0.4", "return = 0.4", "there is no engine.availability.return; did you mean 'returns'"),
        ("returns = 0.4", "returns = 0.95", "engine.availability: .*their sum must be at most 1"),
        ("latency = [0.01, 0.02, 0.03]", "latency = -1", "engine.link: latency is -1"),
        ("deadline = 0.5", 'deadline = "soon"', "engine: deadline is 'soon'; it must be a number"),
        ("median = 0.01", 'median = "a"', "engine.speed.call: median is 'a'; it must be a number"),
    ],
)
def test_a_mistake_is_said_with_its_place(tmp_path: Any, old: str, new: str, message: str) -> None:
    assert old in ENGINE
    with pytest.raises(ConfigError, match=message):
        build(plan(tmp_path, SADDLE + ENGINE.replace(old, new)))


def test_all_runs_must_have_a_time_for_it_to_be_compared() -> None:
    assert costs_of([SLOW, FAST]) == ("rounds", "bytes", "calls", "time")
    assert costs_of([SLOW, UNTIMED]) == ("rounds", "bytes", "calls")
    assert choose_metric([SLOW, FAST]) == "accuracy", "time is no metric"


def test_variants_are_compared_at_equal_time() -> None:
    comparison = compare([SLOW, FAST])
    assert comparison.equal["time"] == 15.0
    scores = {line.variant: line.scores["time"].mean for line in comparison.lines}
    assert scores == {"slow": 0.2, "fast": 0.4}
    assert "at 15 s" in str(comparison)
    assert "time" not in compare([SLOW, UNTIMED]).equal


def test_the_time_to_a_level_is_everybodys() -> None:
    lines = reach([SLOW, FAST], 0.4).lines
    assert {line.variant: line.costs["seconds"].mean for line in lines} == {"slow": 20.0, "fast": 15.0}
    assert set(reach([SLOW, UNTIMED], 0.4).lines[0].costs) == set(COLUMNS)


def test_there_is_a_panel_against_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    made = {}
    monkeypatch.setattr(figure, "_save", lambda drawn, path: made.update({path.name: drawn}) or [])
    draw_curves([SLOW, FAST], None, tmp_path, "all")
    assert list(made) == ["all", "all-rounds", "all-bytes", "all-calls", "all-time"]
    assert [axes.get_xlabel() for axes in made["all"].axes][-1] == "simulated seconds"
    assert made["all-time"].axes[0].lines[0].get_xdata().max() == 30.0
