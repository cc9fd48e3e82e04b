"""MA-DSBO against loops in numpy: every iterate, where it ends, and what it costs."""

import functools

import equinox as eqx
import jax.random as jr
import numpy as np
import pytest

import fedbilevel as fb
from algorithm.nodes import COUNTS, DX, DY, UNEVEN, N, Running, counted, drawn, gradients, traces_of
from algorithm.peers import (
    BALANCED,
    COMPLETE,
    IN_TURN,
    RING,
    U,
    X,
    Y,
    drawn_weights,
    dsoba,
    key_of_step,
    last,
    madsbo,
    optimum,
    rows,
    solved,
    tracked,
)
from fedbilevel import links
from fedbilevel.algorithm.madsbo import MADSBO
from fedbilevel.algorithm.sgp import step_keys
from fedbilevel.fed.ledger import Ledger

pytestmark = pytest.mark.usefixtures("float64")

RATES = (0.2, 0.06, 0.05)
SHORT, LONG = (4, 2), (120, 120)  # T and N
ROUNDS = sum(SHORT) + 1
KINDS = {"ring": links.Ring(), "random": BALANCED, "in turn": IN_TURN}


def method(kind, steps=SHORT, average=1.0, rates=RATES):
    return MADSBO(kind, *rates, *steps, average)


def step_weights(kind, step):
    """W of each exchange of a step: T on y, N on u, one on x."""
    lower, adjoint, _, upper = jr.split(key_of_step(step), 4)
    inner = [(lower, t) for t in range(SHORT[0])] + [(adjoint, t) for t in range(SHORT[1])]
    keys = [*(step_keys(jr.fold_in(key, t))[1] for key, t in inner), upper]
    return [drawn_weights(kind, key, step * ROUNDS + place) for place, key in enumerate(keys)]


def fixed(W, times, steps=SHORT):
    return [[W] * (sum(steps) + 1)] * times


def largest(a, b):
    return np.abs(a - b).max()


# ------------------------------------------------------------------ trajectories


@pytest.mark.parametrize("average", [1.0, 0.3])
def test_every_iterate_is_that_of_the_box(average):
    running = Running(method(links.Ring(), average=average))
    for Z in madsbo(drawn(), fixed(RING, 6), RATES, SHORT, average):
        assert largest(rows(running.advance()), Z) <= 1e-12
    for other in ({"steps": (3, 2)}, {"steps": (4, 3)}, {"average": 1.3 - average}):
        settings = {"steps": SHORT, "average": average} | other
        weights = fixed(RING, 6, settings["steps"])
        assert largest(rows(running), last(madsbo(drawn(), weights, RATES, **settings))) > 1e-3


@pytest.mark.parametrize("name", ["random", "in turn"])
def test_so_it_is_over_links_that_come_and_go_or_follow_a_schedule(name):
    """Every exchange has a number and a key of its own."""
    running, weights = Running(method(KINDS[name])), [step_weights(KINDS[name], step) for step in range(4)]
    assert largest(weights[0][0], weights[0][1]) > 0.1
    for Z in madsbo(drawn(), weights, RATES, SHORT):
        assert largest(rows(running.advance()), Z) <= 1e-12


def test_nodes_count_by_their_weights():
    running = Running(method(links.Ring()), counts=COUNTS)
    for Z in madsbo(counted(COUNTS), fixed(RING, 6), RATES, SHORT):
        assert largest(rows(running.advance()), Z) <= 1e-12
    assert largest(rows(running), last(madsbo(drawn(), fixed(RING, 6), RATES, SHORT))) > 1e-2


def test_x_stays_where_it_may_be():
    problem = drawn().problem(metrics={}, constraint=fb.Box(0.9, np.inf))
    found = fb.solve(problem, drawn().clients(), method(links.Ring()), 3)
    free = rows(Running(method(links.Ring())).advance(3))[:, X]
    assert np.min(free) < 0.9
    assert np.min(found.x) == 0.9


# ------------------------------------------------------------------ limits


@functools.cache
def of_one_mind():
    """Nodes whose A, b, c and D differ, and whose directions of x are the same, once y and u are."""
    names = ("B", "E", "e", "rho")
    means = [np.broadcast_to(rows.mean(axis=0), rows.shape) for rows in (getattr(drawn(), n) for n in names)]
    return eqx.tree_at(lambda q: [getattr(q, name) for name in names], drawn(), means)


@pytest.mark.parametrize("average", [1.0, 0.3])
def test_every_node_comes_to_the_solution_where_only_y_and_u_need_agreement(average):
    """Negative controls: decentralised descent without tracking does not, nor do a few inner steps."""
    q = of_one_mind()
    target = solved(q)
    np.testing.assert_allclose(target[0, X], q.solution(), atol=1e-12)
    fed = fb.Simulator().federation(q.problem(metrics={}), q.clients(weights=np.ones(N)))
    session = fed.compile(method(links.Ring(), LONG, average, (0.3, *RATES[1:])).among(N))
    state, _ = session.init(jr.key(0))
    x = session.advance(state, jr.key(0), 0, 140, 5000).state.x.value
    assert largest(x, target[:, X]) <= 1e-8
    assert largest(last(dsoba(q, [RING] * 600, (0.1, 0.1, 0.1)))[:, X], target[:, X]) > 1e-2
    few = last(madsbo(q, fixed(RING, 300), RATES, SHORT))
    assert largest(few[:, X], target[:, X]) > 1e-3


def resting(q, W, upper_lr):
    """x where `x = W x − α d`, y and u exact."""

    def gap(x):
        hessian = q.A.mean(axis=0)
        y = np.linalg.solve(hessian, np.mean(np.einsum("nij,nj->ni", q.B, x) + q.b, axis=0))
        f_x, f_y, _ = gradients(q, x, np.tile(y, (N, 1)))
        u = np.linalg.solve(hessian, f_y.mean(axis=0))
        return x - W @ x + upper_lr * (f_x + np.einsum("nij,i->nj", q.B, u))

    start = gap(np.zeros((N, DX))).ravel()
    columns = [gap(row.reshape(N, DX)).ravel() - start for row in np.eye(N * DX)]
    return np.linalg.solve(np.stack(columns, axis=1), -start).reshape(N, DX)


@pytest.mark.parametrize(("kind", "W"), [(links.Ring(), RING), (links.Complete(), COMPLETE)])
def test_else_they_end_at_a_distance_in_proportion_to_the_upper_step_size(kind, W):
    """x is not tracked, so that with complete links, too, nodes rest where mixing and steps balance."""
    running = Running(method(kind, LONG)).advance(120)
    assert largest(rows(running)[:, X], resting(drawn(), W, RATES[0])) <= 1e-7
    assert np.ptp(rows(running)[:, Y], axis=0).max() <= 1e-7, "on y they agree"
    assert np.ptp(rows(running)[:, U], axis=0).max() <= 1e-7, "and on u"
    ways = [np.linalg.norm(resting(drawn(), W, lr) - optimum()[:, X]) for lr in (0.02, 0.01, 0.005)]
    assert ways[-1] > 1e-3
    np.testing.assert_allclose(np.divide(ways[:-1], ways[1:]), 2, rtol=0.05)


def test_the_limit_is_that_of_the_weighted_problem():
    running = Running(method(links.Ring(), LONG), counts=COUNTS).advance(120)
    assert largest(rows(running)[:, X], resting(counted(COUNTS), RING, RATES[0])) <= 1e-7
    assert largest(rows(running)[:, X], resting(drawn(), RING, RATES[0])) > 1e-2


@pytest.mark.parametrize(("share", "comes_to_rest"), [(0.98, True), (1.02, False)])
def test_tracking_is_stable_below_the_step_size_of_the_docstring(share, comes_to_rest):
    """Of nodes that are alike; curvatures are from 1 to 4."""
    q, V = drawn(alike=True), np.random.default_rng(0).normal(size=(N, DY))
    bound = (1 + np.linalg.eigvalsh(RING).min()) ** 2 / (2 * 4.0)
    end = tracked(lambda V: V @ q.A[0], V, [RING] * 1500, share * bound)
    assert (np.abs(end).max() < 1e-6) == comes_to_rest


# ------------------------------------------------------------------ cost


def test_it_costs_what_the_docstring_says():
    running, (T, terms), present = Running(method(links.Ring())).advance(3), SHORT, 3 * 2 * N
    assert running.start == Ledger()
    assert running.ledger == Ledger(
        rounds=3 * (T + terms + 1),
        edge={"y": present * T * 16 * DY, "u": present * terms * 16 * DY, "x": present * 8 * DX},
        messages={"y": present * T, "u": present * terms, "x": present},
        calls={"g_y": 3 * N * T, "g_yy": 3 * N * terms, "f_y": 3 * N * terms, "f_x": 3 * N, "g_xy": 3 * N},
        samples=3 * N * (T + 2 * terms + 2),
    )


def test_one_program_serves_all_graphs_and_averages():
    kinds = (links.Complete(), links.Ring(), links.ErdosRenyi(), links.Given(RING), BALANCED)
    counts = traces_of(method(kind, average=average) for kind in kinds for average in (1.0, 0.3))
    assert counts[0] > 0
    assert counts == counts[:1] * 10


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (links.Stochastic(), "these links come and go, .* push-sum methods SGP and PDBO"),
        (links.Given(UNEVEN), r"those of these sum to 0\.\d+\.\.1\.\d+\. Take links\.Complete, Ring"),
    ],
)
def test_weights_that_are_not_doubly_stochastic_are_refused(kind, message):
    with pytest.raises(fb.CannotRunError, match=f"^MADSBO cannot mix over these links: .*{message}"):
        method(kind).among(N)


def test_silent_nodes_are_refused():
    engine = fb.Simulator(dropout=0.1)
    with pytest.raises(ValueError, match=r"dropout is 0\.1, but where clients mix with their neighbours"):
        fb.solve(drawn().problem(), drawn().clients(), method(links.Ring()), 1, engine=engine)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": (0, 1)}, "lower_steps is 0; it must be a whole number of at least 1"),
        ({"steps": (2.5, 1)}, "lower_steps is 2.5; it must be a whole number"),
        ({"steps": (1, -1)}, "terms is -1; it must be a whole number of at least 1"),
        ({"average": 0}, "average is 0; it is the share of the new direction"),
        ({"average": 2.0}, "average is 2.0; it is the share of the new direction"),
        ({"rates": (-0.1, 0.1, 0.1)}, "a step size is -0.1"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        method(links.Ring(), **settings)


def test_links_must_be_links():
    with pytest.raises(TypeError, match="links is 'Ring'; it must say who hears whom"):
        method("Ring")
