"""PDBO: its limits against linear algebra on the exact map, its settings, and what it costs."""

import dataclasses
import functools

import jax
import jax.random as jr
import numpy as np
import optax
import pytest

import fedbilevel as fb
from algorithm.nodes import (
    ALIKE,
    COUNTS,
    DX,
    DY,
    LR,
    UNEVEN,
    WEIGHTS,
    N,
    Running,
    counted,
    drawn,
    exact,
    federation,
    gradients,
    resting_point,
    stationary,
)
from fedbilevel import links
from fedbilevel.adjoint import HGP
from fedbilevel.adjoint.push import receiving_weights
from fedbilevel.algorithm import ITD
from fedbilevel.algorithm.pdbo import Agreed, UpperStep
from fedbilevel.fed.ledger import Ledger, as_arrays, metering

pytestmark = pytest.mark.usefixtures("float64")

STOD = links.Stochastic(0.4, 0.8, seed=2)
SHORT = {"lower_lr": LR, "lower_steps": 3, "terms": 4, "upper": fb.SGD(0.5)}
LONG = {"lower_lr": LR, "lower_steps": 25, "terms": 150, "upper": fb.SGD(2.0), "warm_start": True}
HGP_ONLY = {"alpha": None, "beta": None}


def zero_of(function, shape):
    """Where an affine map of so many numbers is zero; it must be the gradient of something convex."""
    size = int(np.prod(shape))
    at_zero = function(np.zeros(shape)).ravel()
    columns = [function(row.reshape(shape)).ravel() - at_zero for row in np.eye(size)]
    jacobian = np.stack(columns, axis=1)
    assert np.linalg.eigvals(jacobian).real.min() > 0
    return np.linalg.solve(jacobian, -at_zero).reshape(shape)


def slope(weights, x, counts=ALIKE):
    """The exact hypergradient at the resting point of x."""
    q = counted(counts)
    return exact(q, weights, (x, *resting_point(q, weights, x, LR, "after")), LR, "after")


@functools.cache
def personal_optimum(name, counts=ALIKE):
    weights = STOD.network(N).expected() if name == "StoD" else WEIGHTS[name]
    return zero_of(lambda x: slope(weights, x, counts), (N, DX))


def common_optimum(weights, counts=ALIKE):
    """Of one x for all: the sum of the nodes' derivatives is zero."""
    return zero_of(lambda x: slope(weights, np.tile(x, (N, 1)), counts).sum(axis=0), (DX,))


def x_of(running):
    return np.asarray(running.state.upper.x.value)


# ----------------------------------------------------------------------------- limits


@pytest.mark.parametrize(("name", "counts"), [("complete", ALIKE), ("uneven", ALIKE), ("uneven", COUNTS)])
def test_over_fixed_links_every_node_comes_to_its_own_optimum(name, counts):
    """Negative control: one x for all, every node's own problem, and other weights have others."""
    algorithm = fb.PDBO(links.Given(WEIGHTS[name]), **LONG, **HGP_ONLY)
    found, target = x_of(Running(algorithm, counts=counts).advance(120)), personal_optimum(name, counts)
    np.testing.assert_allclose(found, target, atol=1e-8)
    assert np.abs(target - common_optimum(WEIGHTS[name], counts)).max() > 0.1
    assert np.abs(target - alone_optima()).max() > 0.1
    assert np.abs(target - personal_optimum(name, COUNTS if counts == ALIKE else ALIKE)).max() > 0.01


def test_over_random_directed_links_they_come_near_it():
    """The w of one exchange is at times near zero there: with it the recursion would explode."""
    running, rows = Running(fb.PDBO(STOD, **LONG | {"upper": fb.SGD(0.3)})).advance(60), []
    for _ in range(10):
        rows.append(x_of(running.advance(10)))
    target = personal_optimum("StoD")
    assert np.abs(np.mean(rows, axis=0) - target).mean() < 0.05 * np.abs(1 - target).mean()


def agreeing(name, rate, steps, counts=None):
    algorithm = fb.PDBO(
        links.Given(WEIGHTS[name]), **LONG | {"upper": fb.SGD(rate)}, **HGP_ONLY, consensus=True
    )
    return Running(algorithm, counts=counts).advance(steps)


@pytest.mark.parametrize("counts", [ALIKE, COUNTS])
def test_consensus_ends_in_one_x_that_is_the_optimum_of_all(counts):
    target = common_optimum(WEIGHTS["complete"], counts)
    found = x_of(agreeing("complete", 2.0, 120, counts))
    np.testing.assert_allclose(found, np.tile(target, (N, 1)), atol=1e-8)


@pytest.mark.parametrize("outer", ["own", "local"])
def test_consensus_on_the_nodes_own_costs_counts_nodes_by_their_weights(outer):
    """x moves by the weighted mean of the ways that nodes went by themselves."""
    adjoint, rest = HGP(6, outer=outer), {"lower_lr": LR, "lower_steps": 3, "upper": fb.SGD(0.5)}
    each, all_ = (
        x_of(
            Running(
                fb.PDBO(links.Given(WEIGHTS["complete"]), **rest, adjoint=adjoint, consensus=consensus),
                counts=COUNTS,
            ).advance(1)
        )
        for consensus in (False, True)
    )
    np.testing.assert_allclose(all_, np.tile(np.average(each, axis=0, weights=COUNTS), (N, 1)), atol=1e-12)
    assert np.abs(all_ - each.mean(axis=0)).max() > 1e-3


@pytest.mark.parametrize("settings", [{"terms": 2}, {"terms": 2} | HGP_ONLY])
def test_a_lower_variable_of_another_float_type_keeps_it(settings):
    def loss(x, y, samples):
        return ((y["a"].astype(float) * samples - x) ** 2).mean()

    problem = fb.Problem(loss, loss, 0.5, {"a": jax.numpy.ones((), "float32")})
    nodes = fb.Clients([np.full(3, 1.0 + i) for i in range(3)])
    result = fb.solve(problem, nodes, fb.PDBO(links.Complete(), 0.01, 2, fb.SGD(0.1), **settings), 2)
    assert result.y["a"].dtype == "float32"
    assert np.ptp(result.x) > 0


def test_over_a_schedule_of_links_the_bias_is_told():
    turns = links.Given([WEIGHTS["ring"], WEIGHTS["complete"]])
    with pytest.warns(UserWarning, match="a schedule of several matrices, over which the hypergradient is"):
        fb.PDBO(turns, **SHORT).among(N)
    fb.PDBO(turns, **{key: SHORT[key] for key in SHORT if key != "terms"}, adjoint=ITD(3)).among(N)


def test_consensus_over_uneven_links_counts_every_node_alike():
    """Up to the step size, whose part is extrapolated away. Steps weighted by w would end elsewhere."""
    coarse, fine = (agreeing("uneven", rate, steps) for rate, steps in ((0.4, 150), (0.1, 500)))
    target, weight = common_optimum(UNEVEN), stationary(UNEVEN)
    weighted = zero_of(lambda x: weight @ slope(UNEVEN, np.tile(x, (N, 1))), (DX,))
    assert 3 < np.abs(x_of(coarse) - target).max() / np.abs(x_of(fine) - target).max() < 5
    found = (4 * x_of(fine) - x_of(coarse)) / 3
    assert np.abs(found - target).max() < 0.2 * np.abs(weighted - target).max()
    np.testing.assert_allclose(fine.state.upper.w.value.sum(), N, rtol=1e-12)


def own_slopes(x):
    """Of every node's own problem, as if it were alone."""
    q = drawn()
    y = np.linalg.solve(q.A, (np.einsum("nij,nj->ni", q.B, x) + q.b)[..., None])[..., 0]
    f_x, f_y, _ = gradients(q, x, y)
    return f_x + np.einsum("nij,ni->nj", q.B, np.linalg.solve(q.A, f_y[..., None])[..., 0])


@functools.cache
def alone_optima():
    return zero_of(own_slopes, (N, DX))


@pytest.mark.parametrize("counts", [ALIKE, COUNTS])
def test_local_nodes_that_agree_on_x_minimise_the_mean_of_their_own_costs(counts):
    target = zero_of(lambda x: np.asarray(counts) @ own_slopes(np.tile(x, (N, 1))), (DX,))
    assert (np.abs(target - drawn().own_solution()).max() < 1e-10) == (counts == ALIKE)
    settings = LONG | {"upper": fb.SGD(0.4), "terms": 250, "local": True, "consensus": True}
    running = Running(fb.PDBO(links.Complete(), **settings, **HGP_ONLY), counts=counts).advance(120)
    np.testing.assert_allclose(x_of(running), np.tile(target, (N, 1)), atol=1e-8)


# --------------------------------------------------------------------------- settings


def box(steps, rates, adjoint_lr, terms):
    """Steps of PDBO over complete links in numpy: T steps from y0, M terms, a step of 0.5."""
    q, x = drawn(), np.ones((N, DX))
    for step in range(steps + 1):
        y = np.zeros((N, DY))
        for lr in rates:
            y = WEIGHTS["complete"] @ y - lr * gradients(q, x, y)[2]
        if step < steps:
            f_x, f_y, _ = gradients(q, x, y)
            u, v = f_y / N, f_x / N
            for _ in range(terms):
                v = v + adjoint_lr * np.einsum("nij,ni->nj", q.B, u)
                u = u.mean(axis=0) - adjoint_lr * np.einsum("nij,nj->ni", q.A, u)
            x = x - 0.5 * v
    return x, y


def test_a_step_is_one_of_the_optimiser_along_the_hypergradient():
    """Over links that are always there, where reduced variance changes nothing."""
    running = Running(fb.PDBO(links.Complete(), **LONG | {"upper": fb.SGD(0.5)})).advance()
    np.testing.assert_allclose(x_of(running), box(1, [LR] * 25, LR, 150)[0], rtol=1e-12)


def test_a_schedule_of_the_lower_level_is_one_of_its_steps():
    """From the first in every outer step; and the adjoint, and its step size, may be given."""
    rates = optax.piecewise_constant_schedule(LR, {2: 0.5})
    settings = SHORT | {"lower_lr": rates, "terms": None, "adjoint": HGP(4), "adjoint_lr": 0.05}
    running = Running(fb.PDBO(links.Complete(), **settings)).advance(2)
    x, y = box(2, (LR, LR, LR / 2), 0.05, 4)
    np.testing.assert_allclose(x_of(running), x, rtol=1e-6)  # schedules are in single precision
    np.testing.assert_allclose(running.state.lower.y.value, y, rtol=1e-6)


@pytest.mark.parametrize(("which", "lr"), [("first", LR), ("last", LR / 2)])
def test_the_adjoints_step_size_may_be_one_of_the_inner_steps(which, lr):
    rates = optax.piecewise_constant_schedule(LR, {2: 0.5})
    settings = SHORT | {"lower_lr": rates, "terms": None, "adjoint": HGP(4), "adjoint_lr": which}
    running = Running(fb.PDBO(links.Complete(), **settings)).advance(2)
    np.testing.assert_allclose(x_of(running), box(2, (LR, LR, LR / 2), lr, 4)[0], rtol=1e-6)


def test_other_step_sizes_compile_nothing_new(compilations):
    Running(fb.PDBO(STOD, **LONG)).advance()
    before = compilations()
    other = LONG | {"lower_lr": 0.07, "upper": fb.SGD(0.1, penalty=0.3)}
    Running(fb.PDBO(links.Stochastic(0.1, 0.5, directed=False), **other, alpha=0.3, beta=0.2)).advance()
    assert compilations() - before <= 2, "only small things outside the step"


def test_statistics_may_be_known_estimated_or_given():
    """Given as the known ones they are these; estimated ones are near, and others for few exchanges."""
    numbers = receiving_weights(STOD.network(N)).tolist()
    known, given, estimated = (
        Running(fb.PDBO(STOD, **LONG, statistics=statistics)).advance()
        for statistics in ("known", numbers, "estimated")
    )
    np.testing.assert_allclose(x_of(given), x_of(known), rtol=1e-13)
    assert np.abs(x_of(estimated) - x_of(known)).max() > 1e-4
    noted = estimated.state.lower.statistics.value
    np.testing.assert_array_equal(noted["exchanges"], 50)  # the start, and one step


def run(program, *values, fed=None):
    """A program on rows of every node."""
    everyone = (fed or federation()).everyone
    out = everyone.run(program, *(everyone.deal(value, "v") for value in values), key=jr.key(0))
    return jax.tree.map(np.asarray, everyone.gather(out, "v")[0])


def test_blocks_of_x_have_optimisers_of_their_own():
    algorithm = fb.PDBO(links.Ring(), **SHORT | {"upper": {"a": fb.SGD(0.25), "b": fb.Adam(0.01)}})
    x = {"a": np.ones((N, 2)), "b": np.zeros((N, 1))}
    gradient = {"a": np.arange(2.0 * N).reshape(N, 2), "b": np.array([[1.0], [-2], [3], [-4], [5]])}
    moved, _ = run(UpperStep(algorithm.upper), x, gradient, jax.vmap(algorithm.upper.init)(x))
    np.testing.assert_allclose(moved["a"], 1 - 0.25 * gradient["a"], rtol=1e-12)
    np.testing.assert_allclose(moved["b"], -0.01 * np.sign(gradient["b"]), rtol=1e-6)


def test_x_stays_where_it_may_be():
    """After a step, and after the mixture of what nodes sent, which may lead out."""
    fed = federation()
    bounded = dataclasses.replace(fed, problem=dataclasses.replace(fed.problem, constraint=fb.Box(0.9, 1.1)))
    x, h = np.ones((N, DX)), np.tile([[3.0, -3.0]], (N, 1))
    moved, _ = run(UpperStep(fb.SGD(0.1)), x, h, (), fed=bounded)
    np.testing.assert_allclose(moved, np.tile([[0.9, 1.1]], (N, 1)))
    np.testing.assert_allclose(run(Agreed(), 2 * x - h, 2 * np.ones(N), fed=bounded), moved)


# ------------------------------------------------------------------------------- cost


RING = 2 * N  # links, both ways
T, M = 3, 4
INNER = {"z": RING * T * (DY + 1) * 8}
CALLS = {"g_y": T * N, "g_yy": M * N, "g_xy": M * N, "f_x": N, "f_y": N}
PRODUCTS = ("g_yy", "g_xy")


@pytest.mark.parametrize(
    ("settings", "rounds", "edge", "vectors"),
    [
        (HGP_ONLY, T + M, INNER | {"u": RING * M * DY * 8}, 1),
        ({}, T + M, INNER | {"u": RING * M * 2 * DY * 8}, 2),
        (
            HGP_ONLY | {"consensus": True},
            T + M + 1,
            INNER | {"u": RING * M * DY * 8, "x": RING * (DX + 1) * 8},
            1,
        ),
        (HGP_ONLY | {"local": True}, 0, {}, 1),
        ({"local": True, "consensus": True}, 1, {"x": RING * (DX + 1) * 8}, 2),
        ({"adjoint": HGP(M, outer="own")}, T + M, INNER | {"u": RING * M * N * DY * 8}, N),
        (
            {"adjoint": HGP(M, edges="independent"), "when": "before"},
            T + 2 * M,
            INNER | {"u": RING * 2 * M * DY * 8},
            1,
        ),
    ],
    ids=["HGP", "VR-HGP", "CDBO", "local", "CDBO-Local", "own", "independent"],
)
def test_a_step_costs_what_the_docstring_says(settings, rounds, edge, vectors):
    terms, local = None if "adjoint" in settings else M, settings.get("local", False)
    found, exchanges = cost(fb.PDBO(links.Ring(), **SHORT | {"terms": terms} | settings).among(N))
    assert found.rounds == rounds
    assert {label: size for label, size in found.edge.items() if size} == edge
    assert found.calls == {kind: n * (vectors if kind in PRODUCTS else 1) for kind, n in CALLS.items()}
    assert not any(found.down.values())
    assert not any(found.up.values())
    assert exchanges == rounds
    inner = 0 if local else T
    first = {"z": RING * inner * (DY + 1) * 8}
    assert begun(local).start == fb.Ledger(
        rounds=inner, edge=first, messages={"z": RING * inner}, calls={"g_y": T * N}, samples=T * N
    )
    assert begun(local).state.time == inner


@functools.cache
def begun(local):
    """Before the first step, whatever the adjoint is."""
    return Running(fb.PDBO(links.Ring(), **SHORT, local=local))


def cost(algorithm):
    """The ledger of a step, and how many exchanges the state counts in it."""
    fed, before = federation(), begun(algorithm.local).state

    @jax.jit
    def spend(state, key):
        with metering() as meter:
            after, _ = algorithm.step(fed, state, key)
        return as_arrays(meter.counts), after.time - state.time

    counts, exchanges = spend(before, jr.key(0))
    return Ledger.from_counts(counts), int(exchanges)


# --------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"statistics": "guessed"}, 'statistics is \'guessed\'; it must be "estimated", "known" or a matrix'),
        ({"alpha": None}, "give both, or None for both"),
        ({"lower_steps": 0}, "lower_steps"),
        ({"terms": -1}, "terms is -1"),
        ({"beta": 2.0}, r"beta is 2\.0"),
        ({"alpha": "0.9"}, "alpha is '0.9'; it must be a number between 0 and 1"),
        ({"local": True, "terms": None, "adjoint": HGP(3)}, 'must have outer="local"'),
        ({"terms": None}, "terms is None and adjoint None; give one of the two"),
        ({"adjoint": HGP(3)}, "terms is 4 and adjoint PushAdjoint.*; give one of the two"),
        ({"when": "during"}, "when is 'during'"),
        ({"adjoint_lr": -1.0}, r"a step size is -1\.0"),
        (
            {"adjoint_lr": "lst"},
            "adjoint_lr is 'lst'; it must be one of 'first', 'last'; did you mean 'last'",
        ),
    ],
)
def test_mistakes_are_explained(settings, message):
    with pytest.raises(ValueError, match=message):
        fb.PDBO(links.Ring(), **SHORT | settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"links": links.Ring(directed=True)}, "assumption 6"),
        ({"links": links.Given(UNEVEN.T)}, "sum to one"),
        ({"links": links.Ring(), "statistics": np.eye(2)}, r"shape \(2, 2\); 5 clients need \(5, 5\)"),
        ({"links": links.Ring(), "statistics": np.full((N, N), np.nan)}, "statistics hold a NaN"),
        ({"links": links.Stochastic(directed=False, balanced=True), "statistics": "known"}, "no closed form"),
    ],
)
def test_networks_and_numbers_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        fb.PDBO(**SHORT | settings).among(N)


def test_a_table_of_step_sizes_has_one_for_each_inner_step():
    with pytest.raises(
        ValueError, match=r"lower_lr has the shape \(4,\); give a number, or one for each of 3"
    ):
        fb.PDBO(links.Ring(), **SHORT | {"lower_lr": np.full(T + 1, 0.1)}).at(0)


def test_whole_numbers_of_numpy_are_whole_numbers():
    method = fb.PDBO(links.Ring(), **SHORT | {"lower_steps": np.int64(T), "terms": np.arange(5)[M]})
    assert (type(method.lower_steps), type(method.terms)) == (int, int)
    assert fb.SketchLasso(np.int32(7), 0.1).size == 7


def test_an_adjoint_is_no_name():
    with pytest.raises(TypeError, match="adjoint is 'hgp', which has no check; give one such as"):
        fb.PDBO(links.Ring(), **SHORT | {"adjoint": "hgp"})


def test_silent_nodes_are_refused_where_anything_is_mixed():
    """Nodes that solve for themselves may fall silent; what they mix may not get lost."""
    silent = dataclasses.replace(federation(), dropout=0.1)

    def shapes(**settings):
        method = fb.PDBO(links.Ring(), **SHORT | settings).among(N)
        return jax.eval_shape(
            lambda key: method.step(silent, method.init(silent, key), key)[0].time, jr.key(0)
        )

    for mixing in ({}, {"local": True, "consensus": True}):
        with pytest.raises(ValueError, match=r"dropout is 0\.1"):
            shapes(**mixing)
    assert shapes(local=True).shape == ()
