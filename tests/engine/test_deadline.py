"""A real federation with a slow client, and its simulation under the times that were measured."""

from __future__ import annotations

import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from conform.cases import distance
from fedbilevel.engine.conditions import Link
from rogue_worker import SLOW, VICTIM, Average

DEADLINE = SLOW / 2
STEPS = 4
ALL, OTHERS = 5 / 3, 2.0
"""What a step of `Average` adds to x when everyone answers, and when the victim does not."""


def averaged(engine: Any, steps: int, callback: Any = None) -> fb.Result:
    problem = fb.single_level(distance, jnp.zeros(3))
    clients = fb.Clients(jnp.zeros((3, 1, 3)))
    return fb.solve(problem, clients, Average("slow"), steps, engine=engine, every=1, callback=callback)


@pytest.fixture(scope="module")
def real(processes: fb.Process) -> Any:
    """x and the clock after each step; the deadline counts once the clients have compiled their programs."""
    seen = []

    def note(evaluation: Any) -> None:
        seen.append((float(evaluation.x[0]), time.monotonic()))
        processes.deadline = DEADLINE if evaluation.row["step"] >= 1 else None

    processes.exchanges.clear()
    try:
        result = averaged(processes, STEPS, note)
    finally:
        processes.deadline = None
    return result, np.diff(np.array(seen), axis=0)


def test_a_late_client_is_left_out_and_lives(real: Any) -> None:
    result, differences = real
    np.testing.assert_allclose(differences[:, 0], [ALL, *[OTHERS] * (STEPS - 1)], rtol=1e-6)
    assert len(result.failures) == STEPS - 1
    for line in result.failures:
        assert line.startswith(f"client {VICTIM}: it did not answer within the deadline of {DEADLINE:g} s")


def test_its_simulation_agrees_on_who_answers_and_on_the_time(real: Any, processes: fb.Process) -> None:
    link = Link.measured(processes.exchanges, 3)
    simulated = averaged(fb.Simulator(link=link, deadline=DEADLINE), STEPS - 1)
    steps = np.diff(simulated.history.column("simulated_seconds"))
    _, differences = real
    np.testing.assert_allclose(np.asarray(simulated.x), differences[1:, 0].sum(), rtol=1e-6)
    assert np.all((differences[1:, 1] > steps / 2) & (differences[1:, 1] < steps * 2)), differences
    np.testing.assert_allclose(steps, DEADLINE, rtol=1e-5)


def test_without_a_deadline_both_wait_for_the_last(real: Any, processes: fb.Process) -> None:
    link = Link.measured(processes.exchanges, 3)
    simulated = averaged(fb.Simulator(link=link), 1)
    _, differences = real
    np.testing.assert_allclose(simulated.x, ALL, rtol=1e-6)
    seconds = simulated.ledger.seconds
    assert seconds is not None
    assert SLOW <= seconds < 2 * SLOW
    assert differences[0, 1] >= SLOW


def test_a_late_client_comes_back_when_it_is_fast_again(processes: fb.Process, real: Any) -> None:
    """It keeps its process, works off what it was sent, and answers the next run."""
    problem, clients = fb.single_level(distance, jnp.zeros(3)), fb.Clients(jnp.zeros((3, 1, 3)))
    result = fb.solve(problem, clients, Average("none"), 2, engine=processes)
    np.testing.assert_allclose(result.x, 2 * ALL, rtol=1e-6)
    assert not result.failures


@pytest.mark.parametrize("deadline", [0, -1.0, float("nan")])
def test_a_deadline_is_above_zero(deadline: float) -> None:
    with pytest.raises(ValueError, match=r"deadline is .*; it must be a number of seconds above 0"):
        fb.Process(deadline=deadline)


def test_a_client_that_was_never_measured_is_named() -> None:
    with pytest.raises(ValueError, match=r"nothing was measured of clients \[1\]"):
        Link.measured([{0: 0.1}, {0: 0.2, 2: 0.1}], 3)
