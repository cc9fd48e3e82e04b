"""Arithmetic on pytrees, shaped like the vector algebra of the papers."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

PyTree: TypeAlias = Any
"""Any nesting of dicts, lists, tuples, dataclasses with arrays at the leaves."""


def add(a: PyTree, b: PyTree) -> PyTree:
    """`a + b`."""
    return jax.tree.map(jnp.add, a, b)


def sub(a: PyTree, b: PyTree) -> PyTree:
    """`a − b`."""
    return jax.tree.map(jnp.subtract, a, b)


def times(a: PyTree, b: PyTree) -> PyTree:
    """`a ⊙ b`, number by number."""
    return jax.tree.map(jnp.multiply, a, b)


def scale(factor: Any, a: PyTree) -> PyTree:
    """`factor · a`; the leaves keep their dtype whatever the dtype of `factor`."""
    return jax.tree.map(lambda leaf: jnp.asarray(factor, jnp.result_type(leaf)) * leaf, a)


def step(a: PyTree, factor: Any, direction: PyTree) -> PyTree:
    """`a − factor · direction`: one descent step; the leaves of `a` keep their dtype."""

    def descend(leaf: Any, d: Any) -> jax.Array:
        dtype = jnp.result_type(leaf)
        return leaf - jnp.asarray(factor, dtype) * jnp.asarray(d, dtype)

    return jax.tree.map(descend, a, direction)


def dot(a: PyTree, b: PyTree) -> jax.Array:
    """Euclidean inner product over all leaves; scalar, 0 for an empty tree.

    In single precision at least: squares of ordinary numbers are no half-precision ones.
    """
    products = jax.tree.map(lambda p, q: jnp.sum(_wide(p) * _wide(q)), a, b)
    return jnp.asarray(sum(jax.tree.leaves(products), start=jnp.zeros(())))


def _wide(leaf: Any) -> jax.Array:
    return jnp.asarray(leaf, jnp.promote_types(jnp.result_type(leaf), jnp.float32))


def norm(a: PyTree) -> jax.Array:
    """Euclidean norm over all leaves."""
    return jnp.sqrt(dot(a, a))


def zeros_like(a: PyTree) -> PyTree:
    """A tree of zeros of the same shapes and dtypes."""
    return jax.tree.map(jnp.zeros_like, a)


def where(condition: Any, a: PyTree, b: PyTree) -> PyTree:
    """`a` if the scalar `condition` holds, else `b`, leaf by leaf."""
    return jax.tree.map(lambda p, q: jnp.where(condition, p, q), a, b)


def all_finite(a: PyTree) -> jax.Array:
    """Whether no floating leaf holds a NaN or an infinity."""
    leaves = [leaf for leaf in jax.tree.leaves(a) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    checks = [jnp.all(jnp.isfinite(leaf)) for leaf in leaves]
    return jnp.all(jnp.stack(checks)) if checks else jnp.asarray(True)


def nbytes(a: PyTree) -> int:
    """Bytes that the leaves take on a wire: known from shapes and dtypes alone."""
    leaves = jax.tree.leaves(a)
    return sum(int(np.prod(jnp.shape(leaf))) * jnp.result_type(leaf).itemsize for leaf in leaves)


def size(a: PyTree) -> int:
    """Number of scalars in all leaves."""
    return sum(int(np.prod(jnp.shape(leaf))) for leaf in jax.tree.leaves(a))


def copies(tree: PyTree, n: int) -> PyTree:
    """One row for each of n clients."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (n, *jnp.shape(leaf))), tree)


def row(stacked: PyTree, index: Any) -> PyTree:
    """Row `index` of every leaf."""
    return jax.tree.map(lambda leaf: leaf[index], stacked)


def normal_like(key: jax.Array, a: PyTree) -> PyTree:
    """A tree of independent standard normal draws of the same shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(a)
    keys = jax.random.split(key, max(len(leaves), 1))
    draws = [
        jax.random.normal(k, jnp.shape(leaf), jnp.result_type(leaf))
        for k, leaf in zip(keys, leaves, strict=False)
    ]
    return jax.tree.unflatten(treedef, draws)
