"""Stochastic gradient push against loops in numpy, with the links that it drew; and what it costs."""

import functools

import jax
import jax.numpy as jnp
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
    N,
    Running,
    counted,
    drawn,
    federation,
    first_twice,
    gradients,
    resting_point,
    sgp_step,
    stationary,
    traces_of,
)
from fedbilevel import links
from fedbilevel.adjoint.push import receiving_weights
from fedbilevel.algorithm.sgp import PushSum, first_lower, step_keys
from fedbilevel.fed.network_check import check_links
from fedbilevel.local.push_sum import ReceivingWeights

pytestmark = pytest.mark.usefixtures("float64")

X = np.ones((N, DX))  # where the quadratic starts, at every node
STOD, STOU = links.Stochastic(0.3, 0.7, seed=2), links.Stochastic(0.3, 0.7, directed=False, seed=2)


def drawn_weights(kind, steps, seed=0):
    """The weights of the exchanges of a run, one each."""
    for time in range(steps):
        key = jr.fold_in(jr.fold_in(jr.key(seed), time), 0)
        yield np.asarray(kind.network(N).draw(step_keys(key)[1], time))


def boxes(kind, steps, when, rates=None, counts=ALIKE):
    """z and w after so many steps, in numpy."""
    z, w = np.zeros((N, DY)), np.ones(N)
    for time, W in enumerate(drawn_weights(kind, steps)):
        z, w = sgp_step(counted(counts), W, X, z, w, LR if rates is None else rates(time), when)
    return z, w


def state_of(running):
    y, w = np.asarray(running.state.lower.y.value), np.asarray(running.state.lower.w.value)
    return y * w[:, None], w


@functools.cache
def after_steps(kind_name, when, counts=ALIKE):
    return Running(fb.SGP(KINDS[kind_name], LR, when), counts=counts).advance(7)


KINDS = {"complete": links.Complete(), "uneven": links.Given(UNEVEN), "StoD": STOD, "StoU": STOU}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", KINDS)
def test_steps_are_those_of_the_box(name, when):
    z, w = state_of(after_steps(name, when))
    expected = boxes(KINDS[name], 7, when)
    np.testing.assert_allclose(z, expected[0], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(w, expected[1], rtol=1e-12)


@pytest.mark.parametrize("when", ["before", "after"])
def test_nodes_make_steps_by_their_weights(when):
    """Negative control: as if all counted alike, they come elsewhere."""
    z, w = state_of(after_steps("StoD", when, COUNTS))
    expected, alike = (boxes(STOD, 7, when, counts=counts) for counts in (COUNTS, ALIKE))
    np.testing.assert_allclose(z, expected[0], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(w, expected[1], rtol=1e-12)
    assert np.abs(z - alike[0]).max() > 0.03


def test_mass_is_conserved_where_links_are_absent():
    """Without gradients Σz and Σw stay; with them Σw does, and Σz moves by the gradients alone."""
    still = fb.SGP(STOD, 0.0)
    running = Running(still)
    rows = np.random.default_rng(0).normal(size=(N, DY))
    lower = running.state.lower._replace(y=fb.fed.Kept(jnp.asarray(rows)))
    running.state = running.state._replace(lower=lower)
    z, w = state_of(running.advance(7))
    np.testing.assert_allclose(z.sum(axis=0), rows.sum(axis=0), rtol=1e-12)
    assert w.sum() == pytest.approx(N, rel=1e-14)
    assert np.ptp(w) > 0.1, "all nodes hear equally much: nothing was absent"
    spread = np.ptp(z / w[:, None], axis=0)
    assert np.all(spread < 0.1 * np.ptp(rows, axis=0)), "they come to the mean"
    np.testing.assert_allclose((z / w[:, None])[0], rows.mean(axis=0), atol=0.1)


def test_before_sending_over_complete_links_it_is_fedavg_of_one_local_step():
    q = drawn()
    averaged = fb.solve(q.problem(metrics={}), q.clients(), fb.FedAvg(LR, level="lower"), 7)
    rows = np.asarray(after_steps("complete", "before").state.lower.y.value)
    np.testing.assert_allclose(rows, np.tile(averaged.y, (N, 1)), rtol=1e-12)
    y = np.zeros(DY)
    for _ in range(7):
        y = y - LR * gradients(q, X, np.tile(y, (N, 1)))[2].mean(axis=0)
    np.testing.assert_allclose(rows[0], y, rtol=1e-12)


@pytest.mark.parametrize("when", ["before", "after"])
def test_with_doubly_stochastic_weights_it_is_decentralised_sgd(when):
    kind = links.ErdosRenyi(0.5, seed=1)
    running, W, y = Running(fb.SGP(kind, LR, when)).advance(7), kind.network(N).expected(), np.zeros((N, DY))
    for _ in range(7):
        move = LR * gradients(drawn(), X, y)[2]
        y = W @ (y - move) if when == "before" else W @ y - move
    np.testing.assert_allclose(running.state.lower.y.value, y, rtol=1e-12)
    np.testing.assert_allclose(running.state.lower.w.value, 1, rtol=1e-14)


@pytest.mark.parametrize("counts", [ALIKE, COUNTS])
@pytest.mark.parametrize("when", ["before", "after"])
def test_over_directed_links_all_nodes_come_to_rest_near_the_minimiser_of_the_mean(when, counts):
    """Where the box does; extrapolated to a step size of zero, that is the minimiser.

    Negative control: without the division by w, or with the rows' mean, the limit is another one.
    """
    running = Running(fb.SGP(links.Given(UNEVEN), LR, when), counts=counts).advance(400)
    rest = resting_point(counted(counts), UNEVEN, X, LR, when, 400)[0]
    np.testing.assert_allclose(running.state.lower.y.value, rest, rtol=1e-10)
    coarse, fine = (
        resting_point(counted(counts), UNEVEN, X, lr, when, round(20 / lr))[0] for lr in (0.01, 0.005)
    )
    target, limit = minimiser(counts), 2 * fine - coarse
    np.testing.assert_allclose(limit, np.tile(target, (N, 1)), atol=5e-3)
    assert np.abs(limit * stationary(UNEVEN)[:, None] - target).max() > 0.1
    assert np.abs(minimiser(stationary(UNEVEN) * counts) - target).max() > 0.03


def test_before_sending_over_complete_links_they_come_to_the_weighted_minimiser_exactly():
    """Negative control: it is not that of nodes that count alike."""
    running = Running(fb.SGP(links.Complete(), LR, "before"), counts=COUNTS).advance(400)
    target = minimiser(COUNTS)
    np.testing.assert_allclose(running.state.lower.y.value, np.tile(target, (N, 1)), rtol=1e-10)
    assert np.abs(target - minimiser(ALIKE)).max() > 0.03


def test_a_node_that_counts_twice_is_two_nodes():
    """Over complete links, with steps before sending."""
    two, z, w = jax.tree.map(first_twice, drawn()), np.zeros((N + 1, DY)), np.ones(N + 1)
    for _ in range(7):
        z, w = sgp_step(two, np.full((N + 1, N + 1), 1 / (N + 1)), first_twice(X), z, w, LR, "before")
    found = after_steps("complete", "before", (2.0,) + (1.0,) * (N - 1)).state.lower.y.value
    np.testing.assert_allclose(first_twice(found), z, rtol=1e-12)


def minimiser(counts):
    """Of the weighted sum of g."""
    q = drawn()
    return np.linalg.solve(np.einsum("n,nij->ij", counts, q.A), np.asarray(counts) @ (q.B @ X[0] + q.b))


def test_a_schedule_is_one_of_the_step():
    rates = optax.linear_schedule(0.2, 0.0, 7)
    z, w = state_of(Running(fb.SGP(STOD, rates)).advance(7))
    expected = boxes(STOD, 7, "after", lambda time: float(rates(time)))
    np.testing.assert_allclose(z, expected[0], rtol=1e-6)  # optax computes schedules in single precision
    np.testing.assert_allclose(w, expected[1], rtol=1e-12)


# ------------------------------------------------------------------------ statistics


def receive_of(running):
    everyone = federation().everyone
    statistics = everyone.take(running.state.lower.statistics)
    return np.asarray(everyone.gather(everyone.run(ReceivingWeights(), statistics, key=jr.key(0)), "w")[0])


def test_nodes_note_what_they_sent_and_heard():
    statistics = after_steps("StoD", "after").state.lower.statistics.value
    weights = np.stack(list(drawn_weights(STOD, 7)))
    np.testing.assert_allclose(statistics["sent"], weights.sum(axis=0).T, rtol=1e-13)
    np.testing.assert_array_equal(statistics["heard"], (weights != 0).sum(axis=0))
    np.testing.assert_array_equal(statistics["exchanges"], 7)


def test_nodes_note_the_mean_w_of_the_second_half():
    """Of a run of seven steps: of the last four; and again in the next run."""
    fed, everyone = federation(), federation().everyone
    network, x = STOD.network(N), fed.keep(X)
    lower = first_lower(fed)
    for first in (0, 7):
        w, key, seen = np.asarray(lower.w.value), jr.key(first), []
        lower = PushSum(network).run(fed, everyone.take(x), lower, jnp.full(7, LR), key, first)
        for index in range(7):
            w = np.asarray(network.draw(step_keys(jr.fold_in(key, index))[1])) @ w
            seen.append(w)
        np.testing.assert_allclose(lower.w.value, w, rtol=1e-12)
        np.testing.assert_allclose(lower.statistics.value["w"], np.mean(seen[-4:], axis=0), rtol=1e-12)


def test_estimates_come_to_the_true_weights():
    """The error falls like a root: a tenth of it takes a hundred times as many exchanges."""
    running, truth, errors = Running(fb.SGP(STOD, 0.0), seed=1), receiving_weights(STOD.network(N)), []
    for exchanges in (40, 3960):
        receive = receive_of(running.advance(exchanges))
        errors.append(np.sqrt(np.mean((receive / truth - 1) ** 2)))
    assert errors[1] < 0.03
    assert 4 < errors[0] / errors[1] < 25


def test_who_was_never_heard_has_weight_zero():
    chances = np.full((N, N), 0.5)
    chances[0, 1] = 0.0
    receive = receive_of(Running(fb.SGP(links.Stochastic(probability=chances), LR)).advance(60))
    assert receive[0, 1] == 0
    assert np.all(np.isfinite(receive))
    assert receive[1, 0] == 0, "nor has the way back a weight"
    assert np.count_nonzero(receive) == N * N - 2


# ------------------------------------------------------------------------------ cost


@pytest.mark.parametrize("name", KINDS)
def test_it_costs_a_message_of_y_and_w_over_every_link_that_is_present(name):
    running = after_steps(name, "after")
    present = sum(int(np.count_nonzero(W)) - N for W in drawn_weights(KINDS[name], 7))
    assert running.start == fb.Ledger()
    assert running.ledger == fb.Ledger(
        rounds=7,
        edge={"z": present * 8 * (DY + 1)},
        messages={"z": present},
        calls={"g_y": 7 * N},
        samples=7 * N,
    )


def test_one_program_serves_all_graphs():
    kinds = (STOD, STOU, links.Complete(), links.Ring(), links.ErdosRenyi(), links.Given(UNEVEN))
    counts = traces_of(fb.SGP(kind, LR) for kind in kinds)
    assert counts[0] > 0
    assert counts == counts[:1] * 6


# ------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (links.Given(UNEVEN.T), "sum to one"),
        (links.Given(np.eye(N)), "no consensus is possible"),
        (links.Given(np.eye(N + 1)), f"the links are for {N + 1} clients, but {N} take part"),
    ],
)
def test_networks_that_cannot_work_are_refused_before_the_run(kind, message):
    with pytest.raises(ValueError, match=message):
        fb.solve(drawn().problem(), drawn().clients(), fb.SGP(kind, LR), 1)


def test_when_is_before_or_after():
    with pytest.raises(ValueError, match='when is \'during\'; it must be "before" or "after"'):
        fb.SGP(links.Ring(), LR, when="during")


@pytest.mark.parametrize("wrong", ["Complete", None, links.Complete])
def test_links_must_be_links(wrong):
    with pytest.raises(TypeError, match=r"links is .*; it must say who hears whom, such as"):
        check_links(wrong)


def test_silent_nodes_are_refused_since_their_mass_would_be_lost():
    q = drawn()
    with pytest.raises(ValueError, match=r"dropout is 0\.1, but where clients mix with their neighbours"):
        fb.solve(q.problem(), q.clients(), fb.SGP(STOD, LR), 1, engine=fb.Simulator(dropout=0.1))


def test_x_starts_where_it_may_be():
    problem = drawn().problem(metrics={}, constraint=fb.Box(-0.5, 0.5))
    result = fb.solve(problem, drawn().clients(), fb.SGP(STOD, LR), 0)
    np.testing.assert_array_equal(result.x, np.full((N, DX), 0.5))
