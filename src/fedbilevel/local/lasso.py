"""`min_θ ½‖Sθ − ω‖² + β‖θ‖₁` by proximal gradients, and its derivative in ω."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedbilevel.local.sketch import Operator

METHODS = ("ista", "fista")
"""Proximal gradients, plain or accelerated."""


def soft(vector: Float[Array, " d"], threshold: Any) -> Float[Array, " d"]:
    """`sign(v) max(|v| − threshold, 0)`, entry by entry."""
    return jnp.sign(vector) * jnp.maximum(jnp.abs(vector) - threshold, 0)


def lasso(
    operator: Operator,
    omega: Float[Array, " p"],
    start: Float[Array, " d"],
    *,
    penalty: Any,
    lr: Any,
    steps: Any,
    method: str = "ista",
) -> Float[Array, " d"]:
    """So many steps `θ ← soft_{γβ}(θ + γSᵀ(ω − Sθ))`, two products each.

    Args:
        operator: S.
        omega: ω.
        start: the first θ.
        penalty: β.
        lr: γ; the steps converge for `γ < 2/‖S‖²`, accelerated ones for `γ ≤ 1/‖S‖²`.
        steps: how many.
        method: "ista", or "fista" with Nesterov's momentum, whose error falls as `1/steps²` in the place of
            `1/steps`.

    Reference: A. Beck, M. Teboulle, A fast iterative shrinkage-thresholding algorithm for linear inverse
    problems, SIAM J. Imaging Sci. 2, 2009.
    """
    lr, penalty = jnp.asarray(lr, start.dtype), jnp.asarray(penalty, start.dtype)

    def advance(_: Any, carry: Any) -> Any:
        theta, ahead, weight = carry
        new = soft(moved(operator, omega, ahead, lr), lr * penalty)
        if method == "ista":
            return new, new, weight
        new_weight = (1 + jnp.sqrt(1 + 4 * weight**2)) / 2
        return new, new + (weight - 1) / new_weight * (new - theta), new_weight

    return jax.lax.fori_loop(0, steps, advance, (start, start, jnp.ones((), start.dtype)))[0]


def moved(operator: Operator, omega: jax.Array, theta: jax.Array, lr: Any) -> Float[Array, " d"]:
    """`θ + γSᵀ(ω − Sθ)`: the gradient step before the threshold."""
    return theta + jnp.asarray(lr, theta.dtype) * operator.adjoint(omega - operator.forward(theta))


def active_set(
    operator: Operator, omega: Float[Array, " p"], theta: Float[Array, " d"], *, penalty: Any, lr: Any
) -> Bool[Array, " d"]:
    """A: the entries that the threshold would leave at θ, `|θ + γSᵀ(ω − Sθ)| > γβ`; all of them if β = 0."""
    threshold = jnp.asarray(lr * penalty, theta.dtype)
    return (jnp.abs(moved(operator, omega, theta, lr)) > threshold) | (threshold == 0)


def lasso_adjoint(
    operator: Operator, active: Bool[Array, " d"], change: Float[Array, " d"], iterations: int
) -> Float[Array, " p"]:
    """`(∂θ/∂ω)ᵀ Δθ = (S_Aᵀ)⁺ Δθ_A` for the converged θ with the active set A.

    The derivative of the fixed point, `∂θ/∂ω = (I − U(I − γSᵀS))⁻¹ γUSᵀ` with `U = diag(A)`, does not depend
    on γ. Where |A| ≤ p it is `S_A(S_AᵀS_A)⁻¹Δθ_A`; a θ that has not converged may have more, and then it is
    `(S_A S_Aᵀ)⁻¹ S_A Δθ_A`. Both are the least-squares solution of `S_Aᵀz = Δθ_A` of least norm.
    """
    return least_squares(operator.only(active).T, jnp.where(active, change, 0), iterations)


def least_squares(operator: Operator, b: Float[Array, " m"], iterations: int) -> Float[Array, " n"]:
    """The z of least norm among those with the least `‖Az − b‖`: `A⁺b`, by conjugate gradients.

    Conjugate gradients on `AᵀAz = Aᵀb` from zero, with the residual `b − Az` carried along (CGLS), so that
    rounding does not square the condition number. Two products an iteration; it ends early when `Aᵀ(b − Az)`
    has fallen to rounding.

    Reference: Å. Björck, Numerical methods for least squares problems, SIAM 1996, section 7.4.
    """
    # With largest entry 1: squares of small numbers would underflow in float32.
    largest = jnp.max(jnp.abs(b))
    residual = b / _safe(largest)
    slope = operator.adjoint(residual)
    first = jnp.sum(slope**2)
    enough = (10 * jnp.finfo(b.dtype).eps) ** 2 * first

    def unfinished(carry: Any) -> Any:
        return (carry[0] < iterations) & (carry[-1] > enough)

    def advance(carry: Any) -> Any:
        index, z, residual, direction, rho = carry
        image = operator.forward(direction)
        alpha = rho / _safe(jnp.sum(image**2))
        z, residual = z + alpha * direction, residual - alpha * image
        slope = operator.adjoint(residual)
        new = jnp.sum(slope**2)
        return index + 1, z, residual, slope + new / rho * direction, new

    start = (jnp.zeros((), jnp.int32), jnp.zeros_like(slope), residual, slope, first)
    return largest * jax.lax.while_loop(unfinished, advance, start)[1]


def _safe(number: jax.Array) -> jax.Array:
    return jnp.where(number != 0, number, 1)
