"""Links whose weights have rows and columns that sum to one, and what is said of others."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel.fed import links
from fedbilevel.fed.network import Lazy, Network
from fedbilevel.fed.network_check import check_doubly_stochastic, check_fixed_symmetric

N = 5
EVEN = np.full((N, N), 1 / N)
ONE_WAY = (np.eye(N) + np.roll(np.eye(N), 1, axis=0)) / 2
HALF = np.full((N, N), 0.5)
PATH = np.eye(N) + np.eye(N, k=1) + np.eye(N, k=-1)  # Metropolis' weights on it are others


@pytest.mark.parametrize(
    "kind",
    [
        links.Complete(),
        links.Ring(),
        links.Ring(directed=True),
        links.ErdosRenyi(0.5),
        links.Given(ONE_WAY),
        links.Given([EVEN, ONE_WAY]),
        links.Stochastic(directed=False, balanced=True),
        Network(PATH[None], np.ones((1, N, N)), balanced=True),
    ],
)
def test_these_mix(kind: links.Links) -> None:
    network = kind.network(N)
    check_doubly_stochastic(network)
    for time in range(20):
        weights = np.asarray(network.draw(jr.key(time), time))
        np.testing.assert_allclose([weights.sum(axis=0), weights.sum(axis=1)], 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("network", "seen"),
    [
        (links.Stochastic().network(N), "these links come and go"),
        (links.Stochastic(directed=False).network(N), "these links come and go"),
        (Network(EVEN[None], HALF[None], undirected=False, balanced=True), "these links come and go"),
        (Network(EVEN[None], np.triu(HALF)[None], undirected=True, balanced=True), "these links come and go"),
        (links.Given(PATH / PATH.sum(axis=0)).network(N), r"those of these sum to 0\.833\.\.1\.17"),
        (links.Given([EVEN, 2 * EVEN]).network(N), r"those of these sum to 1\.\.2"),
        (links.Given(2 * np.eye(N) - EVEN).network(N), "weights must be at least 0"),
        (links.Given(np.eye(N)).network(N), "no consensus is possible"),
    ],
)
def test_these_do_not(network: Network, seen: str) -> None:
    with pytest.raises(ValueError, match=seen):
        check_doubly_stochastic(network)


def test_fixed_and_symmetric_are_these() -> None:
    for kind in (links.Complete(), links.Ring(), links.ErdosRenyi(0.5), links.Given([EVEN, EVEN])):
        check_fixed_symmetric(kind.network(N))
    always = links.Stochastic(directed=False, balanced=True, probability=1.0)
    check_fixed_symmetric(always.network(N))
    for kind in (links.Ring(directed=True), links.Given([EVEN, np.eye(N)]), links.Stochastic()):
        with pytest.raises(ValueError, match="exact diffusion needs fixed, symmetric weights; these"):
            check_fixed_symmetric(kind.network(N))


def test_lazy_links_keep_a_half() -> None:
    for kind in (links.Ring(), links.Stochastic(directed=False, balanced=True)):
        whole, half = (np.asarray(each.weights(jr.key(1), N)) for each in (kind, Lazy(kind)))
        np.testing.assert_allclose(half, (np.eye(N) + whole) / 2, rtol=1e-6)
    there = jnp.array([True, False, True, True, True])
    away = np.asarray(Lazy(links.Ring()).weights(jr.key(0), N, there=there))
    np.testing.assert_array_equal(away[1], np.eye(N)[1])
    np.testing.assert_allclose(away.sum(axis=0), 1, rtol=1e-6)
    with pytest.raises(TypeError, match="lazy links are known exchange by exchange only"):
        Lazy(links.Ring()).network(N)
