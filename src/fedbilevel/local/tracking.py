"""Gradient tracking: what a node computes between two exchanges with its neighbours.

Every node has an estimate s of the mean direction of all. It adds to the mixed estimates how much its own
direction has changed, so that the mean of s is always that of the directions.
"""

from __future__ import annotations

import abc
from typing import Any

import equinox as eqx
import jax
import jax.random as jr

from fedbilevel.fed.program import Program
from fedbilevel.local.field import Values
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree, add, scale, step, sub, zeros_like


def tracked(mixed: PyTree, now: PyTree, before: PyTree) -> PyTree:
    """`mixed + now − before`: the estimate of the mean direction, from the mixed one and its own two."""
    return add(mixed, sub(now, before))


def moving_average(before: PyTree, now: PyTree, share: Any) -> PyTree:
    """`(1 − θ) before + θ now`."""
    return step(before, share, sub(before, now))


# ------------------------------------------------------ what is tracked


class Slope(eqx.Module):
    """The gradient in v of what a node wants small, at values that stay, on batches drawn from a key."""

    @abc.abstractmethod
    def __call__(self, me: Client, v: PyTree, at: Values, key: jax.Array) -> PyTree:
        """Like v."""


class LowerSlope(Slope):
    """`∇_y g(x, y)` in y, at `(x,)`. Cost: one call of g_y."""

    def __call__(self, me: Client, v: PyTree, at: Values, key: jax.Array) -> PyTree:
        (x,) = at
        return me.g_y(x, v, me.batch("lower", key))


class AdjointSlope(Slope):
    """`H u − ∇_y f` in u, at `(x, y)`: the gradient of `uᵀHu/2 − uᵀ∇_y f`.

    Cost: one call each of g_yy and f_y, each on a batch of its own.
    """

    def __call__(self, me: Client, v: PyTree, at: Values, key: jax.Array) -> PyTree:
        x, y = at
        k_lower, k_upper = jr.split(key)
        product = me.g_yy(x, y, v, me.batch("lower", k_lower))
        return sub(product, me.f_y(x, y, me.batch("upper", k_upper)))


# ---------------------------------------- one step of tracking, in two halves


class Untracked(Program):
    """`v ↦ (v, 0, 0)`: where a node starts, what has been mixed for it, and its last slope."""

    def __call__(self, me: Client, *values: Any) -> PyTree:
        (v,) = values
        return v, zeros_like(v), zeros_like(v)


class Tracked(Program):
    """`((v, mixed, before), relative, *at) ↦ ((v, s), d)`: a slope d, and s from it; `(v, s)` is sent.

    `d = relative · slope`, and `s = mixed + d − before`.
    """

    slope: Slope

    def __call__(self, me: Client, *values: Any) -> PyTree:
        (v, mixed, before), relative, *at = values
        now = scale(relative, self.slope(me, v, tuple(at), me.key))
        return (v, tracked(mixed, now, before)), now


class Followed(Program):
    """`(((v, s), d), (v', s')) ↦ (v' − β s, s', d)`: a step by its own s from where neighbours are."""

    lr: Any

    def __call__(self, me: Client, *values: Any) -> PyTree:
        ((_, own), now), (v, mixed) = values
        return step(v, self.lr, own), mixed, now


# ---------------------------------------------------------- the upper level


class Averaged(Program):
    """`(r, h, relative) ↦ (1 − θ) r + θ relative · h`: a node's moving average of its directions."""

    share: Any

    def __call__(self, me: Client, *values: Any) -> PyTree:
        before, now, relative = values
        return moving_average(before, scale(relative, now), self.share)


class Descended(Program):
    """`(x, r) ↦ x − α r`, where it may be."""

    lr: Any

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, direction = values
        return me.problem.constraint(step(x, self.lr, direction))
