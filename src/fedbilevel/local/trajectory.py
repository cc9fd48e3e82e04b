"""Derivatives along a whole trajectory of push-sum: what a node computes for iterative differentiation."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedbilevel.adjoint.backward import Backward
from fedbilevel.fed.program import Program
from fedbilevel.number import whole
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree, add, row, scale, step


class Room(Program):
    """`point ↦ zeros` with room for so many points."""

    steps: int = eqx.field(static=True, converter=whole)

    def __call__(self, me: Client, *values: Any) -> PyTree:
        (point,) = values
        return jax.tree.map(lambda leaf: jnp.zeros((self.steps, *leaf.shape), leaf.dtype), point)


class Record(Program):
    """`(history, point) ↦ history` with the point at a place."""

    place: Any

    def __call__(self, me: Client, *values: Any) -> PyTree:
        history, point = values
        return jax.tree.map(lambda log, leaf: log.at[self.place].set(leaf), history, point)


class BackwardAt(Program):
    """One step of the adjoint recursion at a recorded point `(z, w)`, with the batch of that step."""

    rule: Backward
    place: Any

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, relative, history, v, vectors, c, received = values
        z, w = row(history, self.place)
        return self.rule(me, x, scale(1 / w, z), w, relative, v, vectors, c, received, received)


class NoTangents(Program):
    """`(x, z) ↦ 0`, `(nodes, d_x, *y)`: how z depends on every node's x before the first step."""

    nodes: int = eqx.field(static=True, converter=whole)

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, z = values
        count = ravel_pytree(x)[0].size
        return jax.tree.map(lambda leaf: jnp.zeros((self.nodes, count, *leaf.shape), leaf.dtype), z)


class SteppedTangents(Program):
    """`(x, (z, w), to, relative, tangents) ↦ tangents`: the derivative of `Stepped`, in every node's x.

    `to` are the tangents of what is stepped from, `tangents` those of z.
    """

    lr: Any

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, (z, w), to, relative, tangents = values
        batch, y = me.batch("lower", me.key), scale(1 / w, z)
        flat, unravel = ravel_pytree(x)
        basis = jax.vmap(unravel)(jnp.eye(flat.size, dtype=flat.dtype))
        (products,) = me.g_yy_each(x, y, (jax.tree.map(_one_axis, tangents),), batch)
        through_z = jax.tree.map(
            lambda leaf, like: leaf.reshape(like.shape), scale(1 / w, products), tangents
        )
        direct = me.g_yx_each(x, y, basis, batch)
        slope = jax.tree.map(lambda a, b: a.at[me.id].add(b), through_z, direct)
        return step(to, self.lr * relative, slope)


def _one_axis(leaf: jax.Array) -> jax.Array:
    """The first two axes as one."""
    return leaf.reshape(-1, *leaf.shape[2:])


class ThroughTangents(Program):
    """`(tangents, c) ↦ (nodes, d_x)`: what this node's cost says about every node's x."""

    def __call__(self, me: Client, *values: Any) -> PyTree:
        tangents, c = values
        parts = jax.tree.map(lambda t, u: jnp.tensordot(t, u[0], axes=u[0].ndim), tangents, c)
        return sum(jax.tree.leaves(parts))


class OwnTotal(Program):
    """`(x, direct, flat) ↦ direct + flat`, in the form of x."""

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, direct, flat = values
        return add(direct, ravel_pytree(x)[1](flat))
