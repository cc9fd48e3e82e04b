"""Minimax, compositional and single-level problems, FedAvg, FedAvg-S, and work in epochs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithm.base import Variables
from fedbilevel.fed.ledger import Ledger
from fedbilevel.local import Work
from fedbilevel.problem import Client
from fedbilevel.problem.quadratic import lower_objective, upper_objective
from fedbilevel.problem.structured import inner_map, outer_distance, saddle_objective

pytestmark = pytest.mark.usefixtures("float64")

CLIENTS, DX, DY = 4, 3, 4
CAPACITY = 400  # one compiled program for short and for long runs
WORK = {"lower_steps": 3, "upper_steps": 2, "lower_rounds": 2}


@pytest.fixture
def draw():
    return np.random.default_rng(5)


def pair(rows, spread=0.0):
    """Two samples a client around its own value."""
    return np.stack([rows - spread, rows + spread], axis=1)


def in_numpy(kind, *rows):
    """A problem of the library whose rows stay numpy arrays."""
    return jax.tree.map(np.asarray, kind(*map(jnp.asarray, rows)))


def advance(setting, algorithm, state, steps=1, first=0, seed=0):
    problem, clients = setting
    with fb.Simulator().connect(problem, clients, algorithm) as session:
        block = session.advance(Variables(*state), jax.random.key(seed), first, steps, CAPACITY)
    assert block.finite
    return block


def run(setting, algorithm, state, steps=1, seed=0):
    """The state after some steps, in numpy."""
    return jax.tree.map(np.asarray, advance(setting, algorithm, state, steps, seed=seed).state)


def close(a, b, tolerance):
    return np.max(np.abs(np.asarray(a) - np.asarray(b))) <= tolerance


# ------------------------------------------------------------------ minimax


def saddle_of(draw, kind, spread):
    """`paper`: A_i = t_i I, centred b_i; `skew`: full A_i and uncentred b_i. λ = 10 in both."""
    b = spread * draw.normal(size=(CLIENTS, DY))
    if kind == "paper":
        A, b = draw.uniform(0, 0.1, size=(CLIENTS, 1, 1)) * np.eye(DY, DX), b - b.mean(0)
    else:
        A = draw.normal(size=(CLIENTS, DY, DX))
    return in_numpy(fb.Saddle, A, b, np.full(CLIENTS, 10.0))


def minimax(saddle):
    data = {"A": pair(saddle.A, 0.3), "b": pair(saddle.b, 0.5), "penalty": pair(saddle.penalty, 2.0)}
    return fb.minimax(saddle_objective, np.ones(DX), np.zeros(DY)), fb.Clients(data)


def distance(saddle, state):
    x, y = saddle.solution()
    return np.sqrt(np.sum((state.x - x) ** 2) + np.sum((state.y - y) ** 2))


def start():
    return Variables(np.ones(DX), np.zeros(DY))


def step_matrix(saddle, upper_lr, lower_lr):
    """What FedNest's step multiplies `(x − x*, y − y*)` by; all clients share the Hessians λI and I."""
    A, penalty = saddle.A.mean(0), 10.0
    left = (1 - lower_lr) ** (WORK["lower_steps"] * WORK["lower_rounds"])
    moved = (1 - (1 - upper_lr * penalty) ** WORK["upper_steps"]) / penalty
    y_rows = np.hstack([-(1 - left) * A, left * np.eye(DY)])
    x_rows = np.eye(DX, DX + DY) * (1 - moved * penalty) + moved * A.T @ y_rows
    return np.vstack([x_rows, y_rows])


@pytest.mark.parametrize("spread", [1.0, 10.0])
@pytest.mark.parametrize("kind", ["paper", "skew"])
def test_fednest_converges_linearly_to_the_saddle_point(draw, kind, spread):
    """The error falls by the spectral radius of the step, down to machine precision, whatever the spread."""
    saddle, rates = saddle_of(draw, kind, spread), (0.02, 0.5)
    setting, state, errors = minimax(saddle), start(), []
    for _ in range(90):
        state = run(setting, fb.FedNest(*rates, **WORK), state)
        errors.append(distance(saddle, state))
    radius = np.max(np.abs(np.linalg.eigvals(step_matrix(saddle, *rates))))
    assert errors[-1] < 1e-13
    falling = [e for e in errors if e > 1e-11]
    ratios = np.array(falling[1:]) / np.array(falling[:-1])
    assert len(ratios) > 40
    assert np.all(np.abs(ratios[len(ratios) // 2 :] - radius) < 5e-3)


def test_fednest_on_a_saddle_point_follows_its_closed_form(draw):
    saddle, rates = saddle_of(draw, "skew", 1.0), (0.02, 0.3)
    centre = np.concatenate(saddle.solution())
    expected = centre + np.linalg.matrix_power(step_matrix(saddle, *rates), 3) @ (
        np.concatenate(start()) - centre
    )
    assert close(
        np.concatenate(run(minimax(saddle), fb.FedNest(*rates, **WORK), start(), 3)), expected, 1e-12
    )


def test_both_terms_of_an_anchored_step_see_one_batch(draw):
    """Batches of one sample: their noise cancels in `G(z; ζ) − G(z⁰; ζ)`, so that a round is `z⁰ − c·q`.

    q is the mean of one sample's gradient a client: one of 2⁴ vectors, and all of them are tried.
    """
    A, b = draw.normal(size=(2, CLIENTS, DY, DX)), draw.normal(size=(2, CLIENTS, DY))
    data = {"A": A.swapaxes(0, 1), "b": b.swapaxes(0, 1), "penalty": np.full((CLIENTS, 2), 10.0)}
    problem = fb.minimax(saddle_objective, np.ones(DX), np.zeros(DY))
    setting = problem, fb.Clients(data, batch_size=1)
    x, y = np.array([1.0, -2.0, 0.5]), np.array([0.3, -1.0, 2.0, 0.7])
    choices = np.array(list(np.ndindex(*(2,) * CLIENTS)))
    chosen_A = A[choices, np.arange(CLIENTS)].mean(1)  # of every choice: the mean over clients
    chosen_b = b[choices, np.arange(CLIENTS)].mean(1)

    seen = set()
    for seed in range(8):
        state = run(setting, fb.FedNest(0.02, 0.3, lower_steps=3, upper_steps=2), (x, y), seed=seed)
        q, h = y + chosen_A @ x - chosen_b, 10 * x - np.einsum("kij,i->kj", chosen_A, state.y)
        y_gaps = np.abs(state.y - (y - (1 - 0.7**3) * q)).max(1)
        x_gaps = np.abs(state.x - (x - (1 - 0.8**2) / 10 * h)).max(1)
        assert y_gaps.min() < 1e-12
        assert x_gaps.min() < 1e-12
        seen |= {("y", y_gaps.argmin()), ("x", x_gaps.argmin())}
    assert len(seen) > 8, "the batches must differ from run to run"


def test_lfednest_gets_there_too_because_the_clients_share_their_hessians(draw):
    saddle = saddle_of(draw, "skew", 10.0)
    state = run(minimax(saddle), fb.LFedNest(0.02, 0.5, **WORK), start(), 200)
    assert distance(saddle, state) < 1e-12


def simultaneous_limit(saddle, upper_lr, lower_lr, steps):
    """The fixed point of FedAvg-S: `mean Σ_j (I − M_i)^j (m_i − M_i z) = 0`."""
    total, shift = 0, 0
    for A, b in zip(saddle.A, saddle.b, strict=True):
        M = np.block([[upper_lr * 10 * np.eye(DX), -upper_lr * A.T], [lower_lr * A, lower_lr * np.eye(DY)]])
        powers = sum(np.linalg.matrix_power(np.eye(DX + DY) - M, j) for j in range(steps))
        total, shift = total + powers @ M, shift + powers @ np.concatenate([np.zeros(DX), lower_lr * b])
    return np.linalg.solve(total, shift)


@pytest.mark.parametrize("kind", ["paper", "skew"])
def test_simultaneous_local_steps_have_another_limit(draw, kind):
    """FedAvg-S: with several local steps and different A_i it stops beside the saddle point."""
    saddle, rates = saddle_of(draw, kind, 10.0), (0.02, 0.2)
    state = run(minimax(saddle), fb.FedAvgS(*rates, steps=5), start(), CAPACITY)
    assert close(np.concatenate(state), simultaneous_limit(saddle, *rates, steps=5), 1e-11)
    assert distance(saddle, state) > 1e-3


def test_simultaneous_single_steps_reach_the_saddle_point(draw):
    saddle = saddle_of(draw, "skew", 10.0)
    state = run(minimax(saddle), fb.FedAvgS(0.05, 0.2), start(), CAPACITY)
    assert distance(saddle, state) < 1e-11


def test_fedavgs_is_for_saddle_points_only(valleys):
    with pytest.raises(ValueError, match="minimax"):
        fb.solve(*valleys.setting, fb.FedAvgS(0.1, 0.1), steps=1)


def test_sampled_cohorts_stall_at_the_sampling_noise(draw):
    """With centred b the state is linear in b: ten times the spread is ten times the noise floor."""
    saddle = saddle_of(draw, "paper", 1.0)
    wide = in_numpy(fb.Saddle, saddle.A, 10 * saddle.b, saddle.penalty)
    algorithm = fb.FedNest(0.02, 0.5, **WORK, cohort=2)
    floors = [distance(s, run(minimax(s), algorithm, start(), CAPACITY)) for s in (saddle, wide)]
    assert floors[0] > 1e-3
    assert floors[1] / floors[0] == pytest.approx(10, rel=1e-9)


# ------------------------------------------------------------------ compositional


@pytest.fixture
def composition(draw):
    R = np.eye(DY, DX) + 0.3 * draw.normal(size=(CLIENTS, DY, DX))
    return in_numpy(fb.Composition, R, draw.normal(size=(CLIENTS, DY)), draw.normal(size=(CLIENTS, DY)))


def compositional(composition):
    lower = {"R": pair(composition.R, 0.2), "s": pair(composition.s, 0.5)}
    problem = fb.compositional(outer_distance, inner_map, np.ones(DX), np.zeros(DY))
    return problem, fb.Clients(lower, {"t": pair(composition.t, 0.5)})


def test_fednest_solves_a_composition(composition):
    state = run(compositional(composition), fb.FedNest(0.2, 0.5, **WORK), start(), CAPACITY)
    x = composition.solution()
    assert close(state.x, x, 1e-10)
    assert close(state.y, composition.R.mean(0) @ x + composition.s.mean(0), 1e-10)


def test_lfednest_does_not_solve_a_composition(composition):
    """Its direction is `mean R_iᵀ(y − t_i)` where `R̄ᵀ(y − t̄)` is right; y itself is right."""
    state = run(compositional(composition), fb.LFedNest(0.2, 0.5, **WORK), start(), CAPACITY)
    R, s = composition.R, composition.s.mean(0)
    wrong = np.linalg.solve(R.mean(0).T @ R.mean(0), np.einsum("nij,ni->j", R, composition.t - s) / CLIENTS)
    assert close(state.x, wrong, 1e-10)
    assert not close(state.x, composition.solution(), 1e-2)


# ------------------------------------------------------------------ single level


def valley(x, samples):
    """`½(x − e)ᵀQ(x − e)`, the mean over the samples."""
    gap = x - samples["e"]
    return jnp.mean(jnp.einsum("si,sij,sj->s", gap, samples["Q"], gap)) / 2


class Valleys:
    """One quadratic bowl a client, all different."""

    def __init__(self, draw):
        roots = draw.normal(size=(CLIENTS, DX, DX))
        self.Q = np.eye(DX) + roots @ roots.transpose(0, 2, 1) / DX
        self.e = draw.normal(size=(CLIENTS, DX))

    @property
    def setting(self):
        data = {"Q": self.Q[:, None], "e": self.e[:, None]}
        return fb.single_level(valley, np.ones(DX)), fb.Clients(data)

    def gradients(self, points):
        """`∇f_i(x_i)`, one row a client."""
        return np.einsum("nij,nj->ni", self.Q, points - self.e)

    @property
    def solution(self):
        return np.linalg.solve(self.Q.mean(0), np.einsum("nij,nj->i", self.Q, self.e) / CLIENTS)


@pytest.fixture
def valleys(draw):
    return Valleys(draw)


def fedlin(valleys, x, rate, steps):
    """One round of FedSVRG / FedLin, by hand."""
    anchors = np.tile(x, (CLIENTS, 1))
    points, q = anchors, valleys.gradients(anchors).mean(0)
    for _ in range(steps):
        points = points - rate * (valleys.gradients(points) - valleys.gradients(anchors) + q)
    return points.mean(0)


def fedavg(valleys, x, rate, steps):
    """One round of FedAvg, by hand."""
    points = np.tile(x, (CLIENTS, 1))
    for _ in range(steps):
        points = points - rate * valleys.gradients(points)
    return points.mean(0)


def test_single_level_fednest_is_fedlin(valleys):
    algorithm, expected = fb.FedNest(0.1, 0.0, upper_steps=3), np.ones(DX)
    for _ in range(5):
        expected = fedlin(valleys, expected, 0.1, 3)
    assert close(run(valleys.setting, algorithm, (np.ones(DX), ()), 5).x, expected, 1e-12)
    assert close(run(valleys.setting, algorithm, (np.ones(DX), ()), CAPACITY).x, valleys.solution, 1e-10)


def test_fedavg_follows_its_own_recursion_elsewhere(valleys):
    algorithm, expected = fb.FedAvg(0.1, steps=3), np.ones(DX)
    for _ in range(5):
        expected = fedavg(valleys, expected, 0.1, 3)
    assert close(run(valleys.setting, algorithm, (np.ones(DX), ()), 5).x, expected, 1e-12)
    assert not close(run(valleys.setting, algorithm, (np.ones(DX), ()), CAPACITY).x, valleys.solution, 1e-2)


def test_a_schedule_is_followed_step_by_step(valleys):
    """The step size of step t is `schedule(t)`, also when a run is cut into blocks."""
    algorithm = fb.FedAvg(lambda step: jnp.where(step < 2, 0.2, 0.05), steps=3)
    expected = np.ones(DX)
    for rate in (0.2, 0.2, 0.05, 0.05):
        expected = fedavg(valleys, expected, rate, 3)
    state = advance(valleys.setting, algorithm, (np.ones(DX), ()), steps=1).state
    state = advance(valleys.setting, algorithm, state, steps=3, first=1).state
    assert close(state.x, expected, 1e-12)


# ------------------------------------------------------------------ FedAvg on y


def bilevel(quadratic):
    lower, upper = (
        {name: pair(np.asarray(getattr(quadratic, name))) for name in names.split()}
        for names in ("A B b", "D E c e rho")
    )
    problem = fb.Problem(upper_objective, lower_objective, np.ones(DX), np.zeros(DY))
    return problem, fb.Clients(lower, upper)


def test_fedavg_trains_y_and_leaves_x_alone():
    quadratic = jax.tree.map(np.asarray, fb.Quadratic.random(jax.random.key(1), CLIENTS, DX, DY))
    algorithm, x = fb.FedAvg(0.2, level="lower", steps=3), np.array([1.0, -1.0, 2.0])
    points = np.zeros((CLIENTS, DY))
    for _ in range(2):
        for _ in range(3):
            slopes = np.einsum("nij,nj->ni", quadratic.A, points) - quadratic.B @ x - quadratic.b
            points = points - 0.2 * slopes
        points = np.tile(points.mean(0), (CLIENTS, 1))
    state = run(bilevel(quadratic), algorithm, (x, np.zeros(DY)), 2)
    assert close(state.y, points[0], 1e-12)
    assert np.array_equal(state.x, x)


def test_fedavg_refuses_an_unknown_level():
    with pytest.raises(ValueError, match="level"):
        fb.FedAvg(0.1, level="middle")


# ------------------------------------------------------------------ epochs

SIZES = (7, 5, 3, 2)
PASSES = (1, 2, 3, 1)
BATCH = 3


def tally(x, y, samples):
    """`−mean ⟨s, y⟩`, so that g = −f has the gradient s: every sample leaves its own mark on y."""
    return -jnp.mean(samples @ y) + jnp.sum(x**2)


def marked():
    """Sample j of all is the j-th unit vector: y's entry j tells how often, and how far, j moved it."""
    marks = np.split(np.eye(sum(SIZES)), np.cumsum(SIZES)[:-1])
    return fb.minimax(tally, np.zeros(1), np.zeros(sum(SIZES))), fb.Clients(marks, batch_size=BATCH)


def test_a_pass_visits_every_sample_once_and_alike():
    """A batch of k steps by lr·mean, the last one shortened to its share: lr/k for every sample of a pass."""
    rate, rounds = 0.3, 2
    algorithm = fb.FedNestSGD(0.0, rate, lower_epochs=PASSES, lower_rounds=rounds)
    block = advance(marked(), algorithm, (np.zeros(1), np.zeros(sum(SIZES))))

    expected, unshortened, batches = [], [], []
    for size, passes in zip(SIZES, PASSES, strict=True):
        moved = -rounds * passes * rate / CLIENTS
        batches.append(-(-size // BATCH))
        expected += [moved / min(size, BATCH)] * size
        unshortened.append(moved * batches[-1])  # of all samples of a client
    assert close(block.state.y, expected, 1e-13)
    sums = [np.sum(part) for part in np.split(np.asarray(block.state.y), np.cumsum(SIZES)[:-1])]
    assert not close(sums, unshortened, 1e-3)

    ledger = Ledger.from_counts(block.counts)
    upper = 1 + 2  # f_x: assembled once, two in the step on x
    assert ledger.calls["g_y"] == rounds * np.dot(PASSES, batches)
    assert ledger.calls["f_x"] == upper * CLIENTS
    read_below = rounds * np.dot(PASSES, SIZES)
    assert ledger.samples == read_below + upper * sum(min(size, BATCH) for size in SIZES)


def test_steps_in_epochs_are_counted_in_batches():
    """What `scale_by_steps` divides by: passes times batches in a pass, the client's own."""
    work, (problem, clients) = Work("lower", epochs=PASSES, scaled=True), marked()
    totals = [int(work.total(Client(problem, clients, i, i, jax.random.key(0)))) for i in range(CLIENTS)]
    assert totals == [3 * 1, 2 * 2, 1 * 3, 1 * 1]
