"""Questions about a point `(x, y)`, asked with the verbs of a cohort: they run on every engine."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree

from fedbilevel.adjoint.cg import ConjugateGradients
from fedbilevel.adjoint.lanczos import lanczos
from fedbilevel.algorithm.base import Info, TwoVariables, Variables
from fedbilevel.algorithm.exchange import Point, global_adjoint
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.program import Program
from fedbilevel.local.gradients import Assemble, Curvature, LowerGradient, Mixed, OwnCurvature, UpperGradient
from fedbilevel.number import whole
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree, dot, norm, normal_like, scale, size, step, sub


class SquaredDistance(Program):
    """`(x, y, *vectors, centre) ↦ ‖program(x, y, *vectors) − centre‖²`."""

    program: Program

    def __call__(self, me: Client, *values: Any) -> PyTree:
        *arguments, centre = values
        gap = sub(self.program(me, *arguments), centre)
        return dot(gap, gap)


class CurvatureProbe(TwoVariables):
    """Both ends of the spectrum of `mean H_i`: one exchange an iteration, `d_y` scalars each way."""

    iterations: int = eqx.field(static=True, converter=whole, default=30)

    def step(self, fed: Federation, state: Variables, key: jax.Array) -> tuple[Variables, Info]:
        k_start, k_batch = jr.split(key)
        point = Point(fed.publish(state.x, "x"), fed.publish(state.y, "y"))

        def product(index: Any, v: PyTree, point: Point) -> tuple[PyTree, Point]:
            return point.ask(fed.everyone, Curvature(), "u", k_batch, v)

        count = min(self.iterations, size(state.y))
        matrix, _ = lanczos(product, normal_like(k_start, state.y), point, count, fed.loop)
        return state, {"diagonal": matrix.diagonal, "off": matrix.off}


class OwnCurvatureProbe(TwoVariables):
    """The spectra of the clients' own H_i: one exchange, two scalars an iteration up from each client."""

    iterations: int = eqx.field(static=True, converter=whole, default=30)

    def step(self, fed: Federation, state: Variables, key: jax.Array) -> tuple[Variables, Info]:
        everyone = fed.everyone
        there = everyone.send(state.x, "x"), everyone.send(state.y, "y")
        own = everyone.run(OwnCurvature(self.iterations), *there, key=key)
        (diagonal, off), answered = everyone.gather(own, "curvature")
        return state, {"diagonal": diagonal, "off": off, "answered": answered}


class SpreadProbe(TwoVariables):
    """How far the clients' gradients and second-order products lie from their means, relatively.

    `sqrt(mean ‖v_i − v̄‖²)/‖v̄‖` for `∇_y g_i`, `∇_y f_i`, `∇_x f_i`, and `H_i v`, `J_i v` with a random v.
    """

    def step(self, fed: Federation, state: Variables, key: jax.Array) -> tuple[Variables, Info]:
        k_direction, k_batch = jr.split(key)
        point = Point(fed.publish(state.x, "x"), fed.publish(state.y, "y"))
        v = normal_like(k_direction, state.y)
        questions: dict[str, tuple[Program, list[PyTree]]] = {
            "g_y": (LowerGradient(), []),
            "f_y": (UpperGradient(), []),
            "f_x": (Assemble(), []),
            "g_yy": (Curvature(), [v]),
            "g_xy": (Mixed(), [v]),
        }
        spreads = {}
        for name, (program, vectors) in questions.items():
            centre, point = point.ask(fed.everyone, program, name, k_batch, *vectors)
            square, point = point.ask(
                fed.everyone, SquaredDistance(program), "spread", k_batch, *vectors, centre
            )
            spreads[name] = jnp.where(square == 0, 0, jnp.sqrt(square) / norm(centre))
        return state, spreads


class HypergradientProbe(TwoVariables):
    """An accurate hypergradient at `(x, y)`, as one vector, and the curvature of h there.

    Args:
        iterations: of conjugate gradients in each accurate solve.
        damping: added to the diagonal of H.
        turns: power iterations for the curvature of h.
    """

    iterations: int = eqx.field(static=True, converter=whole, default=50)
    damping: Any = 0.0
    turns: int = eqx.field(static=True, converter=whole, default=3)

    def step(self, fed: Federation, state: Variables, key: jax.Array) -> tuple[Variables, Info]:
        h, info = self.accurate(fed, state, key)
        bend = self._curvature(fed, state, h, key)
        return state, info | {"upper_curvature": bend, "hypergradient": ravel_pytree(h)[0]}

    def _solver(self) -> ConjugateGradients:
        return ConjugateGradients(self.iterations, self.damping)

    def accurate(self, fed: Federation, at: Variables, key: jax.Array) -> tuple[PyTree, Info]:
        """`∇_x f − J u` with an accurate u (minimax and single-level: `∇_x f`)."""
        point = Point(fed.publish(at.x, "x"), fed.publish(at.y, "y"))
        if fed.problem.structure in ("minimax", "single_level"):
            return point.ask(fed.everyone, Assemble(), "h", key)[0], {}
        u, point, info = global_adjoint(fed, self._solver(), fed.everyone, None, point, key, residual=True)
        return point.ask(fed.everyone, Assemble(), "h", key, u)[0], info

    def _curvature(self, fed: Federation, at: Variables, h: PyTree, key: jax.Array) -> jax.Array:
        """The largest curvature of `x ↦ f(x, y*(x))` near x: power iteration on differences of ∇h."""
        eps = jnp.finfo(norm(h).dtype).eps ** (1 / 3)

        def turn(index: Any, carry: Any) -> Any:
            v, _ = carry
            v = scale(1 / jnp.maximum(norm(v), jnp.finfo(norm(v).dtype).tiny), v)
            moved = self._moved(fed, at, v, eps, key)
            bent = scale(1 / eps, sub(self.accurate(fed, moved, key)[0], h))
            return bent, norm(bent)

        return fed.loop(self.turns, turn, (h, jnp.zeros((), norm(h).dtype)))[1]

    def _moved(self, fed: Federation, at: Variables, v: PyTree, eps: Any, key: jax.Array) -> Variables:
        """`(x + εv, y + ε dy)` with y moved along as `y*(x)` would be: `H dy = −∇²_yx g v`."""
        everyone, x = fed.everyone, step(at.x, -eps, v)

        def slope(x: PyTree) -> PyTree:
            point = Point(fed.publish(x, "x"), fed.publish(at.y, "y"))
            return point.ask(everyone, LowerGradient(), "q", key)[0]

        def product(index: Any, w: PyTree, point: Point) -> tuple[PyTree, Point]:
            return point.ask(everyone, Curvature(), "u", key, w)

        point = Point(fed.publish(at.x, "x"), fed.publish(at.y, "y"))
        change = sub(slope(at.x), slope(x))
        dy = self._solver().solve(product, change, point, key, fed.loop).u
        return Variables(x, step(at.y, -1, dy))


class EstimatorProbe(TwoVariables):
    """How far a method's draws of the hypergradient at `(x, y)` lie from an accurate one.

    Args:
        estimator: an algorithm with `hypergradient(fed, x, y, key)`.
        accurate: the accurate hypergradient, as one vector.
        draws: how many of its estimates are compared.
    """

    estimator: Any
    accurate: jax.Array
    draws: int = eqx.field(static=True, converter=whole, default=8)

    def step(self, fed: Federation, state: Variables, key: jax.Array) -> tuple[Variables, Info]:
        """Root mean square and bias of the draws, relative to the accurate one."""

        def draw(index: Any, carry: Any) -> Any:
            total, square = carry
            found = self.estimator.hypergradient(fed, state.x, state.y, jr.fold_in(key, index))
            gap = ravel_pytree(found)[0] - self.accurate
            return total + gap, square + dot(gap, gap)

        start = jnp.zeros_like(self.accurate), jnp.zeros((), self.accurate.dtype)
        total, square = fed.loop(self.draws, draw, start)
        length = norm(self.accurate)
        return state, {
            "estimator_error": jnp.sqrt(square / self.draws) / length,
            "estimator_bias": norm(total) / self.draws / length,
        }
