"""Hypergradient push against dense linear algebra, finite differences and all sets of links."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
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
    counted,
    drawn,
    exact,
    exact_own,
    federation,
    first_twice,
    gradients,
    hypergradient,
    operators,
    outer,
    points,
    pushed,
    resting_point,
    starts,
    stationary,
)
from fed.graphs import graphs, shares
from fedbilevel import links
from fedbilevel.adjoint import HGP, VRHGP, RecurrentBackpropagation
from fedbilevel.adjoint.push import receiving_weights

pytestmark = pytest.mark.usefixtures("float64")

MANY = 200  # terms: what is left of the series is below rounding
FEW = 30


def far(a, b):
    """How far a is from b, relatively."""
    return float(np.abs(a - b).max() / np.abs(b).max())


# ---------------------------------------------------------------------- fixed links


@functools.cache
def known(name, when, counts=ALIKE):
    """A resting point, and the hypergradient there by dense linear algebra, of nodes that count so much."""
    q, weights, x = counted(counts), WEIGHTS[name], points()
    point = (x, *resting_point(q, weights, x, LR, when))
    return point, exact(q, weights, point, LR, when)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_hgp_is_the_explicit_hypergradient(name, when):
    point, truth = known(name, when)
    found = hypergradient(HGP(MANY), links.Given(WEIGHTS[name]), point, when)
    np.testing.assert_allclose(found, truth, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("counts", [ALIKE, COUNTS])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_explicit_hypergradient_is_that_of_finite_differences(name, when, counts):
    """The outer cost at the resting point is quadratic in x, so central differences are exact."""
    (point, truth), q = known(name, when, counts), counted(counts)
    found = np.zeros_like(truth)
    for index in np.ndindex(truth.shape):
        costs = []
        for sign in (0.5, -0.5):
            x = point[0].copy()
            x[index] += sign
            y = resting_point(q, WEIGHTS[name], x, LR, when)[0]
            costs.append(outer(drawn(), x, y, counts))
        found[index] = costs[0] - costs[1]
    np.testing.assert_allclose(found, truth, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("adjoint", "when"),
    [(HGP(MANY), "before"), (HGP(MANY), "after"), (RecurrentBackpropagation(MANY), "after")],
)
def test_nodes_count_by_their_weights(adjoint, when):
    """Negative control: as if all counted alike, the same recursion at the same point ends elsewhere."""
    point, truth = known("uneven", when, COUNTS)
    found, alike = (
        hypergradient(adjoint, links.Given(UNEVEN), point, when, counts=counts) for counts in (COUNTS, None)
    )
    np.testing.assert_allclose(found, truth, rtol=1e-9, atol=1e-11)
    assert far(alike, truth) > 0.05


def test_a_node_that_counts_twice_is_two_nodes():
    """Over complete links, with steps before sending; its derivative is the sum of theirs."""
    counts = (10 / 6,) + (5 / 6,) * (N - 1)
    point = known("complete", "before", counts)[0]
    found = hypergradient(HGP(MANY), links.Complete(), point, "before", counts=counts)
    two, twice = (jax.tree.map(first_twice, tree) for tree in (drawn(), point))
    each = exact(two, np.full((N + 1, N + 1), 1 / (N + 1)), twice, LR, "before")
    np.testing.assert_allclose(found, np.vstack([each[:2].sum(axis=0), each[2:]]), rtol=1e-9)


@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_are_received_not_sent(when):
    """Negative control: over uneven links the senders' own weights give another vector."""
    point, truth = known("uneven", when)
    network = links.Given(UNEVEN).network(N)
    adjoint = jax.tree.map(jnp.asarray, HGP(MANY))
    wrong = pushed(adjoint, federation(), network, UNEVEN, point, LR, when, jr.key(0))
    assert far(wrong, truth) > 0.02


def test_steps_before_sending_over_complete_links_give_the_hypergradient_of_consensus():
    """`(∇_x f_j + B_jᵀ Ā⁻¹ mean_i ∇_y f_i)/n`; negative control: after receiving the gap is O(α)."""
    gaps = []
    for when in ("before", "after"):
        q, (point, found) = drawn(), known("complete", when)
        f_x, f_y, _ = gradients(q, *point[:2])
        u = np.linalg.solve(q.A.mean(axis=0), f_y.mean(axis=0))
        gaps.append(far(found, (np.einsum("nij,i->nj", q.B, u) + f_x) / N))
    assert gaps[0] < 1e-12
    assert gaps[1] > 1e-3


@pytest.mark.parametrize("name", WEIGHTS)
def test_exact_backpropagation_is_the_explicit_hypergradient(name):
    """The links come in pairs; their weights need not be the same both ways."""
    point, truth = known(name, "after")
    found = hypergradient(RecurrentBackpropagation(MANY), links.Given(WEIGHTS[name]), point, "after")
    np.testing.assert_allclose(found, truth, rtol=1e-9, atol=1e-11)


# ------------------------------------------------------------- all sets of links, n = 3


CHANCES = np.array([[1.0, 0.7, 0.2], [0.4, 1.0, 0.9], [0.55, 0.3, 1.0]])
EVEN = np.array([[1.0, 0.7, 0.2], [0.7, 1.0, 0.9], [0.2, 0.9, 1.0]])
SEQUENCES = 4096  # 64² of directed links, or 8⁴; fewer are repeated, so that they are no other program
SOMEWHERE = (points(3), points(3, seed=2) @ np.ones((DX, 3)), np.array([0.7, 1.2, 1.1]))


@eqx.filter_jit
def at_each(adjoint, fed, schedule, receive, times, when):
    """The recursion from each of these times on, over links that follow a schedule."""
    run = functools.partial(pushed, adjoint, fed, links.Given(schedule).network(3), receive)
    return jax.vmap(lambda time: run(SOMEWHERE, LR, when, jr.key(0), time))(times)


def mean_over_all(adjoint, chances, directed, exchanges, when, receive=None):
    """The expectation of a recursion of so many exchanges: every sequence of sets of links, weighed."""
    kind = links.Stochastic(probability=chances, directed=directed)
    sets = list(graphs(chances, undirected=not directed))
    sequences = np.stack(np.meshgrid(*[np.arange(len(sets))] * exchanges, indexing="ij"), axis=-1)
    sequences = sequences.reshape(-1, exchanges)
    chance = np.array([p for p, _ in sets])[sequences].prod(axis=1)
    schedule = np.stack([shares(g) for _, g in sets])[np.resize(sequences, (SEQUENCES, exchanges)).ravel()]
    receive = receiving_weights(kind.network(3)) if receive is None else receive
    each = at_each(adjoint, federation(3), schedule, receive, exchanges * np.arange(SEQUENCES), when)
    return np.einsum("s,snd->nd", chance, np.asarray(each)[: len(sequences)])


def with_means(chances, directed, when, rounds, alpha=1.0, beta=0.0):
    """The recursion with expected operators, in numpy."""
    sets = graphs(chances, undirected=not directed)
    A, B = operators(drawn(3), sum(p * shares(g) for p, g in sets), SOMEWHERE[2], LR, when)
    c_x, c = starts(drawn(3), *SOMEWHERE)
    v, u, w = np.zeros_like(c_x), c, c
    for _ in range(rounds):
        v = alpha * (v + B @ u) + (1 - alpha) * B @ w
        u = A @ u
        w = beta * (A @ w + c) + (1 - beta) * (w + u)
    return (v + c_x).reshape(-1, DX)


@pytest.mark.parametrize(
    ("chances", "directed", "when"),
    [
        (CHANCES, True, "before"),
        (CHANCES, True, "after"),
        (EVEN, False, "after"),
    ],
)
def test_hgp_is_unbiased_over_random_links(chances, directed, when):
    found = mean_over_all(HGP(2), chances, directed, 2, when)
    np.testing.assert_allclose(found, with_means(chances, directed, when, 2), rtol=1e-12)


def test_hgp_is_unbiased_with_independent_links_for_both_lines():
    """Four exchanges in two rounds."""
    adjoint = HGP(2, edges="independent")
    assert adjoint.exchanges("before") == 4
    found = mean_over_all(adjoint, EVEN, False, 4, "before")
    np.testing.assert_allclose(found, with_means(EVEN, False, "before", 2), rtol=1e-12)


def test_steps_after_receiving_need_one_exchange_a_round_even_with_independent_links():
    adjoint = HGP(2, edges="independent")
    assert adjoint.exchanges("after") == 2
    found = mean_over_all(adjoint, EVEN, False, 2, "after")
    np.testing.assert_allclose(found, with_means(EVEN, False, "after", 2), rtol=1e-12)


def test_vr_hgp_is_the_mean_recursion_in_expectation():
    found = mean_over_all(VRHGP(2, 0.6, 0.3), CHANCES, True, 2, "before")
    np.testing.assert_allclose(found, with_means(CHANCES, True, "before", 2, 0.6, 0.3), rtol=1e-12)


def test_without_the_division_by_frequencies_hgp_is_biased():
    """Negative control."""
    network = links.Stochastic(probability=CHANCES).network(3)
    found = mean_over_all(HGP(2), CHANCES, True, 2, "after", receive=network.expected().T)
    assert far(found, with_means(CHANCES, True, "after", 2)) > 0.02


def test_receiving_weights_of_links_that_are_never_there_are_zero():
    chances = np.where(CHANCES == 0.2, 0.0, CHANCES)
    receive = receiving_weights(links.Stochastic(probability=chances).network(3))
    assert receive[0, 2] == 0
    assert np.all(np.isfinite(receive))
    np.testing.assert_array_equal(receive.diagonal() > 0, True)


# ----------------------------------------------------------------- variance reduction


def test_vr_hgp_with_one_and_zero_is_hgp():
    point, kind = known("uneven", "after")[0], links.Stochastic(seed=4)
    plain, reduced = (hypergradient(a, kind, point, "after") for a in (HGP(MANY), VRHGP(MANY, 1.0, 0.0)))
    np.testing.assert_allclose(reduced, plain, rtol=1e-12)


def test_vr_hgp_keeps_the_direct_gradient():
    """Negative control: damped with v in every round, as v started from it, the direct gradient is lost."""
    point, truth = known("ring", "after")
    found = hypergradient(VRHGP(MANY, 0.9, 0.1), links.Ring(), point, "after")
    np.testing.assert_allclose(found, truth, rtol=1e-9, atol=1e-11)
    c_x, _ = starts(drawn(), *point)
    damped = truth - (1 - 0.9**MANY) * c_x.reshape(-1, DX)
    assert far(damped, truth) > 0.1
    assert far(found, damped) > 0.1


@functools.cache
def error(name, reduced, terms):
    """Relative root mean square error over 16 sequences of links."""
    kind = links.Stochastic(0.4, 0.8, directed=name == "StoD", seed=5)
    mean, x = kind.network(N).expected(), points()
    point = (x, resting_point(drawn(), mean, x, LR, "after")[0], stationary(mean))
    truth = exact(drawn(), mean, point, LR, "after")
    adjoint = VRHGP(terms) if reduced else HGP(terms)
    each = np.stack([hypergradient(adjoint, kind, point, "after", seed=seed) for seed in range(16)])
    return float(np.sqrt(np.mean((each - truth) ** 2) / np.mean(truth**2)))


@pytest.mark.parametrize("name", ["StoU", "StoD"])
def test_vr_hgp_is_at_least_twice_as_accurate(name):
    assert error(name, True, MANY) < error(name, False, MANY) / 2


@pytest.mark.parametrize("name", ["StoU", "StoD"])
def test_the_error_of_vr_hgp_falls_with_the_terms_and_that_of_hgp_does_not(name):
    assert error(name, True, MANY) < 0.7 * error(name, True, FEW)
    assert error(name, False, MANY) > 0.9 * error(name, False, FEW)


# ----------------------------------------------------------------- whose outer cost


@pytest.mark.parametrize("name", ["ring", "uneven"])
@pytest.mark.parametrize(
    ("adjoint", "when"), [(HGP(MANY, outer="own"), "before"), (VRHGP(MANY, outer="own"), "after")]
)
def test_the_derivative_of_a_nodes_own_cost(adjoint, when, name):
    point, of_mean = known(name, when)
    truth = exact_own(drawn(), WEIGHTS[name], point, LR, when)
    found = hypergradient(adjoint, links.Given(WEIGHTS[name]), point, when)
    np.testing.assert_allclose(found, truth, rtol=1e-9, atol=1e-11)
    assert far(truth / N, of_mean) > 0.05, "a node's own cost is not its share of the mean"


def test_the_derivative_as_if_a_node_had_no_neighbours():
    """`∇_x f_i + B_iᵀA_i⁻¹∇_y f_i`, whatever w is."""
    q, (point, of_mean) = drawn(), known("uneven", "after")
    f_x, f_y, _ = gradients(q, *point[:2])
    truth = f_x + np.einsum("nij,ni->nj", q.B, np.linalg.solve(q.A, f_y[..., None])[..., 0])
    found = hypergradient(HGP(2 * MANY, outer="local"), links.Given(UNEVEN), point, "after")
    np.testing.assert_allclose(found, truth, rtol=1e-9, atol=1e-11)
    assert far(truth / N, of_mean) > 0.05


@pytest.mark.parametrize("when", ["before", "after"])
def test_damping_is_added_to_every_hessian(when):
    """It is the hypergradient of the same point with `A_i + δI`."""
    q, (point, undamped) = drawn(), known("uneven", when)
    stiff = eqx.tree_at(lambda q: q.A, q, q.A + 0.7 * np.eye(DY))
    truth = exact(stiff, UNEVEN, point, LR, when)
    for adjoint in (HGP(MANY, damping=0.7), VRHGP(MANY, damping=0.7)):
        found = hypergradient(adjoint, links.Given(UNEVEN), point, when)
        np.testing.assert_allclose(found, truth, rtol=1e-9, atol=1e-11)
    assert far(truth, undamped) > 0.01


def test_all_of_a_nodes_samples_give_the_start_without_noise():
    """Samples differ in ∇f, not in H and J. Negative control: a minibatch is not the mean."""
    point, truth = known("uneven", "after")
    q, network = drawn(), links.Given(UNEVEN).network(N)
    clients = q.clients(samples=6, noise=1.0, batch_size=2)
    fed, receive = fb.Simulator().federation(q.problem(metrics={}), clients), receiving_weights(network)
    of_all, of_two = (
        pushed(HGP(MANY, whole=whole), fed, network, receive, point, LR, "after", jr.key(0))
        for whole in (True, False)
    )
    np.testing.assert_allclose(of_all, truth, rtol=1e-9, atol=1e-11)
    assert far(of_two, truth) > 0.05


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HGP(-1), "terms is -1; it must be a whole number of at least 0"),
        (lambda: HGP(True), "terms is True; it must be a whole number"),
        (
            lambda: HGP(3, alpha=0.5),
            r"alpha is 0\.5 and beta 0\.0, which plain hypergradient push does not have",
        ),
        (lambda: VRHGP(3, alpha=1.5), r"alpha is 1\.5; it must be a number between 0 and 1"),
        (lambda: HGP(3, damping=-1.0), r"damping is -1\.0; it must be a number of at least 0"),
        (lambda: VRHGP(3, beta=-0.1), r"beta is -0\.1; it must be a number between 0 and 1"),
    ],
)
def test_mistakes_are_explained(make, message):
    with pytest.raises(ValueError, match=message):
        make()
