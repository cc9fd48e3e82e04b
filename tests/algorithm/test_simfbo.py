"""SimFBO and ShroFBO on quadratics: every iterate is a closed form, and so is where unequal work leads."""

import equinox as eqx
import numpy as np
import pytest

import fedbilevel as fb
from algorithm.quadratics import CLIENTS, DX, DY, X0, Y0, Running, clients_of, drawn, global_field
from fedbilevel.algorithm.simfbo import ShroFBO, SimFBO

pytestmark = pytest.mark.usefixtures("float64")

RATES = (0.03, 0.08, 0.05)
UNEQUAL = (1, 4, 2, 6)
START = (X0, Y0, np.zeros(DY))


def box(q, z, rates, *, local_lr=1.0, counts=(1,) * CLIENTS, discount=1.0, radius=None, per_step=False):
    """One round, as the paper has it: a loop over clients and steps."""
    field, sums, totals = global_field(q), [], []
    for i, count in enumerate(counts):
        own, q_i = z, [np.zeros_like(part) for part in z]
        weights = [discount ** (count - 1 - k) for k in range(count)]
        for a in weights:
            d = field(i, own)
            q_i = [part + a * direction for part, direction in zip(q_i, d, strict=True)]
            own = tuple(v - a * local_lr * r * p for v, r, p in zip(own, rates, d, strict=True))
        sums.append(q_i)
        totals.append(sum(weights))
    if per_step:
        sums = [
            [np.mean(totals) * part / total for part in own] for own, total in zip(sums, totals, strict=True)
        ]
    mean = [np.mean([own[j] for own in sums], axis=0) for j in range(3)]
    x, y, u = (v - r * d for v, r, d in zip(z, rates, mean, strict=True))
    return x, y, u if radius is None else u * min(1, radius / np.linalg.norm(u))


CASES = {
    "plain": {},
    "local steps": {"counts": (5,) * CLIENTS, "local_lr": 0.4},
    "unequal": {"counts": UNEQUAL, "local_lr": 2.0},
    "discount": {"counts": UNEQUAL, "discount": 0.7},
    "short u": {"counts": UNEQUAL, "radius": 0.05},
    "per step": {"counts": UNEQUAL, "per_step": True},
    "per step, discount": {"counts": UNEQUAL, "per_step": True, "discount": 0.7, "local_lr": 0.3},
}


def method(counts=(1,) * CLIENTS, per_step=False, **settings):
    return (ShroFBO if per_step else SimFBO)(*RATES, sync_every=counts, **settings)


@pytest.mark.parametrize("case", CASES)
def test_every_iterate_is_the_box(case):
    settings, q = CASES[case], drawn(2)
    running, z = Running(clients_of(q), method(**settings)), START
    for _ in range(5):
        z = box(q, z, RATES, **settings)
        running.advance()
        for found, expected in zip(running.state, z, strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    other = box(q, z, RATES, **settings | {"counts": (2,) * CLIENTS})
    assert np.max(np.abs(running.advance().state.x - other[0])) > 1e-6


def test_the_same_step_sizes_on_both_sides_are_fedbio():
    q = drawn(3)
    ours = Running(clients_of(q), SimFBO(*RATES, sync_every=UNEQUAL)).advance(20).state
    fedbio = Running(clients_of(q), fb.FedBiO(*RATES, sync_every=UNEQUAL)).advance(20).state
    for found, expected in zip(ours, fedbio.shared, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


# ------------------------------------------------------------------ limits


def limit(q, make, local_lr):
    return Running(clients_of(q), make(*RATES, sync_every=UNEQUAL, local_lr=local_lr)).advance(4000).state.x


def weighted(q, counts):
    """The quadratic whose plain means are the weighted ones of q."""
    share = np.asarray(counts) / np.mean(counts)
    names = ("A", "B", "b", "D", "E", "rho")
    rows = [(getattr(q, name).T * share).T for name in names]
    return eqx.tree_at(lambda q: [getattr(q, name) for name in names], q, rows)


def test_unequal_work_draws_simfbo_away_but_not_shrofbo():
    """The error of ShroFBO falls with the local steps; SimFBO goes where clients count by their work."""
    q = drawn()
    best, drawn_to = np.asarray(q.solution()), np.asarray(weighted(q, UNEQUAL).solution())
    assert np.max(np.abs(best - drawn_to)) > 0.05

    errors = [np.linalg.norm(limit(q, ShroFBO, lr) - best) for lr in (0.4, 0.2, 0.1)]
    np.testing.assert_allclose([errors[0] / errors[1], errors[1] / errors[2]], 2, rtol=0.1)
    away = [np.linalg.norm(limit(q, SimFBO, lr) - drawn_to) for lr in (0.4, 0.2, 0.1)]
    np.testing.assert_allclose([away[0] / away[1], away[1] / away[2]], 2, rtol=0.1)
    assert np.linalg.norm(limit(q, SimFBO, 0.1) - best) > 0.05


def test_one_local_step_has_no_drift():
    q = drawn()
    found = Running(clients_of(q), SimFBO(*RATES)).advance(4000).state.x
    np.testing.assert_allclose(found, np.asarray(q.solution()), rtol=0, atol=1e-10)


# ------------------------------------------------------------------ cost and mistakes


@pytest.mark.parametrize(("make", "more"), [(SimFBO, 0), (ShroFBO, 1)])
def test_a_step_costs_what_the_docstring_says(make, more):
    ledger = Running(clients_of(drawn()), make(*RATES, sync_every=UNEQUAL)).advance().ledgers[0]
    scalars = DX + 2 * DY
    assert (ledger.rounds, ledger.down, ledger.up) == (
        1,
        {"z": 8 * CLIENTS * scalars},
        {"q": 8 * CLIENTS * (scalars + more)},
    )
    assert ledger.calls == dict.fromkeys(("f_x", "f_y", "g_y", "g_xy", "g_yy"), sum(UNEQUAL))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"discount": 1.5}, "discount is 1.5; it must be a number between 0 and 1"),
        ({"discount": 0}, "discount is 0; it must be a number above 0"),
        ({"radius": 0.0}, "radius is 0.0; it must be a number above 0"),
        ({"sync_every": 0}, "sync_every is 0"),
        ({"local_lr": -1.0}, "a step size is -1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        SimFBO(*RATES, **settings)


def test_as_many_numbers_of_steps_as_clients():
    with pytest.raises(ValueError, match="sync_every has 2 numbers, but there are 4 clients"):
        Running(clients_of(drawn()), SimFBO(*RATES, sync_every=(1, 2)))
