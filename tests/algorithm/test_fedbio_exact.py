"""FedBiO on quadratics: every iterate is a closed form, so are its fixed point and its bias."""

import itertools

import numpy as np
import pytest

import fedbilevel as fb
from algorithm.quadratics import (
    CLIENTS,
    DX,
    DY,
    GLOBAL,
    LOCAL,
    X0,
    Y0,
    Running,
    clients_of,
    distance,
    drawn,
    fedbio_round,
    global_field,
    local_field,
)

pytestmark = pytest.mark.usefixtures("float64")

RATES = {"upper_lr": 0.03, "lower_lr": 0.08, "adjoint_lr": 0.05}
TERMS = 3
UNEQUAL = (1, 4, 2, 6)
EVERYONE = range(CLIENTS)
START = np.concatenate([X0, Y0, np.zeros(DY)])


def affine(q, i, upper_lr, lower_lr, adjoint_lr):
    """`z ↦ T_i z + t_i` on `z = (x, y, u)`: a local step of client i."""
    A, B, D, E = q.A[i], q.B[i], q.D[i], q.E[i]
    matrix = np.block(
        [
            [(1 - upper_lr * q.rho[i]) * np.eye(DX), -upper_lr * E, -upper_lr * B.T],
            [lower_lr * B, np.eye(DY) - lower_lr * A, np.zeros((DY, DY))],
            [adjoint_lr * E.T, adjoint_lr * D, np.eye(DY) - adjoint_lr * A],
        ]
    )
    offset = upper_lr * q.rho[i] * q.e[i], lower_lr * q.b[i], -adjoint_lr * D @ q.c[i]
    return matrix, np.concatenate(offset)


def round_map(q, sync_every, members=EVERYONE, **rates):
    """`z̄ ↦ mean(T_i^I) z̄ + mean(Σ_{j<I} T_i^j t_i)`."""
    counts, parts = np.broadcast_to(sync_every, CLIENTS), []
    for i in members:
        T, t = affine(q, i, **rates)
        powers = [np.linalg.matrix_power(T, j) for j in range(counts[i] + 1)]
        parts.append((powers[-1], sum(powers[:-1]) @ t))
    return tuple(np.mean([part[which] for part in parts], axis=0) for which in (0, 1))


def flat(z):
    return np.concatenate(z)


def limit(q, sync_every=1, scale=1.0):
    """Where FedBiO's x is after many rounds."""
    rates = {name: scale * lr for name, lr in RATES.items()}
    return Running(clients_of(q), fb.FedBiO(**rates, sync_every=sync_every)).advance(4000).z[0][0]


# ------------------------------------------------------------------ trajectories


@pytest.mark.parametrize("sync_every", [1, 5, 10, UNEQUAL], ids=str)
def test_every_iterate_is_the_affine_map(sync_every):
    for seed in (1, 2, 3):
        q = drawn(seed)
        running = Running(clients_of(q), fb.FedBiO(**RATES, sync_every=sync_every))
        matrix, offset = round_map(q, sync_every, **RATES)
        expected = START
        for _ in range(6):
            expected = matrix @ expected + offset
            assert np.max(np.abs(flat(running.advance().z[0]) - expected)) <= 1e-12
        other, shift = round_map(q, np.add(sync_every, 1), **RATES)
        assert np.max(np.abs(flat(running.advance().z[0]) - other @ expected - shift)) > 1e-4


def test_one_client_is_soba():
    """SOBA: all three directions at the old point, one step each."""
    q, steps = drawn(4, clients=1), 5
    A, B, D, E = q.A[0], q.B[0], q.D[0], q.E[0]
    eta, gamma, tau = RATES.values()
    x, y, v = X0, Y0, np.zeros(DY)
    for _ in range(3 * steps):
        lower, linear = A @ y - B @ x - q.b[0], A @ v - (D @ (y - q.c[0]) + E.T @ x)
        upper = q.rho[0] * (x - q.e[0]) + E @ y + B.T @ v
        x, y, v = x - eta * upper, y - gamma * lower, v - tau * linear
    state = Running(clients_of(q), fb.FedBiO(**RATES, sync_every=steps)).advance(3).state
    for found, expected in zip(state.shared, (x, y, v), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_local_lower_level_follows_its_box():
    for seed in (1, 2):
        q = drawn(seed)
        running = Running(clients_of(q), fb.FedBiOLocal(**RATES, sync_every=3, terms=TERMS))
        field, rows = local_field(q, RATES["adjoint_lr"], TERMS), [(X0, Y0)] * CLIENTS
        for _ in range(5):
            rows = fedbio_round(field, LOCAL, rows, (0.03, 0.08), (3,) * CLIENTS, EVERYONE)
            assert distance(running.advance().z, rows) <= 1e-12
        wrong = local_field(q, RATES["adjoint_lr"], TERMS + 1)
        rows = fedbio_round(wrong, LOCAL, rows, (0.03, 0.08), (3,) * CLIENTS, EVERYONE)
        assert distance(running.advance().z, rows) > 1e-5


# ------------------------------------------------------------------ limits


def test_fixed_point_is_right_without_drift_and_its_bias_halves_with_the_steps():
    q = drawn()
    best = np.asarray(q.solution())
    assert np.max(np.abs(limit(q) - best)) <= 1e-10

    bias = []
    for scale in (0.4, 0.2, 0.1):
        rates = {name: scale * lr for name, lr in RATES.items()}
        matrix, offset = round_map(q, 5, **rates)
        fixed = np.linalg.solve(np.eye(len(offset)) - matrix, offset)[:DX]
        found = limit(q, 5, scale)
        assert np.max(np.abs(found - fixed)) <= 1e-8
        bias.append(np.linalg.norm(found - best))
    assert bias[-1] > 1e-4
    np.testing.assert_allclose([bias[0] / bias[1], bias[1] / bias[2]], 2, rtol=0.1)


def test_there_is_no_bias_where_clients_are_alike():
    q = drawn(alike=True)
    assert np.max(np.abs(limit(q, 5) - np.asarray(q.solution()))) <= 1e-10


def test_global_and_local_lower_level_go_to_different_optima():
    q = drawn()
    ours, own = np.asarray(q.solution()), np.asarray(q.own_solution())
    assert np.max(np.abs(ours - own)) > 0.05
    found = Running(clients_of(q), fb.FedBiOLocal(0.1, 0.2, 0.2, terms=150)).advance(1000)
    x, _ = found.z[0]
    assert np.max(np.abs(x - own)) <= 1e-10
    assert np.max(np.abs(x - ours)) > 0.05
    y = [row[1] for row in found.z]
    np.testing.assert_allclose(y, q.own_lower_solutions(q.own_solution()), rtol=0, atol=1e-10)
    assert np.max(np.abs(limit(q) - own)) > 0.05


# ------------------------------------------------------------------ who takes part


def who(found, outcomes):
    """The only one of the possible outcomes that is what was found."""
    fitting = [name for name, rows in outcomes.items() if distance(found, rows) <= 1e-12]
    assert len(fitting) == 1
    return fitting[0]


PAIRS = list(itertools.combinations(EVERYONE, 2))
SUBSETS = [s for size in range(1, CLIENTS + 1) for s in itertools.combinations(EVERYONE, size)]
METHODS = {
    "global": (fb.FedBiO, {}, global_field, GLOBAL, (0.03, 0.08, 0.05), (X0, Y0, np.zeros(DY))),
    "local": (
        fb.FedBiOLocal,
        {"terms": TERMS},
        lambda q: local_field(q, 0.05, TERMS),
        LOCAL,
        (0.03, 0.08),
        (X0, Y0),
    ),
}


@pytest.mark.parametrize("level", METHODS)
@pytest.mark.parametrize(
    ("possible", "settings", "dropout"),
    [(PAIRS, {"cohort": 2}, 0.0), (SUBSETS, {}, 0.5)],
    ids=["cohort", "dropout"],
)
def test_a_round_is_that_of_the_clients_who_took_part(level, possible, settings, dropout):
    """The cohort is drawn among all of its size, and whoever is not in it keeps its own y to the bit."""
    method, options, make_field, shared, rates, start = METHODS[level]
    q, seen = drawn(), set()
    running = Running(
        clients_of(q), method(**RATES, sync_every=UNEQUAL, **options, **settings), dropout=dropout
    )
    field, rows = make_field(q), [start] * CLIENTS
    for _ in range(30):
        outcomes = {s: fedbio_round(field, shared, rows, rates, UNEQUAL, s) for s in possible}
        before, rows = running.z, running.advance().z
        members = who(rows, outcomes)
        seen.add(members)
        if level == "local":
            still = [i for i in EVERYONE if np.array_equal(before[i][1], rows[i][1])]
            assert still == [i for i in EVERYONE if i not in members]
    assert len(seen) >= 6
