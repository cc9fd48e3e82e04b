"""Hypergradient push draw by draw: with the links and batches of its own keys it is the box in numpy.

Means over all links depend neither on VR-HGP's α and β nor on whether both lines of a round share their
links: only a single draw shows them.
"""

import jax.random as jr
import numpy as np
import pytest

import fedbilevel as fb
from algorithm.nodes import DX, DY, LR, N, drawn, points, pushed, resting_point, starts, stationary
from fedbilevel import links
from fedbilevel.adjoint import HGP, VRHGP
from fedbilevel.adjoint.push import receiving_weights
from fedbilevel.problem import Client
from fedbilevel.problem.quadratic import lower_objective, upper_objective

pytestmark = pytest.mark.usefixtures("float64")

LINKS = links.Stochastic(0.4, 0.8, seed=5)
ROUNDS, SEED = 6, 3


def clients():
    """Two samples a node, of other curvatures and couplings, of which a batch holds one."""
    q = drawn()

    def pair(rows, spread=0.0):
        return np.stack([rows - spread, rows + spread], axis=1)

    upper = {name: getattr(q, name)[:, None] for name in ("D", "E", "c", "e", "rho")}
    lower = {"A": pair(q.A, 0.3 * np.eye(DY)), "B": pair(q.B, 0.5), "b": pair(q.b, 0.5)}
    return fb.Clients(lower, upper, batch_size=1)


def problem():
    return fb.Problem(upper_objective, lower_objective, np.ones(DX), np.zeros(DY))


def point(when):
    x, mean = points(), LINKS.network(N).expected()
    return x, resting_point(drawn(), mean, x, LR, when)[0], stationary(mean)


class Round:
    """What round `index` draws: links for u, links for v, and the samples of every node's H and J."""

    def __init__(self, index, when, independent):
        k_run, k_links, k_again = jr.split(jr.fold_in(jr.split(jr.key(SEED))[1], index), 3)
        twice = independent and when == "before"
        time = (2 if twice else 1) * index
        self.for_u = self._links(k_links, time)
        self.for_v = self._links(k_again, time + 1) if twice else self.for_u
        keys = [
            jr.split(jr.fold_in(k_run, i)) if independent else [jr.fold_in(k_run, i)] * 2 for i in range(N)
        ]
        self.H = np.stack([self._sample(i, keys[i][1])["A"] for i in range(N)])
        self.B = np.stack([self._sample(i, keys[i][0])["B"] for i in range(N)])

    def _links(self, key, time):
        network = LINKS.network(N)
        return np.where(np.asarray(network.draw(key, time)) != 0, receiving_weights(network), 0)

    def _sample(self, node, key):
        batch = Client(problem(), clients(), node, node, key).batch("lower", key)
        return {name: np.asarray(leaf)[0] for name, leaf in batch.samples.items()}

    def A_hat(self, z, w, when, damping=0.0):
        mixed = self.for_u @ z
        q = mixed if when == "before" else z
        return mixed - LR / w[:, None] * (np.einsum("nij,nj->ni", self.H, q) + damping * q)

    def B_hat(self, z, when):
        q = self.for_v @ z if when == "before" else z
        return LR * np.einsum("nij,ni->nj", self.B, q)  # J = −Bᵀ


def box(when, alpha, beta, *, independent=False, damping=0.0):
    """The recursion of the paper, line by line."""
    at = point(when)
    c_x, c = (part.reshape(N, -1) for part in starts(drawn(), *at))
    v, u, w = np.zeros((N, DX)), c, c
    for index in range(ROUNDS):
        now = Round(index, when, independent)
        v = alpha * (v + now.B_hat(u, when)) + (1 - alpha) * now.B_hat(w, when)
        new = now.A_hat(u, at[2], when, damping)
        w = beta * (now.A_hat(w, at[2], when, damping) + c) + (1 - beta) * (w + new)
        u = new
    return v + c_x


def found(adjoint, when):
    network, fed = LINKS.network(N), fb.Simulator().federation(problem(), clients())
    receive = receiving_weights(network)
    return np.asarray(pushed(adjoint, fed, network, receive, point(when), LR, when, jr.key(SEED)))


def far(a, b):
    return np.max(np.abs(a - b)) / np.max(np.abs(b))


@pytest.mark.parametrize("when", ["before", "after"])
def test_vr_hgp_follows_its_recursion_with_the_links_and_batches_that_it_drew(when):
    ours = found(VRHGP(ROUNDS, 0.6, 0.3), when)
    assert far(ours, box(when, 0.6, 0.3)) <= 1e-12
    for wrong in ((0.4, 0.3), (0.6, 0.7), (0.36, 0.3), (1.0, 0.0)):
        assert far(ours, box(when, *wrong)) > 1e-4, "α and β must be seen"


@pytest.mark.parametrize("when", ["before", "after"])
def test_hgp_is_the_recursion_with_one_and_zero(when):
    expected = box(when, 1.0, 0.0)
    assert far(found(HGP(ROUNDS), when), expected) <= 1e-12
    assert far(found(VRHGP(ROUNDS, 1.0, 0.0), when), expected) <= 1e-12


@pytest.mark.parametrize("when", ["before", "after"])
def test_independent_edges_are_other_links_and_batches_for_both_lines(when):
    ours = found(VRHGP(ROUNDS, 0.6, 0.3, edges="independent"), when)
    assert far(ours, box(when, 0.6, 0.3, independent=True)) <= 1e-12
    assert far(ours, box(when, 0.6, 0.3)) > 1e-4


@pytest.mark.parametrize("when", ["before", "after"])
def test_damping_is_part_of_every_factor(when):
    ours = found(VRHGP(ROUNDS, 0.6, 0.3, damping=0.7), when)
    assert far(ours, box(when, 0.6, 0.3, damping=0.7)) <= 1e-12
    assert far(ours, box(when, 0.6, 0.3)) > 1e-4
