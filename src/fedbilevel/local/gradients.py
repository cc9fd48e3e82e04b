"""One oracle call as a local program: what a client answers in the exchanges of an adjoint."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.random as jr

from fedbilevel.adjoint.base import Adjoint
from fedbilevel.adjoint.hypergradient import own_hypergradient
from fedbilevel.adjoint.lanczos import lanczos
from fedbilevel.fed.loop import repeat
from fedbilevel.fed.program import Program
from fedbilevel.number import whole
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree, normal_like, size, sub


class LowerGradient(Program):
    """`(x, y) ↦ ∇_y g_i(x, y; ζ)`."""

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y = values
        return me.g_y(x, y, me.batch("lower", me.key))


class UpperGradient(Program):
    """`(x, y) ↦ ∇_y f_i(x, y; ξ)`: the right-hand side of the adjoint system."""

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y = values
        return me.f_y(x, y, me.batch("upper", me.key))


class Curvature(Program):
    """`(x, y, v) ↦ H_i v = ∇²_yy g_i(x, y; ζ) v`."""

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y, v = values
        return me.g_yy(x, y, v, me.batch("lower", me.key))


class Mixed(Program):
    """`(x, y, v) ↦ J_i v = ∇_x ⟨∇_y g_i(x, y; ζ), v⟩`."""

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y, v = values
        return me.g_xy(x, y, v, me.batch("lower", me.key))


class Assemble(Program):
    """`(x, y, u) ↦ ∇_x f_i − J_i u`; with `(x, y)` alone, `∇_x f_i` (no adjoint needed)."""

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y, *u = values
        k_upper, k_lower = jr.split(me.key)
        f_x = me.f_x(x, y, me.batch("upper", k_upper))
        if not u:
            return f_x
        return sub(f_x, me.g_xy(x, y, u[0], me.batch("lower", k_lower)))


class OwnCurvature(Program):
    """`(x, y) ↦` the Lanczos matrix of the client's own H_i: two numbers an iteration."""

    iterations: int = eqx.field(static=True, converter=whole)

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y = values
        k_batch, k_start = jr.split(me.key)
        zeta = me.batch("lower", k_batch)

        def product(index: Any, v: PyTree, memo: PyTree) -> tuple[PyTree, PyTree]:
            return me.g_yy(x, y, v, zeta), memo

        count = min(self.iterations, size(y))
        return tuple(lanczos(product, normal_like(k_start, y), (), count, repeat)[0])


class OwnHypergradient(Program):
    """`(x, y) ↦` the client's own hypergradient, whose mean is not the gradient of the problem."""

    adjoint: Adjoint | None

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y = values
        k_upper, k_rest, k_series = jr.split(me.key, 3)
        xi = me.batch("upper", k_upper)
        return own_hypergradient(me, self.adjoint, x, y, xi, key=k_rest, series_key=k_series)[0]
