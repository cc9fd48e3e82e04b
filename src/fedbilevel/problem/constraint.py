"""Convex sets for the upper variable, as projections. Any function `x -> x` will do as well."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax.projections as projections

from fedbilevel.tree import PyTree


class Simplex(eqx.Module):
    """All entries of x, over all leaves, are non-negative and sum to `total`.

    Args:
        total: what they sum to.
    """

    total: float = 1.0

    def __call__(self, x: PyTree) -> PyTree:
        return projections.projection_simplex(x, self.total)


class Box(eqx.Module):
    """Every entry of x lies between `low` and `high`.

    Args:
        low, high: numbers, or trees like x.
    """

    low: Any
    high: Any

    def __call__(self, x: PyTree) -> PyTree:
        low, high = (_like(bound, x) for bound in (self.low, self.high))
        return projections.projection_box(x, low, high)


class Positive(eqx.Module):
    """Every entry of x is at least zero."""

    def __call__(self, x: PyTree) -> PyTree:
        return projections.projection_non_negative(x)


class Anywhere(eqx.Module):
    """No constraint."""

    def __call__(self, x: PyTree) -> PyTree:
        return x


def _like(bound: Any, x: PyTree) -> PyTree:
    """A bound for every leaf of x."""
    is_number = isinstance(bound, int | float | jax.Array) and jnp.ndim(bound) == 0
    return jax.tree.map(lambda _: bound, x) if is_number else bound
