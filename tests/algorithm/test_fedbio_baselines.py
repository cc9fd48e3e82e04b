"""CommFedBiO, stocBiO and MRBO against their recursions in numpy; and what more clients are good for."""

import itertools

import jax
import numpy as np
import pytest

import fedbilevel as fb
from algorithm.quadratics import (
    CLIENTS,
    DY,
    X0,
    Y0,
    Running,
    clients_of,
    drawn,
    gradients,
    local_field,
)
from fedbilevel.engine.simulator import simulate

pytestmark = pytest.mark.usefixtures("float64")

STEPS = (0.05, 0.1, 0.15)
EVERYONE = tuple(range(CLIENTS))
SUBSETS = [s for size in range(1, CLIENTS + 1) for s in itertools.combinations(EVERYONE, size)]


# ------------------------------------------------------------------ CommFedBiO in numpy


def lower_round(q, x, y, steps, members):
    """The mean of so many gradient steps on g_i."""
    rows = []
    for i in members:
        own = y
        for _ in range(steps):
            own = own - STEPS[1] * gradients(q, i, x, own)[2]
        rows.append(own)
    return np.mean(rows, axis=0)


def adjoint_exchange(q, x, y, u, memory, k, members):
    """`u − τ mean C(H_i u − ∇_y f_i + e_i)`, and the new e_i."""
    sent, memory = [], memory.copy()
    for i in members:
        total = q.A[i] @ u - gradients(q, i, x, y)[1] + memory[i]
        largest = np.argsort(-np.abs(total))[:k]
        message = np.zeros(DY)
        message[largest] = total[largest]
        sent.append(message)
        memory[i] = total - message
    return u - STEPS[2] * np.mean(sent, axis=0), memory


def upper_step(q, x, y, u, members):
    rows = [gradients(q, i, x, y)[0] + q.B[i].T @ u for i in members]
    return x - STEPS[0] * np.mean(rows, axis=0)


def commfedbio(q, point, k, terms, lower_steps, members=EVERYONE):
    x, y, u, memory = point
    y = lower_round(q, x, y, lower_steps, members)
    for _ in range(terms):
        u, memory = adjoint_exchange(q, x, y, u, memory, k, members)
    return upper_step(q, x, y, u, members), y, u, memory


START = (X0, Y0, np.zeros(DY), np.zeros((CLIENTS, DY)))


def point_of(running):
    state = running.state
    return tuple(np.asarray(v) for v in (state.x, state.y, state.u, state.memory.value))


def gap(found, expected):
    return max(np.max(np.abs(p - q)) for p, q in zip(found, expected, strict=True))


@pytest.mark.parametrize("k", [2, DY])
def test_commfedbio_follows_its_recursion(k):
    for seed in (1, 2, 3):
        q, point = drawn(seed), START
        method = fb.CommFedBiO(*STEPS, topk=k, terms=3, lower_steps=2)
        running = Running(clients_of(q), method)
        for _ in range(6):
            point = commfedbio(q, point, k, 3, 2)
            assert gap(point_of(running.advance()), point) <= 1e-12
        assert np.any(point[3]) == (k < DY)  # nothing is left out where everything is sent


def test_without_compression_it_is_gradient_descent_on_the_adjoint():
    """k = d: no codec, no memory, only the averaged matrix."""
    q = drawn()
    running = Running(clients_of(q), fb.CommFedBiO(*STEPS, topk=DY, terms=3, lower_steps=2))
    A, x, y, u = q.A.mean(0), *START[:3]
    for _ in range(6):
        y = lower_round(q, x, y, 2, EVERYONE)
        slope = np.mean([gradients(q, i, x, y)[1] for i in EVERYONE], axis=0)
        for _ in range(3):
            u = u - STEPS[2] * (A @ u - slope)
        x = upper_step(q, x, y, u, EVERYONE)
        assert gap(point_of(running.advance())[:3], (x, y, u)) <= 1e-12


def test_compression_does_not_move_the_fixed_point_where_clients_are_alike():
    """Equal clients: the gaps vanish, so what is left out does too, and x* is reached."""
    q = drawn(alike=True)
    found = Running(clients_of(q), fb.CommFedBiO(*STEPS, topk=1, terms=2)).advance(3000)
    x, _, _, memory = point_of(found)
    assert np.max(np.abs(x - np.asarray(q.solution()))) <= 1e-10
    assert np.max(np.abs(memory)) <= 1e-10


def test_compression_of_clients_that_differ_stays_near_in_proportion_to_the_steps():
    """Their own gaps never vanish, so u goes round `u*` at a distance of about `τ mean e_i`."""
    q = drawn()
    best, near = np.asarray(q.solution()), []
    for scale in (1.0, 0.1):
        method = fb.CommFedBiO(scale * STEPS[0], STEPS[1], scale * STEPS[2], topk=1, terms=2)
        running, seen = Running(clients_of(q), method).advance(3000), []
        for _ in range(20):
            seen.append(np.linalg.norm(point_of(running.advance())[0] - best))
        near.append(np.mean(seen))
    assert near[0] < 0.1
    assert near[1] < near[0] / 5


# ------------------------------------------------------------------ who takes part


def only(fits):
    found = [name for name, fitting in fits.items() if fitting]
    assert len(found) == 1
    return found[0]


def test_a_sampled_cohort_alone_uses_and_changes_its_memories():
    q, seen = drawn(), set()
    running = Running(clients_of(q), fb.CommFedBiO(*STEPS, topk=2, terms=2, cohort=2))
    for _ in range(24):
        before, now = point_of(running), point_of(running.advance())
        pairs = itertools.combinations(EVERYONE, 2)
        pair = only({p: gap(now, commfedbio(q, before, 2, 2, 1, p)) <= 1e-12 for p in pairs})
        outside = [i for i in EVERYONE if i not in pair]
        assert np.array_equal(now[3][outside], before[3][outside])
        seen.add(pair)
    assert len(seen) == 6


def test_who_does_not_answer_keeps_its_memory():
    """Every exchange of a step has its own absent clients: found out one after the other."""
    q, seen = drawn(), set()
    running = Running(clients_of(q), fb.CommFedBiO(*STEPS, topk=2, terms=1), dropout=0.4)
    for _ in range(12):
        (x, y, u, memory), now = point_of(running), point_of(running.advance())
        only({s: gap([now[1]], [lower_round(q, x, y, 1, s)]) <= 1e-12 for s in SUBSETS})
        exchanged = {s: adjoint_exchange(q, x, now[1], u, memory, 2, s) for s in SUBSETS}
        answering = only({s: gap(now[2:], both) <= 1e-12 for s, both in exchanged.items()})
        silent = [i for i in EVERYONE if i not in answering]
        assert np.array_equal(now[3][silent], memory[silent])
        only({s: gap([now[0]], [upper_step(q, x, *now[1:3], s)]) <= 1e-12 for s in SUBSETS})
        seen.add(answering)
    assert len(seen) >= 4


# ------------------------------------------------------------------ one machine


def test_stocbio_on_one_client_is_stocbio():
    """D steps on y, `(1/ℓ) Σ_{j<Q} (I − H/ℓ)^j ∇_y f`, one step on x."""
    q, bound, terms, inner = drawn(4, clients=1), 9.0, 5, 4
    x, y = X0, Y0
    running = Running(clients_of(q), fb.StocBiO(*STEPS[:2], terms=terms, smoothness=bound, lower_steps=inner))
    for _ in range(5):
        y = lower_round(q, x, y, inner, (0,))
        f_x, f_y, _ = gradients(q, 0, x, y)
        left = np.eye(DY) - q.A[0] / bound
        u = sum(np.linalg.matrix_power(left, j) @ f_y for j in range(terms)) / bound
        x = x - STEPS[0] * (f_x + q.B[0].T @ u)
        state = running.advance().state
        assert gap((np.asarray(state.x), np.asarray(state.y)), (x, y)) <= 1e-12


def test_mrbo_on_one_client_with_full_batches_is_descent_along_both_directions():
    """Momenta of exact directions are these directions; noise is for `test_fedbioacc`."""
    q, terms = drawn(4, clients=1), 3
    field, z = local_field(q, STEPS[2], terms), (X0, Y0)
    running = Running(clients_of(q), fb.MRBO(*STEPS, terms=terms, delta=2.0, t0=3.0))
    for t in range(1, 8):
        alpha = 2.0 / (3.0 + t) ** (1 / 3)
        h, slope = field(0, z)
        z = z[0] - STEPS[0] * alpha * h, z[1] - STEPS[1] * alpha * slope
        assert gap(running.advance().z[0], z) <= 1e-12


@pytest.mark.parametrize("k", [0, -1, 1.5, float("nan"), float("inf"), True, "a"], ids=str)
def test_impossible_numbers_of_entries_are_refused_at_once(k):
    with pytest.raises(ValueError, match="k is"):
        fb.CommFedBiO(*STEPS, topk=k)


def test_more_entries_than_there_are_is_an_error_that_says_so():
    with pytest.raises(ValueError, match=f"between 1 and {DY}"):
        Running(clients_of(drawn()), fb.CommFedBiO(*STEPS, topk=DY + 1)).advance()


# ------------------------------------------------------------------ linear speed-up

SEEDS, BLOCK, BURN_IN, BLOCKS = 10, 15, 6, 16


def stationary_error(clients):
    """The mean of `‖x − x*‖²` of FedBiO with a fixed step, over seeds and late times."""
    known = fb.Quadratic.random(jax.random.key(3), clients, 2, 2, alike=True)
    data = known.clients(samples=200, noise=1.0, batch_size=1)
    fed, best = fb.Simulator().federation(known.problem(), data), known.solution()
    method = fb.FedBiO(0.1, 0.2, 0.2)

    @jax.jit
    @jax.vmap
    def squares(key):
        def block(state, index):
            state = simulate(fed, method, state, key, BLOCK * index, BLOCK, BLOCK).state
            return state, ((state.shared[0] - best) ** 2).sum()

        return jax.lax.scan(block, method.init(fed, key), np.arange(BLOCKS))[1]

    return float(squares(jax.random.split(jax.random.key(0), SEEDS))[:, BURN_IN:].mean())


def test_the_stationary_error_falls_in_proportion_to_the_number_of_clients():
    counts = [1, 8, 64]
    errors = [stationary_error(clients) for clients in counts]
    slope, _ = np.polyfit(np.log(counts), np.log(errors), 1)
    assert slope == pytest.approx(-1, abs=0.15)


def test_soba_is_fedbio_of_single_steps_and_nothing_else():
    q = drawn(4, clients=1)
    ours, theirs = (
        Running(clients_of(q), make(0.03, 0.08, 0.05)).advance(5).state.shared
        for make in (fb.SOBA, fb.FedBiO)
    )
    for found, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(TypeError, match="lower"):
        fb.SOBA(0.03, 0.08, 0.05, lower="local")
