"""FedMSA and FedGDA-GT: their boxes in numpy, limits without drift, and what they cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from algorithm.quadratics import (
    CLIENTS,
    DX,
    DY,
    SAMPLES,
    X0,
    Y0,
    Running,
    clients_of,
    drawn,
    global_field,
    stepped,
)
from fedbilevel.algorithm.fedgda import FedGDAGT
from fedbilevel.algorithm.fedmsa import FedMSA

pytestmark = pytest.mark.usefixtures("float64")

RATES = (0.03, 0.08, 0.05)
UNEQUAL = (1, 4, 2, 6)
START = (X0, Y0, np.zeros(DY))


def mean(rows):
    return tuple(np.mean([row[j] for row in rows], axis=0) for j in range(len(rows[0])))


def minus(a, b, factor=1.0):
    return tuple(p - factor * q for p, q in zip(a, b, strict=True))


def anchored(field, z, m, rates, counts):
    """Local steps from a common direction, and the mean of where they lead."""
    reached = []
    for i, count in enumerate(counts):
        before, own, d = z, stepped(z, rates, m), m
        for _ in range(count - 1):
            d = minus(d, minus(field(i, before), field(i, own)))
            before, own = own, stepped(own, rates, d)
        reached.append(own)
    return mean(reached)


def momenta(field, z, before, m, renew):
    clients = range(CLIENTS)
    here = mean([field(i, z) for i in clients])
    return here if m is None else minus(here, minus(mean([field(i, before) for i in clients]), m), 1 - renew)


@pytest.mark.parametrize("renew", [None, 0.3])
@pytest.mark.parametrize("counts", [(1,) * CLIENTS, (5,) * CLIENTS, UNEQUAL], ids=str)
def test_every_iterate_is_the_box(counts, renew):
    q = drawn(2)
    running = Running(clients_of(q), FedMSA(*RATES, sync_every=counts, renew=renew))
    field, z, before, m = global_field(q), START, START, None
    for _ in range(5):
        m = momenta(field, z, before, None if renew is None else m, renew)
        z, before = anchored(field, z, m, RATES, counts), z
        running.advance()
        for found, expected in zip(running.state.z, z, strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    plain = fb.FedBiO(*RATES, sync_every=counts)
    drifting = Running(clients_of(q), plain).advance(5).state.shared
    if counts != (1,) * CLIENTS:
        assert np.max(np.abs(drifting[0] - running.state.z[0])) > 1e-3


def test_with_all_samples_memory_changes_nothing_at_rest():
    """Momenta of other shares lead to one solution, that of the problem, through any local steps."""
    q = drawn()
    best = np.asarray(q.solution())
    for renew in (None, 0.5):
        method = FedMSA(*RATES, sync_every=UNEQUAL, renew=renew)
        found = Running(clients_of(q), method).advance(4000).state.z[0]
        np.testing.assert_allclose(found, best, rtol=0, atol=1e-10)
    drifting = Running(clients_of(q), fb.FedBiO(*RATES, sync_every=UNEQUAL)).advance(4000).state.shared[0]
    assert np.max(np.abs(drifting - best)) > 1e-3, "the control must drift"


def test_memory_makes_the_noise_of_the_directions_smaller():
    """Batches of one of two samples: how far momenta are from the mean direction at their point."""
    q = drawn()
    field, clients = global_field(q), clients_of(q, batch_size=1)

    def error(renew):
        running, squares = Running(clients, FedMSA(0.01, 0.02, 0.02, renew=renew)).advance(50), []
        for _ in range(40):
            state = running.advance().state
            exact = mean([field(i, state.before) for i in range(CLIENTS)])
            squares.append(sum(np.sum((m - d) ** 2) for m, d in zip(state.momenta, exact, strict=True)))
        return np.mean(squares)

    assert error(0.1) < 0.2 * error(1.0)


@pytest.mark.parametrize(("renew", "down"), [(None, 2), (0.5, 3)])
def test_a_step_costs_what_the_docstring_says(renew, down):
    method = FedMSA(*RATES, sync_every=UNEQUAL, renew=renew)
    for ledger in Running(clients_of(drawn()), method).advance(2).ledgers:
        scalars, times = DX + 2 * DY, 2 * sum(UNEQUAL) - (CLIENTS if renew is None else 0)
        assert ledger.rounds == 2
        assert sum(ledger.down.values()) == down * 8 * CLIENTS * scalars
        assert sum(ledger.up.values()) == 2 * 8 * CLIENTS * scalars
        assert ledger.calls == dict.fromkeys(("f_x", "f_y", "g_y", "g_xy", "g_yy"), times)
        assert ledger.samples == 5 * SAMPLES * times


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"renew": 1.5}, "renew is 1.5; it must be a number between 0 and 1"),
        ({"renew": 0.0}, "renew is 0.0; it must be a number above 0"),
        ({"sync_every": 0}, "sync_every is 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        FedMSA(*RATES, **settings)


# ------------------------------------------------------------------ saddle points


def saddle(seed=1):
    known = fb.Saddle.random(jax.random.key(seed), CLIENTS, 3, centred=False, penalty=2.0)
    draws = np.random.default_rng(seed)
    A, penalty = draws.normal(size=(CLIENTS, 3, 3)), draws.uniform(1.0, 3.0, CLIENTS)
    return fb.Saddle(jnp.asarray(A), known.b, jnp.asarray(penalty))


def saddle_field(known):
    """`(∇_x f_i, −∇_y f_i)` of the saddle `f_i = −[½‖y‖² − b_iᵀy + yᵀA_i x] + (λ_i/2)‖x‖²`."""
    A, b, penalty = (np.asarray(leaf) for leaf in (known.A, known.b, known.penalty))
    return lambda i, z: (penalty[i] * z[0] - A[i].T @ z[1], z[1] - b[i] + A[i] @ z[0])


def run(known, algorithm, steps):
    result = fb.solve(known.problem(), known.clients(), algorithm, steps=steps, every=steps)
    return np.asarray(result.x), np.asarray(result.y), result.ledger


@pytest.mark.parametrize("counts", [3, UNEQUAL], ids=str)
def test_fedgda_gt_is_its_box_and_reaches_the_saddle_point(counts):
    known, rates = saddle(), (0.05, 0.1)
    field, z = saddle_field(known), (np.ones(3), np.ones(3))
    for _ in range(4):
        m = mean([field(i, z) for i in range(CLIENTS)])
        z = anchored(field, z, m, rates, np.broadcast_to(counts, CLIENTS).tolist())
    x, y, ledger = run(known, FedGDAGT(*rates, sync_every=counts), 4)
    np.testing.assert_allclose(np.concatenate([x, y]), np.concatenate(z), rtol=0, atol=1e-12)
    times = 4 * (2 * int(np.sum(np.broadcast_to(counts, CLIENTS))) - CLIENTS)
    assert ledger.calls == {"f_x": times, "f_y": times}
    assert (ledger.rounds, ledger.bytes) == (8, 4 * CLIENTS * 2 * 2 * 8 * 6)

    best = np.concatenate([np.asarray(part) for part in known.solution()])
    found = np.concatenate(run(known, FedGDAGT(*rates, sync_every=counts), 3000)[:2])
    np.testing.assert_allclose(found, best, rtol=0, atol=1e-10)
    control = np.concatenate(run(known, fb.FedAvgS(*rates, steps=counts), 3000)[:2])
    assert np.max(np.abs(control - best)) > 1e-3, "local SGDA must drift"


def test_only_minimax_problems_have_saddle_points():
    known = fb.Quadratic.random(jax.random.key(0), 2, 2, 2)
    with pytest.raises(
        ValueError, match="FedGDAGT finds saddle points of minimax problems; this one is bilev"
    ):
        fb.solve(known.problem(), known.clients(), FedGDAGT(0.1, 0.1), steps=1)
