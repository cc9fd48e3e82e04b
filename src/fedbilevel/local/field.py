"""Directions in which a client moves all of its variables at once.

A field maps the variables `z` of a client to one direction for each. Where the lower level is global,
z = (x, y, u) and u tracks the adjoint; where it is local, and for saddle points, z = (x, y). Methods with
penalties have two lower variables, z = (x, y, v).
"""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.random as jr

from fedbilevel.adjoint.base import Adjoint
from fedbilevel.adjoint.hypergradient import own_hypergradient
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree, add, scale, step, sub

Values: TypeAlias = tuple[PyTree, ...]
"""The variables of a client, x first; or a direction for each."""


class Field(eqx.Module):
    """The directions at z, on batches drawn from a key."""

    @abc.abstractmethod
    def __call__(self, me: Client, z: Values, key: jax.Array) -> Values:
        """One direction for each variable."""


class GlobalField(Field):
    """`(∇_x f − J u, ∇_y g, H u − ∇_y f)` at `(x, y, u)`: every term on a batch of its own.

    Cost: one call each of f_x, f_y, g_y, g_xy, g_yy. Reference: FedBiO, algorithm 1.
    """

    def __call__(self, me: Client, z: Values, key: jax.Array) -> Values:
        x, y, u = z
        k_y, k_f1, k_f2, k_g1, k_g2 = jr.split(key, 5)
        h = sub(me.f_x(x, y, me.batch("upper", k_f1)), me.g_xy(x, y, u, me.batch("lower", k_g1)))
        slope = me.g_y(x, y, me.batch("lower", k_y))
        gap = sub(me.g_yy(x, y, u, me.batch("lower", k_g2)), me.f_y(x, y, me.batch("upper", k_f2)))
        return h, slope, gap


class LocalField(Field):
    """`(∇_x f − J u, ∇_y g)` at `(x, y)`, u by the client's own adjoint.

    Cost: f_x, f_y, g_y, g_xy and the products of the adjoint. Reference: FedBiO, algorithm 3.
    """

    adjoint: Adjoint

    def __call__(self, me: Client, z: Values, key: jax.Array) -> Values:
        x, y = z
        k_lower, k_upper, k_products, k_series = jr.split(key, 4)
        xi = me.batch("upper", k_upper)
        h, _ = own_hypergradient(me, self.adjoint, x, y, xi, key=k_products, series_key=k_series)
        return h, me.g_y(x, y, me.batch("lower", k_lower))


class PenaltyField(Field):
    """Directions of `f(x, y) + λ (g(x, y) − g(x, v))`, by gradients alone, at `(x, y, v)`.

        x:  ∇_x f(x, y) + λ (∇_x g(x, y) − ∇_x g(x, v))
        y:  ∇_y f(x, y)/λ + ∇_y g(x, y)
        v:  ∇_y g(x, v)

    All terms of g see one batch, so that its noise cancels in their difference.

    Cost: one call each of f_x and f_y, two each of g_x and g_y. Reference: F²SA.
    """

    penalty: Any

    def __call__(self, me: Client, z: Values, key: jax.Array) -> Values:
        x, y, v = z
        k_upper, k_lower = jr.split(key)
        zeta = me.batch("lower", k_lower)
        f_x, f_y = me.f_x_and_y(x, y, me.batch("upper", k_upper))
        (g_x, g_y), (g_x_least, g_y_least) = me.g_x_and_y(x, y, zeta), me.g_x_and_y(x, v, zeta)
        upper = add(f_x, scale(self.penalty, sub(g_x, g_x_least)))
        return upper, add(scale(1 / self.penalty, f_y), g_y), g_y_least


class SaddleField(Field):
    """`(∇_x f, −∇_y f)` at `(x, y)`, on one batch: down in x and up in y.

    Cost: one call each of f_x and f_y.
    """

    def __call__(self, me: Client, z: Values, key: jax.Array) -> Values:
        x, y = z
        f_x, f_y = me.f_x_and_y(x, y, me.batch("upper", key))
        return f_x, scale(-1, f_y)


def moved(me: Client, z: Values, rates: Values, directions: Values) -> Values:
    """`z − rates ⊙ directions`, with x projected onto its set."""
    x, *rest = (step(*each) for each in zip(z, rates, directions, strict=True))
    return me.problem.constraint(x), *rest


class Ownership(eqx.Module):
    """Which variables are averaged, and which every client has for itself.

    Attributes:
        shared: for each variable, whether it is averaged.
    """

    shared: tuple[bool, ...] = eqx.field(static=True)

    def parted(self, z: Values) -> tuple[Values, Values]:
        """The averaged variables, and the own ones."""
        pairs = list(zip(z, self.shared, strict=True))
        return tuple(v for v, shared in pairs if shared), tuple(v for v, shared in pairs if not shared)

    def joined(self, shared: Iterable[Any], own: Iterable[Any]) -> tuple[Any, ...]:
        """All variables again, in their order."""
        parts = {True: iter(shared), False: iter(own)}
        return tuple(next(parts[is_shared]) for is_shared in self.shared)
