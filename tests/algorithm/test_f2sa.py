"""F²SA on quadratics: an affine map, a fixed point that is O(1/λ) from the solution, and its cost."""

import jax
import numpy as np
import optax
import pytest

import fedbilevel as fb
from algorithm.quadratics import (
    CLIENTS,
    DX,
    DY,
    GLOBAL,
    SAMPLES,
    X0,
    Y0,
    Running,
    clients_of,
    drawn,
    fedbio_round,
    gradients,
)
from fedbilevel.algorithm.f2sa import F2SA

pytestmark = pytest.mark.usefixtures("float64")

UNEQUAL = (1, 4, 2, 6)
START = (X0, Y0, Y0)


def penalty_field(q, penalty):
    """`∇_x g_i = −B_iᵀy`."""

    def at(i, z):
        x, y, v = z
        f_x, f_y, g_y = gradients(q, i, x, y)
        return f_x - penalty * q.B[i].T @ (y - v), f_y / penalty + g_y, gradients(q, i, x, v)[2]

    return at


def fixed_point(q, penalty):
    """The zero of the mean field, which is affine in (x, y, v): x of it."""
    field, size = penalty_field(q, penalty), DX + 2 * DY

    def mean(z):
        parts = np.split(z, [DX, DX + DY])
        return np.mean([np.concatenate(field(i, parts)) for i in range(CLIENTS)], axis=0)

    offset = mean(np.zeros(size))
    matrix = np.stack([mean(row) - offset for row in np.eye(size)], axis=1)
    return np.linalg.solve(matrix, -offset)[:DX]


@pytest.mark.parametrize("counts", [(1,) * CLIENTS, UNEQUAL], ids=str)
def test_every_iterate_is_the_box(counts):
    q, rates = drawn(2), (0.01, 0.1, 0.1)
    running, rows = Running(clients_of(q), F2SA(0.01, 0.1, 10.0, sync_every=counts)), [START] * CLIENTS
    for _ in range(5):
        rows = fedbio_round(penalty_field(q, 10.0), GLOBAL, rows, rates, counts, range(CLIENTS))
        for found, expected in zip(running.advance().state, rows[0], strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    other = fedbio_round(penalty_field(q, 11.0), GLOBAL, rows, rates, counts, range(CLIENTS))
    assert np.max(np.abs(running.advance().state.x - other[0][0])) > 1e-5


def test_the_penalty_follows_a_schedule_of_the_round():
    q = drawn(2)
    growing = optax.linear_schedule(2.0, 10.0, 4)
    running, rows = Running(clients_of(q), F2SA(0.01, 0.1, growing)), [START] * CLIENTS
    for penalty in (2.0, 4.0, 6.0):
        field = penalty_field(q, penalty)
        rows = fedbio_round(field, GLOBAL, rows, (0.01, 0.1, 0.1), (1,) * CLIENTS, range(CLIENTS))
        np.testing.assert_allclose(running.advance().state.x, rows[0][0], rtol=0, atol=1e-12)


def test_its_limit_is_the_fixed_point_and_a_tenth_as_wrong_with_ten_times_the_penalty():
    q, errors = drawn(), []
    best = np.asarray(q.solution())
    for penalty in (10.0, 100.0, 1000.0):
        expected = fixed_point(q, penalty)
        errors.append(np.linalg.norm(expected - best))
    np.testing.assert_allclose([errors[0] / errors[1], errors[1] / errors[2]], 10, rtol=0.2)
    found = Running(clients_of(q), F2SA(0.02, 0.2, 10.0)).advance(4000).state.x
    np.testing.assert_allclose(found, fixed_point(q, 10.0), rtol=0, atol=1e-10)
    assert np.linalg.norm(found - best) > 1e-3


def test_no_second_derivatives_are_taken_and_a_step_costs_what_the_docstring_says():
    ledger = Running(clients_of(drawn()), F2SA(0.01, 0.1, 10.0, sync_every=UNEQUAL)).advance().ledgers[0]
    steps, scalars = sum(UNEQUAL), DX + 2 * DY
    assert ledger.calls == {"f_x": steps, "f_y": steps, "g_x": 2 * steps, "g_y": 2 * steps}
    assert ledger.samples == 3 * SAMPLES * steps
    assert (ledger.rounds, ledger.down, ledger.up) == (1, *[{"z": 8 * CLIENTS * scalars}] * 2)


@pytest.mark.parametrize(
    "penalty", [0.0, -1.0, "many", None, np.float32(-2), float("inf"), float("nan")], ids=str
)
def test_a_penalty_is_above_zero(penalty):
    with pytest.raises(ValueError, match=r"penalty is .*; it must be a number above 0, or an optax schedule"):
        F2SA(0.01, 0.1, penalty)


def test_it_solves_from_the_front_door():
    known = fb.Quadratic.random(jax.random.key(0), CLIENTS, DX, DY)
    result = fb.solve(known.problem(), known.clients(), F2SA(0.02, 0.2, 20.0), steps=500)
    assert result.history[-1]["error"] < 0.1 * result.history[0]["error"]
