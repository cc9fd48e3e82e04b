"""D-SOBA against loops in numpy: every iterate, where it ends with and without corrections, what it costs."""

import jax.random as jr
import numpy as np
import optax
import pytest

import fedbilevel as fb
from algorithm.nodes import COUNTS, DX, DY, UNEVEN, N, Running, counted, drawn, traces_of
from algorithm.peers import (
    BALANCED,
    COMPLETE,
    IN_TURN,
    RING,
    Z0,
    X,
    directions,
    drawn_weights,
    dsoba,
    key_of_step,
    last,
    optimum,
    rows,
)
from fedbilevel import links
from fedbilevel.algorithm.dsoba import DSOBA
from fedbilevel.algorithm.sgp import step_keys
from fedbilevel.fed.ledger import Ledger

pytestmark = pytest.mark.usefixtures("float64")

RATES = (0.1, 0.15, 0.12)
CORRECTIONS = (None, "tracking", "diffusion")
KINDS = {"ring": links.Ring(), "random": BALANCED, "in turn": IN_TURN}
LOW = 0.3  # x* has a coordinate below


def network_weights(kind, steps):
    """W of each step of a run."""
    return [drawn_weights(kind, step_keys(key_of_step(time))[1], time) for time in range(steps)]


def largest(a, b):
    return np.abs(a - b).max()


# ------------------------------------------------------------------ trajectories


@pytest.mark.parametrize("average", [1.0, 0.3])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_iterate_is_the_affine_map(correction, average):
    running = Running(DSOBA(links.Ring(), *RATES, average, correction))
    for Z in dsoba(drawn(), [RING] * 8, RATES, average, correction):
        assert largest(rows(running.advance()), Z) <= 1e-12
    for other in {*CORRECTIONS} - {correction}:
        assert largest(rows(running), last(dsoba(drawn(), [RING] * 8, RATES, average, other))) > 1e-2
    theirs = last(dsoba(drawn(), [RING] * 8, RATES, 1.3 - average, correction))
    assert largest(rows(running), theirs) > 1e-2, "the moving average makes no difference"


@pytest.mark.parametrize(
    ("name", "correction"), [("random", None), ("random", "tracking"), ("in turn", "tracking")]
)
def test_so_it_is_over_links_that_come_and_go_or_follow_a_schedule(name, correction):
    running, weights = Running(DSOBA(KINDS[name], *RATES, 0.3, correction)), network_weights(KINDS[name], 8)
    assert largest(weights[0], weights[1]) > 0.1
    for Z in dsoba(drawn(), weights, RATES, 0.3, correction):
        assert largest(rows(running.advance()), Z) <= 1e-12


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_nodes_count_by_their_weights(correction):
    running = Running(DSOBA(links.Ring(), *RATES, 0.3, correction), counts=COUNTS)
    for Z in dsoba(counted(COUNTS), [RING] * 8, RATES, 0.3, correction):
        assert largest(rows(running.advance()), Z) <= 1e-12
    assert largest(rows(running), last(dsoba(drawn(), [RING] * 8, RATES, 0.3, correction))) > 1e-2


def test_the_moving_average_may_follow_a_schedule():
    falling = optax.linear_schedule(1.0, 0.3, 7)
    running = Running(DSOBA(links.Ring(), *RATES, falling, "tracking")).advance(8)
    shares = [float(falling(time)) for time in range(8)]
    found = last(dsoba(drawn(), [RING] * 8, RATES, shares, "tracking"))
    np.testing.assert_allclose(rows(running), found, rtol=1e-5)  # optax computes in single precision


def test_with_complete_links_it_is_fedbio_of_one_local_step():
    q, rates = drawn(), dict(zip(("upper_lr", "lower_lr", "adjoint_lr"), RATES, strict=True))
    averaged = fb.solve(q.problem(metrics={}), q.clients(weights=np.ones(N)), fb.FedBiO(**rates), 5)
    found = rows(Running(DSOBA(links.Complete(), **rates)).advance(5))
    expected = np.concatenate([averaged.x, averaged.y])
    np.testing.assert_allclose(found[:, : DX + DY], np.tile(expected, (N, 1)), rtol=0, atol=1e-12)


# ------------------------------------------------------------------ limits


@pytest.mark.parametrize("average", [1.0, 0.3])
@pytest.mark.parametrize("correction", ["tracking", "diffusion"])
def test_with_a_correction_every_node_comes_to_the_solution(correction, average):
    np.testing.assert_allclose(optimum()[0, X], drawn().solution(), atol=1e-12)
    running = Running(DSOBA(links.Ring(), *RATES, average, correction)).advance(400)
    assert largest(rows(running), optimum()) <= 1e-9


def test_weights_of_few_digits_do_not_add_up():
    """Rows that sum to 0.99999: what is missing would be lost in every step of exact diffusion."""
    digits = links.Given(np.round(np.asarray(links.Ring().network(N).base[0]), 5))
    running = Running(DSOBA(digits, *RATES, 1.0, "diffusion")).advance(400)
    assert largest(rows(running), optimum()) <= 1e-9


def test_without_one_it_ends_at_a_distance_that_halves_with_the_step_sizes():
    """Negative control: nodes differ, and the links are not complete."""
    distances = []
    for scale in (0.05, 0.025, 0.0125):
        running = Running(DSOBA(links.Ring(), scale, scale, scale)).advance(round(60 / scale))
        distances.append(np.linalg.norm((rows(running) - optimum())[:, X]))
        assert np.ptp(rows(running), axis=0).max() > 1e-3, "nor do nodes agree"
    assert distances[-1] > 1e-3
    ratios = np.divide(distances[:-1], distances[1:])
    np.testing.assert_allclose(ratios, 2, rtol=0.1)


def test_with_complete_links_none_is_needed():
    running = Running(DSOBA(links.Complete(), *RATES)).advance(400)
    assert largest(rows(running), optimum()) <= 1e-9


@pytest.mark.parametrize("correction", ["tracking", "diffusion"])
def test_the_limit_is_the_solution_of_the_weighted_problem(correction):
    running = Running(DSOBA(links.Ring(), *RATES, 1.0, correction), counts=COUNTS).advance(500)
    np.testing.assert_allclose(optimum(COUNTS)[0, X], counted(COUNTS).solution(), atol=1e-12)
    assert largest(rows(running), optimum(COUNTS)) <= 1e-9
    assert largest(optimum()[:, X], optimum(COUNTS)[:, X]) > 5e-3


def test_over_random_links_tracking_comes_to_the_solution_too():
    running = Running(DSOBA(BALANCED, *RATES, 1.0, "tracking")).advance(600)
    assert largest(rows(running), optimum()) <= 1e-9


def test_nor_does_it_matter_to_tracking_that_nodes_are_away_at_times():
    method = DSOBA(links.Ring(), *RATES, 1.0, "tracking")
    found = fb.solve(
        drawn().problem(metrics={}),
        drawn().clients(),
        method,
        800,
        every=800,
        engine=fb.Simulator(availability=0.8),
    )
    assert largest(found.x, optimum()[:, X]) <= 1e-9
    whole = fb.solve(drawn().problem(metrics={}), drawn().clients(), method, 1)
    assert found.ledger.edge["z"] < 800 * whole.ledger.edge["z"], "nobody was away"


# ------------------------------------------------------------------ constraints


def constrained_optimum():
    """Where projected steps by the mean direction rest."""
    (M, m), z = directions(drawn()), Z0[0]
    for _ in range(1500):
        z = z - 0.1 * (M.mean(axis=0) @ z + m.mean(axis=0))
        z[X] = np.maximum(z[X], LOW)
    return z


@pytest.mark.parametrize("correction", ["tracking", "diffusion"])
def test_corrections_are_exact_where_x_is_confined(correction):
    q, problem = drawn(), drawn().problem(metrics={}, constraint=fb.Box(LOW, np.inf))
    method, target = DSOBA(links.Ring(), *RATES, 1.0, correction), constrained_optimum()
    assert target[0] == LOW
    assert target[1] > LOW
    boxes = list(dsoba(q, [RING] * 400, RATES, 1.0, correction, LOW))
    found = fb.solve(problem, q.clients(), method, 400, every=8)
    assert largest(found.x, target[X]) <= 1e-9
    early = fb.solve(problem, q.clients(), method, 8, every=8)
    assert largest(early.x, boxes[7][:, X]) <= 1e-12


def test_exact_diffusion_that_forgets_what_was_cut_off_would_not_be():
    """Negative control: the projected x in the place of the mixed one."""
    wrong = last(dsoba(drawn(), [RING] * 600, RATES, 1.0, "diffusion", LOW, "projected"))
    assert largest(wrong[:, X], constrained_optimum()[X]) > 1e-2


# ------------------------------------------------------------------ cost


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_it_costs_a_message_of_all_variables_over_every_link(correction):
    running, links_there = Running(DSOBA(links.Ring(), *RATES, 1.0, correction)).advance(8), 2 * N
    scalars = (DX + 2 * DY) * (2 if correction == "tracking" else 1)
    assert running.start == Ledger()
    assert running.ledger == Ledger(
        rounds=8,
        edge={"z": 8 * links_there * 8 * scalars},
        messages={"z": 8 * links_there},
        calls=dict.fromkeys(("f_x", "f_y", "g_y", "g_xy", "g_yy"), 8 * N),
        samples=5 * 8 * N,
    )


def test_absent_links_cost_nothing():
    ledger = Running(DSOBA(BALANCED, *RATES)).advance(8).ledger
    present = sum(np.count_nonzero(W) - N for W in network_weights(BALANCED, 8))
    assert ledger.messages == {"z": present}
    assert ledger.edge == {"z": present * 8 * (DX + 2 * DY)}
    assert present < 8 * N * (N - 1)


def test_one_program_serves_all_graphs_and_averages():
    kinds = (links.Complete(), links.Ring(), links.ErdosRenyi(), links.Given(RING), BALANCED)
    counts = traces_of(DSOBA(kind, *RATES, average, "tracking") for kind in kinds for average in (1.0, 0.3))
    assert counts[0] > 0
    assert counts == counts[:1] * 10


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (links.Stochastic(), r"these links come and go, .* push-sum methods SGP and PDBO"),
        (links.Given(UNEVEN), r"those of these sum to 0\.\d+\.\.1\.\d+\. Take links\.Complete, Ring"),
        (links.Given(UNEVEN.T), r"rows and columns sum to one; those of these sum to"),
        (links.Given(np.eye(N)), "no consensus is possible"),
        (links.Given(2 * np.eye(N) - COMPLETE), r"weights must be at least 0; the smallest is -0\.2"),
    ],
)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_weights_that_are_not_doubly_stochastic_are_refused(kind, message, correction):
    with pytest.raises(fb.CannotRunError, match=f"^DSOBA cannot mix over these links: .*{message}"):
        DSOBA(kind, *RATES, correction=correction).among(N)


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        (links.Ring(directed=True), "these are not symmetric"),
        (BALANCED, "these links come and go"),
        (IN_TURN, "these are 2 matrices in turn"),
    ],
)
def test_exact_diffusion_needs_fixed_symmetric_weights(kind, seen):
    """The others do not."""
    for correction in (None, "tracking"):
        assert isinstance(DSOBA(kind, *RATES, correction=correction).among(N).links, links.Network)
    message = f'exact diffusion needs fixed, symmetric weights; {seen}. .* or correction="tracking"'
    with pytest.raises(ValueError, match=message) as refused:
        DSOBA(kind, *RATES, correction="diffusion").among(N)
    assert not isinstance(refused.value, fb.CannotRunError), "with another setting it can run"


def solve_once(method, engine):
    fb.solve(drawn().problem(), drawn().clients(), method, 1, engine=engine)


def test_who_is_away_has_no_fixed_weights():
    with pytest.raises(ValueError, match=r"exact diffusion needs the same weights .* Leave availability out"):
        solve_once(DSOBA(links.Ring(), *RATES, correction="diffusion"), fb.Simulator(availability=0.9))


def test_silent_nodes_are_refused():
    with pytest.raises(ValueError, match=r"dropout is 0\.1, but where clients mix with their neighbours"):
        solve_once(DSOBA(links.Ring(), *RATES), fb.Simulator(dropout=0.1))


def length(x, y, samples):
    return y @ y


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (fb.Problem(length, length, (), np.zeros(DY)), "the method tunes x, and this problem has none"),
        (fb.Problem(length, length, np.ones(DX), ()), "the method learns y, and this problem .* has none"),
    ],
)
def test_there_must_be_two_levels(problem, message):
    fed = fb.Simulator().federation(problem, drawn().clients())
    with pytest.raises(ValueError, match=message):
        DSOBA(links.Ring(), *RATES).init(fed, jr.key(0))


@pytest.mark.parametrize("wrong", [0, -0.5, 1.5, float("nan"), "half", True, None])
def test_the_average_is_a_share(wrong):
    with pytest.raises(ValueError, match=r"average is .*; it is the share of the new direction"):
        DSOBA(links.Ring(), *RATES, average=wrong)


@pytest.mark.parametrize("wrong", ["extra", "", True])
def test_corrections_have_names(wrong):
    with pytest.raises(ValueError, match=r'correction is .*; it must be None, "tracking" or "diffusion"'):
        DSOBA(links.Ring(), *RATES, correction=wrong)


def test_links_must_be_links():
    with pytest.raises(TypeError, match="links is 'Ring'; it must say who hears whom"):
        DSOBA("Ring", *RATES)
