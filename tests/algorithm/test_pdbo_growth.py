"""Whether the series of hypergradient push converges: what nodes know of it, and what a run says of it."""

import jax.random as jr
import numpy as np
import pytest

import fedbilevel as fb
from algorithm.nodes import LR, WEIGHTS, N, Running, drawn, federation, gradients
from fedbilevel import links
from fedbilevel.adjoint.backward import Lengths
from fedbilevel.adjoint.push import growth
from fedbilevel.algorithm.iterated import ITD
from fedbilevel.experiment import AdjointWarning, DivergenceWarning

pytestmark = pytest.mark.usefixtures("float64")

TERMS = 20
SHORT = {"lower_lr": LR, "lower_steps": 3, "upper": fb.SGD(1e-3)}
PLAIN = SHORT | {"terms": TERMS, "alpha": None, "beta": None}


def beyond():
    """A step size above two over every curvature of every node."""
    return 2.2 / np.linalg.eigvalsh(drawn().A).min()


def solved(network, steps=2, **settings):
    q = drawn()
    algorithm = fb.PDBO(network, **settings)
    return fb.solve(q.problem(metrics={}), q.clients(), algorithm, steps, every=1, progress=False)


def by_hand(lr):
    """The longest last term of a node over the longest first one, over complete links, in numpy."""
    q, x, y = drawn(), np.ones((N, 2)), np.zeros((N, 3))
    for _ in range(SHORT["lower_steps"]):
        y = WEIGHTS["complete"] @ y - LR * gradients(q, x, y)[2]
    first = u = gradients(q, x, y)[1] / N
    for _ in range(TERMS):
        u = u.mean(axis=0) - lr * np.einsum("nij,nj->ni", q.A, u)
    return np.linalg.norm(u, axis=1).max() / np.linalg.norm(first, axis=1).max()


def test_nodes_know_how_much_the_terms_grew():
    for lr in (LR, beyond()):
        running = Running(fb.PDBO(links.Complete(), **PLAIN, adjoint_lr=lr)).advance()
        np.testing.assert_allclose(growth(running.state.upper.lengths.value), by_hand(lr), rtol=1e-9)


def test_steps_after_receiving_bear_half_the_step_size():
    """Over complete links: one over the largest curvature of a node, or two over that of the mean."""
    A = drawn().A
    own, common = np.linalg.eigvalsh(A).max(), np.linalg.eigvalsh(A.mean(0)).max()
    grows = {0.9 / own: (False, False), 1.5 / own: (True, False), 2.2 / common: (True, True)}
    for lr, expected in grows.items():
        for when, grown in zip(("after", "before"), expected, strict=True):
            settings = PLAIN | {"terms": 200, "adjoint_lr": lr, "when": when}
            running = Running(fb.PDBO(links.Complete(), **settings)).advance()
            assert (growth(running.state.upper.lengths.value) > 1) == grown


def test_a_series_that_diverges_is_warned_about_and_one_that_converges_is_not():
    fine = solved(links.Complete(), **PLAIN)
    assert fine.notes == ()
    assert 0 < fine.history[-1]["push_growth"] < 1
    with pytest.warns(AdjointWarning, match=r"terms of hypergradient push grew.*Set `adjoint_lr`"):
        bad = solved(links.Complete(), **PLAIN, adjoint_lr=beyond())
    assert bad.trouble["push"] == max(row.get("push_growth", 0) for row in bad.history) > 2
    assert "push_growth" not in bad.history[0], "before the first hypergradient"


@pytest.mark.parametrize("terms", [200, 2000], ids=["Adam's squares overflow", "the series does"])
def test_of_a_step_that_diverges_the_series_is_known_to_be_the_cause(terms):
    """The numbers that tell are in the state that is thrown away."""
    settings = PLAIN | {"terms": terms, "upper": fb.Adam(1e-3), "adjoint_lr": beyond()}
    with pytest.warns(DivergenceWarning), pytest.warns(AdjointWarning, match="hypergradient push grew"):
        found = solved(links.Complete(), 1, **settings)
    assert found.diverged
    assert found.trouble["push"] > 1e100
    assert len(found.history) == 2
    assert "push_growth" not in found.history[-1], "no step was made"


def test_of_a_step_that_diverges_by_its_lower_level_the_series_is_not_blamed():
    with pytest.warns(DivergenceWarning):
        found = solved(links.Complete(), 1, **PLAIN | {"lower_lr": 1e200, "adjoint_lr": LR})
    assert found.diverged
    assert found.notes == ()


@pytest.mark.parametrize("terms", [1, TERMS])
def test_links_that_come_and_go_are_no_reason_to_warn(terms):
    """By chance nodes hear more than the mean, and few terms may grow; warnings are errors here."""
    settings = SHORT | {"terms": terms}
    found = solved(links.Stochastic(0.4, 0.8, seed=2), steps=30, **settings)
    assert max(row.get("push_growth", 0) for row in found.history) < 2
    with pytest.warns(AdjointWarning):
        solved(links.Stochastic(0.4, 0.8, seed=2), **SHORT | {"terms": TERMS}, adjoint_lr=beyond())


def test_numbers_that_are_too_large_to_square_are_no_infinity():
    """Which in the state would pass for a run that diverged."""
    everyone, rows = federation().everyone, np.ones((N, 1, 3))
    c, vectors = everyone.deal(rows, "c"), everyone.deal((1e200 * rows,), "u")
    lengths = everyone.gather(everyone.run(Lengths(), c, vectors, key=jr.key(0)), "lengths")[0]
    assert np.isfinite(lengths).all()
    assert growth(lengths) > 1e100


def test_no_terms_no_growth():
    assert growth(np.zeros((N, 2))) == 0
    settings = SHORT | {"adjoint": ITD(3)}
    found = solved(links.Complete(), 1, **settings)
    assert "push_growth" not in found.history[-1]
