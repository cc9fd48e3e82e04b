"""Laws of drawing: ids are distinct, sorted and below n; every subset is equally likely."""

import collections
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedbilevel.draw import below, shuffled
from fedbilevel.fed.federation import choose


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def many(key: Any, draws: int, n: int, size: int) -> Any:
    return jax.lax.map(lambda key: choose(key, n, size), jr.split(key, draws))


def chi_square_is_plausible(counts: Any, categories: int) -> bool:
    """Whether counts look uniform: χ² below its mean plus five standard deviations."""
    counts = np.concatenate([counts, np.zeros(categories - len(counts))])
    expected = counts.sum() / categories
    statistic = np.sum((counts - expected) ** 2 / expected)
    freedom = categories - 1
    return bool(statistic <= freedom + 5 * math.sqrt(2 * freedom))


# 65² > 64·66: the last case is cut from a permutation, the others are made by Floyd's method.
@pytest.mark.parametrize(("n", "size"), [(5, 2), (66, 65)])
def test_every_subset_is_equally_likely(n: int, size: int) -> None:
    chosen = np.asarray(many(jr.key(0), 3000, n, size))
    assert np.all(np.diff(chosen, axis=1) > 0), "distinct and ascending"
    assert chosen.min() >= 0
    assert chosen.max() < n
    subsets = collections.Counter(map(tuple, chosen.tolist()))
    categories = math.comb(n, size)
    assert len(subsets) == categories
    assert chi_square_is_plausible(list(subsets.values()), categories)


def test_the_check_of_uniformity_notices_a_bias() -> None:
    assert not chi_square_is_plausible([400, 300, 300], 3)


def test_few_of_very_many_are_distinct_ascending_and_below_n() -> None:
    chosen = np.asarray(many(jr.key(3), 500, 10**6, 4))
    assert np.all(np.diff(chosen, axis=1) > 0)
    assert 0 <= chosen.min() < 10**4
    assert 10**6 - 10**4 < chosen.max() < 10**6


def test_all_clients_can_be_chosen() -> None:
    np.testing.assert_array_equal(choose(jr.key(1), 4, 4), np.arange(4))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1))
def test_below_is_in_range(seed: int, limit: int) -> None:
    drawn = np.asarray(below(jr.key(seed), (8,), limit))
    assert drawn.dtype == np.int32
    assert np.all((drawn >= 0) & (drawn < limit))


def test_below_is_uniform_and_its_limit_broadcasts() -> None:
    drawn = np.asarray(below(jr.key(2), (1000, 3), jnp.array([1, 3, 7])))
    for column, limit in zip(drawn.T, (1, 3, 7), strict=True):
        assert chi_square_is_plausible(np.bincount(column, minlength=limit), limit)
        assert len(np.unique(column)) == limit


@functools.partial(jax.jit, static_argnums=(1, 2))
def orders(key: Any, draws: int, size: int, count: Any) -> Any:
    return jax.lax.map(lambda key: shuffled(key, size, count), jr.split(key, draws))


def test_every_order_is_equally_likely_and_what_does_not_count_comes_last() -> None:
    found = np.asarray(orders(jr.key(0), 3000, 6, 4))
    assert np.all(found[:, 4:] == [4, 5])
    counts = collections.Counter(map(tuple, found[:, :4].tolist()))
    assert len(counts) == math.factorial(4)
    assert chi_square_is_plausible(list(counts.values()), math.factorial(4))


def test_many_numbers_are_shuffled_likewise() -> None:
    """Too many for the words to hold the number and enough random bits."""
    found = np.asarray(orders(jr.key(1), 20, 5000, 4990))
    assert np.all(np.sort(found) == np.arange(5000))
    assert np.all(found[:, 4990:] == np.arange(4990, 5000))
    first = found[:, :4990] < 2495
    assert abs(first[:, :2495].mean() - 0.5) < 0.02, "the lower half is anywhere"
