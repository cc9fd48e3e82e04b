"""Laws of random links, for every key and every network."""

from typing import Any

import jax
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fed.graphs import metropolis_of, shares
from fedbilevel import links
from fedbilevel.fed.mixing import connected

N = 5
FEW = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**31 - 1)
chances = st.floats(0, 1)
bounds = st.tuples(chances, chances).map(sorted)
draw = jax.jit(lambda network, key: network.draw(key))


def drawn(kind: links.Links, seed: int) -> Any:
    return np.asarray(draw(kind.network(N), jr.key(seed)))


def check_shared(weights: Any) -> None:
    """Columns sum to one, everybody hears itself, and senders give the same to all whom they reach."""
    np.testing.assert_allclose(weights.sum(axis=0), 1, rtol=1e-6)
    assert np.all(weights.diagonal() > 0)
    np.testing.assert_allclose(weights, shares(weights != 0), rtol=1e-6)


@FEW
@given(bounds, seeds, seeds)
def test_directed_links_share_out_all_that_a_sender_has(between: Any, seed: int, key: int) -> None:
    check_shared(drawn(links.Stochastic(*between, seed=seed), key))


@FEW
@given(bounds, seeds, seeds)
def test_undirected_links_come_in_pairs(between: Any, seed: int, key: int) -> None:
    weights = drawn(links.Stochastic(*between, directed=False, seed=seed), key)
    check_shared(weights)
    np.testing.assert_array_equal(weights != 0, (weights != 0).T)


@FEW
@given(bounds, seeds, seeds)
def test_balanced_links_are_symmetric_and_doubly_stochastic(between: Any, seed: int, key: int) -> None:
    weights = drawn(links.Stochastic(*between, directed=False, balanced=True, seed=seed), key)
    np.testing.assert_array_equal(weights, weights.T)
    np.testing.assert_allclose(weights.sum(axis=0), 1, rtol=1e-6)
    assert np.all(weights.diagonal() > 0)
    np.testing.assert_allclose(weights, metropolis_of(weights != 0), atol=1e-6)


@FEW
@given(st.floats(0.3, 1), seeds)
def test_fixed_graphs_do_not_depend_on_the_key(probability: float, seed: int) -> None:
    kind = links.ErdosRenyi(probability, seed=seed)
    weights = drawn(kind, 0)
    np.testing.assert_array_equal(weights, drawn(kind, 1))
    assert connected(weights > 0)
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)


@FEW
@given(bounds, seeds)
def test_mean_weights_share_out_too(between: Any, seed: int) -> None:
    network = links.Stochastic(*between, seed=seed).network(N)
    expected, heard = network.expected(), network.heard()
    np.testing.assert_allclose(expected.sum(axis=0), 1, rtol=1e-6)
    np.testing.assert_array_equal(heard.diagonal(), 1)
    assert np.all((expected > 0) == (heard > 0))
    assert np.all(expected <= heard + 1e-12), "a weight is at most one, where it is"


def test_keys_draw_different_links() -> None:
    networks = {drawn(links.Stochastic(0.5, 0.5), seed).tobytes() for seed in range(10)}
    assert len(networks) == 10


@pytest.mark.parametrize("directed", [True, False])
def test_every_pair_is_a_draw_of_its_own(directed: bool) -> None:
    """Over some exchanges no two links behave alike (but i → j and j → i, where undirected)."""
    kind = links.Stochastic(0.5, 0.5, directed=directed)
    rows = np.stack([drawn(kind, seed) != 0 for seed in range(40)])
    pairs = [(i, j) for i in range(N) for j in range(N) if i != j]
    behaviours = {rows[:, i, j].tobytes() for i, j in pairs}
    assert len(behaviours) == (len(pairs) if directed else len(pairs) // 2)
