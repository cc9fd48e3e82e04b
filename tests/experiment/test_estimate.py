"""Estimates from one step: exact where costs are, and nothing is written."""

import math
import os
from typing import Any

import jax.numpy as jnp
import pytest

from experiment.tiny import SADDLE, changed, plan
from fedbilevel import Ledger, solve
from fedbilevel.engine.simulator import SimulatedSession
from fedbilevel.experiment import estimate as module
from fedbilevel.experiment.build import build
from fedbilevel.experiment.estimate import Estimate, estimate


def test_the_cost_is_that_of_the_run_and_nothing_is_written(tmp_path: Any, monkeypatch: Any) -> None:
    wanted = plan(tmp_path)
    empty = tmp_path / "here"
    empty.mkdir()
    monkeypatch.chdir(empty)
    found = estimate(wanted)
    problem, clients, algorithm, *_ = build(wanted)
    spent = solve(problem, clients, algorithm, 6, every=2).ledger
    assert found.steps * found.spent.bytes == spent.bytes
    assert found.steps * found.spent.rounds == spent.rounds
    assert os.listdir(empty) == []
    assert sorted(os.listdir(tmp_path)) == ["here", "tiny.toml"]


def test_times_and_memory_are_positive_and_add_up(tmp_path: Any) -> None:
    found = estimate(plan(tmp_path, steps=1000, every=10))
    assert 0 < found.step < 10
    assert 0 < found.evaluation < 10
    assert found.evaluations == 100
    assert found.seconds == pytest.approx(found.preparation + 1000 * found.step + 100 * found.evaluation)
    assert 2**26 < found.memory < 2**38


@pytest.mark.parametrize(("long", "steps"), [(math.inf, 2), (0.0, 1)])
def test_a_long_step_is_made_once(tmp_path: Any, monkeypatch: Any, long: float, steps: int) -> None:
    """A short one twice, so that its time is one without compilation."""
    made, advance = [], SimulatedSession.advance

    def counted(*given: Any) -> Any:
        made.append(given)
        return advance(*given)

    monkeypatch.setattr(SimulatedSession, "advance", counted)
    monkeypatch.setattr(module, "LONG", long)
    found = estimate(plan(tmp_path))
    assert len(made) == steps
    assert found.once == (steps == 1)
    assert ("at most" in str(found)) == ("with its compilation" in str(found)) == found.once


def test_a_run_of_no_steps_makes_none(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(SimulatedSession, "advance", lambda *_: pytest.fail("a step was made"))
    found = estimate(plan(tmp_path, steps=0))
    assert (found.step, found.spent.bytes, found.seconds) == (0, 0, found.preparation)


def test_it_says_so_in_words() -> None:
    ledger = Ledger(3, {"x": 1_000_000}, {"y": 500_000}, {}, {}, 0)
    text = str(Estimate(10.0, 0.5, 1.0, ledger, Ledger(7, {"x": 10**6}), False, 200, 50, 2**30))
    for part in ("200 steps", "2.7 min", "301.0 MB", "607 rounds", "1.00 GiB", "500.0 ms", "1,000.0 ms"):
        assert part in text


def test_double_precision_costs_twice(tmp_path: Any) -> None:
    single, double = estimate(plan(tmp_path)), estimate(plan(tmp_path, precision="float64"))
    assert double.spent.bytes == 2 * single.spent.bytes
    assert jnp.ones(1).dtype == "float32"


def test_mistakes_are_found_without_a_run(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"tiny\.toml: .*no measure 'client_drif'"):
        estimate(plan(tmp_path, measure=["client_drif"]))
    with pytest.raises(ValueError, match=r"tiny\.toml: cohort is 4"):
        estimate(plan(tmp_path, changed(SADDLE, ("cohort = 2", "cohort = 4"))))


def test_a_first_step_that_diverges_is_said(tmp_path: Any) -> None:
    found = estimate(plan(tmp_path, algorithm__upper_lr=1e39))
    assert found.diverged
    assert math.isfinite(found.seconds)
    assert "DIVERGES" in str(found)
