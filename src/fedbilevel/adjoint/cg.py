"""Conjugate gradients on the adjoint system."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from fedbilevel.adjoint.base import Adjoint, Loop, Product, Solved, damped
from fedbilevel.number import check_count, check_not_negative, whole
from fedbilevel.tree import PyTree, add, dot, scale, step, where, zeros_like


class ConjugateGradients(Adjoint):
    """N iterations of conjugate gradients from zero: N products with one symmetric H.

    In exact arithmetic the answer is exact after as many iterations as H has distinct eigenvalues;
    the error falls by about `1 − 2/√κ` an iteration where the Neumann series' falls by `1 − 1/κ`.

    Args:
        terms: N, the number of iterations.
        damping: added to the diagonal of H.

    When a direction of non-positive curvature is met, H is not positive definite: the iterate stays
    where it is for the rest of the solve, and `adjoint_curvature` reports it.
    """

    terms: int = eqx.field(static=True, converter=whole)
    damping: Any = 0.0

    def __check_init__(self) -> None:
        check_count("terms", self.terms)
        check_not_negative(self, "damping")

    @property
    def one_operator(self) -> bool:
        return True

    def solve(self, product: Product, b: PyTree, memo: PyTree, key: jax.Array, loop: Loop) -> Solved:
        apply, squared = damped(product, self.damping), dot(b, b)
        enough = jnp.finfo(squared.dtype).eps ** 2 * squared

        def advance(index: Any, carry: Any) -> Any:
            u, residual, direction, rho, lowest, memo = carry
            hd, memo = apply(index, direction, memo)
            length, bend = dot(direction, direction), dot(direction, hd)
            at_work = rho > enough
            lowest = jnp.where(at_work & (length > 0), jnp.minimum(lowest, bend / _safe(length)), lowest)
            active = at_work & (lowest > 0)
            alpha = jnp.where(active, rho / _safe(bend), 0)
            u, residual = step(u, -alpha, direction), step(residual, alpha, hd)
            new_rho = jnp.where(active, dot(residual, residual), rho)
            onward = add(residual, scale(new_rho / _safe(rho), direction))
            return u, residual, where(active, onward, direction), new_rho, lowest, memo

        start = (zeros_like(b), b, b, squared, jnp.full_like(squared, jnp.inf), memo)
        u, _, _, _, lowest, memo = loop(self.terms, advance, start)
        return Solved(u, memo, {"adjoint_curvature": lowest})


def _safe(number: jax.Array) -> jax.Array:
    return jnp.where(number != 0, number, 1)
