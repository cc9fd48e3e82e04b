"""Push-sum: what a node computes between two exchanges with its neighbours."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.fed.program import Program
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree, add, scale, step, sub


class Stepped(Program):
    """`(x, (z, w), to, relative) ↦ to − (α_i∇_y g_i(x, z/w), 0)`: a step from `to` by the gradient at z.

    The step is from `(z, w)` itself, before it is sent, or from what arrived. `α_i` is α times the node's
    relative weight.
    """

    lr: Any

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, (z, w), to, relative = values
        gradient = me.g_y(x, scale(1 / w, z), me.batch("lower", me.key))
        return step(to[0], self.lr * relative, gradient), to[1]


class Displaced(Program):
    """`(before, after, w, relative) ↦ (z, w)`: `z = w · before + relative · (after − before)`, to be mixed.

    As a gradient step, a way that a node went is not weighted by w: then Σz, and so the limit, has all of
    them, each as often as its node counts.
    """

    def __call__(self, me: Client, *values: Any) -> PyTree:
        before, after, w, relative = values
        return add(scale(w, before), scale(relative, sub(after, before))), w


class Weighted(Program):
    """`(y, w) ↦ (z, w)` with `z = w y`."""

    def __call__(self, me: Client, *values: Any) -> PyTree:
        y, w = values
        return scale(w, y), w


class Restart(Program):
    """`(y, w) ↦ (y0, 1)`: the lower level where the problem starts."""

    def __call__(self, me: Client, *values: Any) -> PyTree:
        y, w = values
        return jax.tree.map(lambda old, new: new.astype(old.dtype), y, me.problem.y0), jnp.ones_like(w)


class Debiased(Program):
    """`(z, w) ↦ y = z/w`."""

    def __call__(self, me: Client, *values: Any) -> PyTree:
        ((z, w),) = values
        return scale(1 / w, z)


class Noted(Program):
    """`(statistics, witnessed, w) ↦ statistics`: sums of what a node sent and heard, and of how many
    exchanges; and a running mean of w, which random links shake.

    Args:
        before: of how many values the mean is so far; 0: it starts anew.
    """

    before: Any

    def __call__(self, me: Client, *values: Any) -> PyTree:
        so_far, now, w = values
        mean = so_far["w"] + (w - so_far["w"]) / jnp.asarray(self.before + 1, w.dtype)
        sums = {name: so_far[name] + now[name] for name in ("sent", "heard")}
        return {**sums, "exchanges": so_far["exchanges"] + 1, "w": mean}


class ReceivingWeights(Program):
    """`statistics ↦ p̄_ij/δ̄_{j→i}` for all j: zero for a j that was never heard.

    p̄_ij is the mean weight that this node sent to j, δ̄_{j→i} how often it heard j.
    """

    def __call__(self, me: Client, *values: Any) -> PyTree:
        (statistics,) = values
        heard = statistics["heard"]
        return jnp.where(heard > 0, statistics["sent"] / jnp.where(heard > 0, heard, 1), 0)
