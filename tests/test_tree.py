"""Arithmetic on pytrees."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel import tree

A = {"p": np.array([1.0, -2.0], np.float32), "q": (np.array([[3.0]], np.float32),)}
B = {"p": np.array([0.5, 4.0], np.float32), "q": (np.array([[-1.0]], np.float32),)}


def same(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(
        jax.tree.map(lambda p, q: np.allclose(p, q), a, b)
    )


def test_sums_differences_and_multiples_are_leaf_by_leaf() -> None:
    assert same(tree.add(A, B), {"p": np.array([1.5, 2.0]), "q": (np.array([[2.0]]),)})
    assert same(tree.sub(A, B), {"p": np.array([0.5, -6.0]), "q": (np.array([[4.0]]),)})
    assert same(tree.times(A, B), {"p": np.array([0.5, -8.0]), "q": (np.array([[-3.0]]),)})
    assert same(tree.scale(-2, A), {"p": np.array([-2.0, 4.0]), "q": (np.array([[-6.0]]),)})
    assert same(tree.step(A, 2.0, B), {"p": np.array([0.0, -10.0]), "q": (np.array([[5.0]]),)})
    assert same(tree.zeros_like(A), {"p": np.zeros(2), "q": (np.zeros((1, 1)),)})


def test_products_and_norms_run_over_all_leaves() -> None:
    assert tree.dot(A, B) == 0.5 - 8 - 3
    np.testing.assert_allclose(tree.norm(A), np.sqrt(1 + 4 + 9), rtol=1e-6)
    assert tree.dot((), ()) == 0
    assert tree.norm(()) == 0


@pytest.mark.parametrize("factor", [np.float64(0.5), jnp.float32(0.5), 0.5])
def test_a_factor_does_not_change_the_dtype(factor: Any) -> None:
    half = {"v": jnp.ones(2, jnp.float16)}
    assert tree.scale(factor, half)["v"].dtype == jnp.float16
    assert tree.step(half, factor, half)["v"].dtype == jnp.float16


def test_a_direction_of_higher_precision_does_not_change_the_dtype_of_a_step() -> None:
    half, single = jnp.ones(2, jnp.float16), jnp.ones(2, jnp.float32)
    assert tree.step(half, 0.5, single).dtype == jnp.float16


def test_double_precision_is_kept() -> None:
    with jax.enable_x64(True):
        leaf = jnp.asarray([1.0, 1e-12], jnp.float64)
        assert tree.dot(leaf, leaf).dtype == jnp.float64
        moved = tree.step(leaf, 1e-3, leaf)
        assert moved.dtype == jnp.float64
        np.testing.assert_allclose(moved, np.array([1.0, 1e-12]) * (1 - 1e-3), rtol=1e-15)


def test_where_takes_one_tree_whole() -> None:
    assert same(tree.where(True, A, B), A)
    assert same(tree.where(jnp.asarray(False), A, B), B)


def test_finite_looks_at_floating_leaves_only() -> None:
    assert tree.all_finite({"a": jnp.ones(2), "b": 3, "c": ()})
    assert tree.all_finite(())
    assert tree.all_finite(jr.key(0))
    assert not tree.all_finite({"a": jnp.ones(2), "b": jnp.array([1.0, np.nan])})
    assert not tree.all_finite(jnp.array(-np.inf))


def test_sizes_and_bytes_follow_from_shapes_and_dtypes() -> None:
    leaves = [np.zeros((3, 2), np.float32), np.zeros(5, np.int8), np.zeros((), np.float16), 1.0]
    assert tree.nbytes(leaves) == 24 + 5 + 2 + 4
    assert tree.size(leaves) == 6 + 5 + 1 + 1
    shapes = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    assert (tree.nbytes(shapes), tree.size(shapes)) == (8, 4)
    assert (tree.nbytes(()), tree.size(())) == (0, 0)


def test_row_picks_from_every_leaf() -> None:
    stacked = {"p": np.arange(6).reshape(3, 2), "q": np.arange(3)}
    assert same(tree.row(stacked, 1), {"p": np.array([2, 3]), "q": np.array(1)})


def test_normal_draws_have_the_shapes_of_the_tree_and_differ_between_leaves() -> None:
    like = [jnp.zeros(2), jnp.zeros(2)]
    draws = tree.normal_like(jr.key(0), like)
    assert [draw.shape for draw in draws] == [(2,), (2,)]
    assert not np.array_equal(draws[0], draws[1])
    assert same(draws, tree.normal_like(jr.key(0), like))
    assert tree.normal_like(jr.key(0), ()) == ()


def test_inner_products_of_half_precision_do_not_overflow():
    """300² is no half-precision number."""
    half = jnp.full(4, 300, jnp.float16)
    assert float(tree.norm(half)) == 600.0
    assert tree.norm(jnp.ones(2, jnp.float32)).dtype == jnp.float32
