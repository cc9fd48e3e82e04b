"""FedNest and its variants on quadratics: every iterate and every limit is a closed form."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithm.base import Variables
from fedbilevel.experiment import AdjointWarning
from fedbilevel.fed.ledger import Entry, as_arrays, metering
from fedbilevel.problem.quadratic import lower_objective, upper_objective

pytestmark = pytest.mark.usefixtures("float64")

CLIENTS, DX, DY = 4, 3, 4
CAPACITY = 400  # one compiled program for short and for long runs

CG = {"series": "cg", "terms": 6}
SUM = {"series": "sum", "terms": 60, "smoothness": 50.0}
MANY = SUM | {"upper_steps": 4, "lower_steps": 5, "lower_rounds": 3}
UNEQUAL = SUM | {"upper_steps": (1, 3, 2, 6), "lower_steps": (1, 2, 5, 8), "lower_rounds": 2}
SCALED = UNEQUAL | {"scale_by_steps": True}
DRIFTING = CG | {"lower_steps": 5, "lower_rounds": 2}


@pytest.fixture
def quadratic():
    return jax.tree.map(np.asarray, fb.Quadratic.random(jax.random.key(1), CLIENTS, DX, DY))


@pytest.fixture
def point():
    draw = np.random.default_rng(7)
    return draw.normal(size=DX), draw.normal(size=DY)


def alike(quadratic):
    """All clients as client 0."""
    return jax.tree.map(lambda leaf: np.repeat(leaf[:1], CLIENTS, axis=0), quadratic)


def problem():
    return fb.Problem(upper_objective, lower_objective, np.ones(DX), np.zeros(DY))


def samples_of(quadratic, **options):
    """Two different samples a client; their mean is the client's own quadratic."""

    def pair(rows, spread=0.0):
        return np.stack([rows - spread, rows + spread], axis=1)

    q = quadratic
    lower = {"A": pair(q.A, 0.2 * np.eye(DY)), "B": pair(q.B, 0.5), "b": pair(q.b, 0.5)}
    upper = {
        "D": pair(q.D),
        "E": pair(q.E, 0.5),
        "c": pair(q.c, 0.5),
        "e": pair(q.e, 0.5),
        "rho": pair(q.rho),
    }
    return fb.Clients(lower, upper, **options)


def advance(clients, algorithm, x, y, steps=1, seed=0):
    """A block of steps from `(x, y)`."""
    with fb.Simulator().connect(problem(), clients, algorithm) as session:
        block = session.advance(Variables(x, y), jax.random.key(seed), 0, steps, CAPACITY)
    assert block.finite
    assert block.done == steps
    return block


def run(quadratic, algorithm, x, y, steps=1):
    """x and y after some steps from `(x, y)`."""
    state = advance(samples_of(quadratic), algorithm, x, y, steps).state
    return np.asarray(state.x), np.asarray(state.y)


def limit(quadratic, algorithm):
    """Where x and y are after many steps."""
    return run(quadratic, algorithm, np.ones(DX), np.zeros(DY), steps=CAPACITY)


def local_maps(matrices, rate, steps):
    """`A_i⁻¹(I − (I − β_i A_i)^τ_i)`: what τ_i anchored steps multiply the anchor by."""
    identity = np.eye(matrices.shape[-1])
    rates, counts = np.broadcast_to(rate, len(matrices)), np.broadcast_to(steps, len(matrices))
    shrunk = [
        np.linalg.matrix_power(identity - b * A, t) for A, b, t in zip(matrices, rates, counts, strict=True)
    ]
    return np.stack([np.linalg.solve(A, identity - S) for A, S in zip(matrices, shrunk, strict=True)])


def truncated(matrix, bound, terms, b):
    """`H⁻¹(I − (I − H/ℓ)^N) b`."""
    left = np.linalg.matrix_power(np.eye(len(b)) - matrix / bound, terms)
    return np.linalg.solve(matrix, b - left @ b)


def zero_of(affine):
    """The zero of an affine map of x."""
    offset = np.asarray(affine(np.zeros(DX)))
    slope = np.stack([affine(column) - offset for column in np.eye(DX)], axis=1)
    return np.linalg.solve(slope, -offset)


def drifted(quadratic, rate, steps):
    """`x ↦` the fixed point of a round of plain local descent on y, and not `y*(x)`."""
    A = quadratic.A
    pulls = local_maps(A, rate, steps) @ A

    def at(x):
        own = of(quadratic.own_lower_solutions, x)
        return np.linalg.solve(pulls.sum(0), np.einsum("nij,nj->i", pulls, own))

    return at


def own_slope(quadratic, x, y):
    """The mean of the clients' own estimates `∇_x f_i + B_iᵀ A_i⁻¹ ∇_y f_i` at a common `(x, y)`."""
    q = quadratic
    f_y = np.einsum("nij,nj->ni", q.D, y - q.c) + np.einsum("nij,i->nj", q.E, x)
    u = np.linalg.solve(q.A, f_y[..., None])[..., 0]
    return np.mean(q.rho[:, None] * (x - q.e) + q.E @ y + np.einsum("nij,ni->nj", q.B, u), axis=0)


def of(function, *vectors):
    """A closed form of the library, in numpy."""
    return np.asarray(function(*map(jnp.asarray, vectors)))


def close(a, b, tolerance):
    return np.max(np.abs(np.asarray(a) - np.asarray(b))) <= tolerance


# ------------------------------------------------------------------ FedInn: x fixed


@pytest.mark.parametrize("settings", [CG, MANY, UNEQUAL, SCALED], ids=["one", "many", "unequal", "scaled"])
def test_lower_rounds_follow_their_closed_form(quadratic, point, settings):
    """`y⁺ − y* = (I − CĀ)(y − y*)` with `C = mean A_i⁻¹(I − (I − β_i A_i)^τ_i)`."""
    (x, y), rate = point, 0.2
    steps = np.asarray(settings.get("lower_steps", 1))
    algorithm = fb.FedNest(0.0, rate, **settings)
    A = quadratic.A

    def predicted(steps, outer_steps):
        C = local_maps(A, rate / steps if algorithm.scale_by_steps else rate, steps).mean(0)
        matrix = np.eye(DY) - C @ A.mean(0)
        best = of(quadratic.lower_solution, x)
        return best + np.linalg.matrix_power(matrix, algorithm.lower_rounds * outer_steps) @ (y - best)

    for outer_steps in (1, 3):
        new_x, new_y = run(quadratic, algorithm, x, y, outer_steps)
        assert close(new_y, predicted(steps, outer_steps), 1e-12)
        assert np.array_equal(new_x, x)
    assert not close(run(quadratic, algorithm, x, y)[1], predicted(steps + 1, 1), 1e-4)


def test_plain_local_descent_on_y_follows_its_closed_form(quadratic, point):
    """`y_i = y_i* + (I − βA_i)^τ(y − y_i*)`, averaged: FedNest-SGD's round."""
    (x, y), rate, steps = point, 0.2, DRIFTING["lower_steps"]
    own = of(quadratic.own_lower_solutions, x)
    shrink = [np.linalg.matrix_power(np.eye(DY) - rate * A, steps) for A in quadratic.A]
    expected = y
    for _ in range(DRIFTING["lower_rounds"]):
        expected = np.mean([o + S @ (expected - o) for o, S in zip(own, shrink, strict=True)], axis=0)
    for variant in (fb.FedNestSGD, fb.LFedNest):
        assert close(run(quadratic, variant(0.0, rate, **DRIFTING), x, y)[1], expected, 1e-12)
    anchored = run(quadratic, fb.LFedNestSVRG(0.0, rate, **DRIFTING), x, y)[1]
    assert not close(anchored, expected, 1e-4)


# ------------------------------------------------------------------ FedOut: y fixed


def adjoint_of(quadratic, settings, x, y, damping=0.0):
    """The u that the series of these settings gives."""
    H, b = quadratic.A.mean(0) + damping * np.eye(DY), of(quadratic.upper_slope, x, y)
    if settings["series"] == "cg":
        return np.linalg.solve(H, b)
    return truncated(H, settings["smoothness"] + damping, settings["terms"], b)


@pytest.mark.parametrize("settings", [CG, MANY, UNEQUAL, SCALED], ids=["one", "many", "unequal", "scaled"])
@pytest.mark.parametrize("damping", [0.0, 0.7])
def test_upper_round_follows_its_closed_form(quadratic, point, settings, damping):
    """`x⁺ = x − c·h(x, y)` with `c = mean (1 − (1 − α_i ρ_i)^τ_i)/ρ_i`."""
    (x, y), rate = point, 0.3
    steps = np.asarray(settings.get("upper_steps", 1))
    algorithm = fb.FedNest(rate, 0.0, **settings, damping=damping)
    rates = rate / steps if algorithm.scale_by_steps else rate
    c = local_maps(quadratic.rho[:, None, None], rates, steps).mean()

    expected = x
    for _ in range(3):
        u = adjoint_of(quadratic, settings, expected, y, damping)
        expected = expected - c * of(quadratic.hypergradient_at, expected, y, u)
    new_x, new_y = run(quadratic, algorithm, x, y, steps=3)
    assert close(new_x, expected, 1e-12)
    assert np.array_equal(new_y, y)


def test_upper_direction_is_not_the_mean_of_the_clients_own(quadratic, point):
    """The negative control of the test above, and the exact form of LFedNest's round on x."""
    (x, y), rate = point, 0.3
    own = x - rate * own_slope(quadratic, x, y)
    assert not close(run(quadratic, fb.FedNest(rate, 0.0, **CG), x, y)[0], own, 1e-2)
    for variant in (fb.LFedNest, fb.LFedNestSVRG):
        assert close(run(quadratic, variant(rate, 0.0, **DRIFTING), x, y)[0], own, 1e-12)


def test_local_series_keeps_its_length_for_all_local_steps(quadratic, point):
    """LFedNest, one client: the N' that the ledger shows explains the three local steps exactly."""
    alone = jax.tree.map(lambda leaf: leaf[2:3], quadratic)
    (x, y), rate, bound, terms, steps = point, 0.3, 6.0, 5, 3
    algorithm = fb.LFedNest(rate, 0.0, terms=terms, smoothness=bound, upper_steps=steps)
    seen = set()
    for seed in range(12):
        block = advance(samples_of(alone), algorithm, x, y, seed=seed)
        length, rest = divmod(int(block.counts[Entry("call", "g_yy")].sum()), steps)
        assert rest == 0
        power = np.linalg.matrix_power(np.eye(DY) - alone.A[0] / bound, length)
        expected = x
        for _ in range(steps):
            u = terms / bound * power @ (alone.D[0] @ (y - alone.c[0]) + alone.E[0].T @ expected)
            direct = alone.rho[0] * (expected - alone.e[0]) + alone.E[0] @ y
            expected = expected - rate * (direct + alone.B[0].T @ u)
        assert close(block.state.x, expected, 1e-12)
        seen.add(length)
    assert len(seen) >= 3


# ------------------------------------------------------------------ the sampled series


def test_sampled_series_averages_to_the_sum_over_the_federation(quadratic, point):
    """FedIHGP by enumeration of N': the mean of the draws' hypergradients is that of the truncated sum."""
    (x, y), terms, bound = point, 4, 6.0
    federation = fb.Simulator().federation(problem(), samples_of(quadratic))

    def estimator(series):
        algorithm = fb.FedNest(0.0, 0.0, series=series, terms=terms, smoothness=bound)

        @eqx.filter_jit
        def draw(federation, key):
            with metering() as meter:
                h = algorithm.hypergradient(federation, x, y, key)
            return h, as_arrays(meter.counts)

        return lambda seed: draw(federation, jax.random.key(seed))

    sampled, by_length = estimator("sampled"), {}
    for seed in range(60):
        h, counts = sampled(seed)
        by_length.setdefault(int(counts[Entry("call", "g_yy")]) // CLIENTS, np.asarray(h))
    assert sorted(by_length) == list(range(terms))
    mean = np.mean(list(by_length.values()), axis=0)
    assert close(mean, estimator("sum")(0)[0], 1e-13)

    u = truncated(quadratic.A.mean(0), bound, terms, of(quadratic.upper_slope, x, y))
    assert close(mean, of(quadratic.hypergradient_at, x, y, u), 1e-13)
    exact = of(quadratic.adjoint_at, x, y)
    assert not close(mean, of(quadratic.hypergradient_at, x, y, exact), 1e-3)
    assert not close(by_length[0], mean, 1e-3)


def test_a_federation_of_numpy_data_can_be_used_by_hand(quadratic, point):
    """`Simulator().federation(...)` in a loop of one's own, where it is no argument of a compiled program."""
    federation = fb.Simulator().federation(problem(), samples_of(quadratic))
    algorithm = fb.FedNest(0.1, 0.1, **CG)
    shape = jax.eval_shape(lambda key: algorithm.hypergradient(federation, *point, key), jax.random.key(0))
    assert shape.shape == (DX,)


# ------------------------------------------------------------------ limits


@pytest.mark.parametrize(
    "settings",
    [CG, MANY | {"smoothness": 4.0}, UNEQUAL | {"smoothness": 4.0}],
    ids=["cg", "sum", "unequal steps"],
)
def test_fednest_reaches_the_solution(quadratic, settings):
    x, y = limit(quadratic, fb.FedNest(0.2, 0.2, **settings))
    best = quadratic.solution()
    assert close(x, best, 1e-10)
    assert close(y, quadratic.lower_solution(best), 1e-10)


def test_a_short_series_does_not_reach_the_solution(quadratic):
    """With ℓ far too large the same 60 terms leave a bias: the accuracy above is not for free."""
    x, _ = limit(quadratic, fb.FedNest(0.2, 0.2, **MANY | {"smoothness": 500.0}))
    assert not close(x, quadratic.solution(), 1e-2)


LIMITS = {
    "FedNestSGD": (fb.FedNestSGD, DRIFTING),
    "LFedNest": (fb.LFedNest, DRIFTING),
    "LFedNestSVRG": (fb.LFedNestSVRG, DRIFTING),
    "LFedNestNonAlt": (fb.LFedNestNonAlt, CG | {"lower_steps": 100}),
}


def predicted_limit(name, quadratic, rate):
    """Where a variant stands still, from the affine map that one of its steps is."""
    drift = drifted(quadratic, rate, DRIFTING["lower_steps"])

    def slope_after_drift(x):
        y = drift(x)
        return of(quadratic.hypergradient_at, x, y, of(quadratic.adjoint_at, x, y))

    if name == "FedNestSGD":
        return zero_of(slope_after_drift)
    if name == "LFedNest":
        return zero_of(lambda x: own_slope(quadratic, x, drift(x)))
    if name == "LFedNestSVRG":
        return zero_of(lambda x: own_slope(quadratic, x, of(quadratic.lower_solution, x)))
    return quadratic.own_solution()  # every client solves its own lower level: (1 − βλ)^100 < 1e-20


@pytest.mark.parametrize("name", LIMITS)
def test_cheaper_variants_have_another_limit_when_clients_differ(quadratic, name):
    variant, settings = LIMITS[name]
    x, _ = limit(quadratic, variant(0.2, 0.4, **settings))
    assert close(x, predicted_limit(name, quadratic, 0.4), 1e-10)
    assert not close(x, quadratic.solution(), 1e-2)


@pytest.mark.parametrize("name", LIMITS)
def test_cheaper_variants_reach_the_solution_when_clients_are_alike(quadratic, name):
    variant, settings = LIMITS[name]
    same = alike(quadratic)
    assert close(limit(same, variant(0.2, 0.4, **settings))[0], same.solution(), 1e-10)


def test_order_of_clients_does_not_matter(quadratic, point):
    turned = jax.tree.map(lambda leaf: leaf[np.array([2, 0, 3, 1])], quadratic)
    algorithm = fb.FedNest(0.2, 0.2, **MANY)
    for ours, theirs in zip(run(quadratic, algorithm, *point), run(turned, algorithm, *point), strict=True):
        assert close(ours, theirs, 1e-12)


def test_weights_weigh_every_average(quadratic):
    """Weighing clients is scaling their f_i and g_i: x, y, H and J are all averaged alike."""
    weights = np.array([1.0, 0.5, 2.0, 1.5])

    def times(rows):
        return rows * (CLIENTS * weights / weights.sum()).reshape(-1, *[1] * (rows.ndim - 1))

    q = quadratic
    rows = (times(q.A), times(q.B), times(q.b), q.c, times(q.D), times(q.E), q.e, times(q.rho))
    scaled = fb.Quadratic(*map(jnp.asarray, rows))
    algorithm = fb.FedNest(0.2, 0.2, **CG)
    block = advance(samples_of(quadratic, weights=weights), algorithm, np.ones(DX), np.zeros(DY), CAPACITY)
    assert close(block.state.x, scaled.solution(), 1e-10)
    assert not close(block.state.x, quadratic.solution(), 1e-2)


# ------------------------------------------------------------------ what cannot be trusted is said


def solve(quadratic, algorithm):
    return fb.solve(problem(), samples_of(quadratic), algorithm, steps=2, every=CAPACITY)


def test_a_series_that_cannot_converge_is_reported(quadratic):
    with pytest.warns(AdjointWarning, match="smoothness"):
        result = solve(quadratic, fb.FedNest(0.0, 0.2, **MANY | {"smoothness": 0.5}))
    assert len(result.notes) == 1
    assert result.history[-1]["adjoint_growth"] > 1
    assert solve(quadratic, fb.FedNest(0.0, 0.2, **MANY)).notes == ()


def test_negative_curvature_is_reported_and_cured_by_damping(quadratic):
    eigenvalue = np.linalg.eigvalsh(quadratic.A.mean(0))
    shift = float(np.mean(eigenvalue[:2]))
    saddle = eqx.tree_at(lambda q: q.A, quadratic, quadratic.A - shift * np.eye(DY))
    with pytest.warns(AdjointWarning, match="negative curvature"):
        result = solve(saddle, fb.FedNest(0.0, 0.0, **CG))
    assert len(result.notes) == 1
    assert result.history[-1]["adjoint_curvature"] <= 0
    damped = solve(saddle, fb.FedNest(0.0, 0.0, **CG, damping=shift))
    assert damped.notes == ()
    assert damped.history[-1]["adjoint_curvature"] > 0


# ------------------------------------------------------------------ settings that make no sense


@pytest.mark.parametrize(
    "wrong",
    [
        {"series": "exact"},
        {"inner": "adam"},
        {"terms": 0},
        {"lower_steps": 0},
        {"upper_steps": (1, 2.5)},
        {"lower_rounds": 0},
        {"alternate": False},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        fb.FedNest(0.1, 0.1, **wrong)


def test_an_unmeasured_smoothness_is_refused():
    with pytest.raises(ValueError, match="smoothness"):
        fb.FedNest(0.1, 0.1).adjoint("bilevel")
