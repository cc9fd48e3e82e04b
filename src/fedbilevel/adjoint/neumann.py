"""The Neumann series `H⁻¹ b = Σ_n (1/ℓ)(I − H/ℓ)ⁿ b`, truncated or sampled."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from fedbilevel.adjoint.base import Adjoint, Loop, Product, Solved, damped
from fedbilevel.draw import below
from fedbilevel.number import check_count, check_not_negative, check_positive, whole
from fedbilevel.tree import PyTree, add, norm, scale, step


class Neumann(Adjoint):
    """N terms of the series, or one term that stands for them in expectation.

    With `P = I − (H + damping·I)/ℓ`:

    * truncated sum: `u = Σ_{n<N} (1/ℓ) Pⁿ b = (H + damping)⁻¹ (I − Pᴺ) b`; N − 1 products;
    * sampled: `u = (N/ℓ) P^{N'} b`, `N'` uniform in {0..N−1}; N' products, and `E[u]` is the sum.

    Args:
        terms: N, at least 1.
        smoothness: ℓ, an upper bound of the largest eigenvalue of H (without the damping).
        sampled: one random term in the place of the sum.
        damping: added to the diagonal of H, and to ℓ.

    Reference: D. A. Tarzanagh et al., FedNest, ICML 2022, algorithm 3 (sampled).
    """

    terms: int = eqx.field(static=True, converter=whole)
    smoothness: Any
    sampled: bool = eqx.field(static=True, default=False)
    damping: Any = 0.0

    def __check_init__(self) -> None:
        check_count("terms", self.terms)
        check_positive(self, "smoothness")
        check_not_negative(self, "damping")

    @property
    def one_operator(self) -> bool:
        return False

    def solve(self, product: Product, b: PyTree, memo: PyTree, key: jax.Array, loop: Loop) -> Solved:
        bound, apply = self.smoothness + self.damping, damped(product, self.damping)
        times = below(key, (), self.terms) if self.sampled else self.terms - 1

        def advance(index: Any, carry: Any) -> Any:
            term, total, memo, growth = carry
            hv, memo = apply(index, term, memo)
            following = step(term, 1 / bound, hv)
            growth = jnp.maximum(growth, _ratio(norm(following), norm(term)))
            return following, add(total, following), memo, growth

        first = scale(1 / bound, b)
        start = (first, first, memo, jnp.zeros((), norm(b).dtype))
        last, total, memo, growth = loop(times, advance, start)
        u = scale(self.terms, last) if self.sampled else total
        return Solved(u, memo, {"adjoint_growth": growth})


def _ratio(new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(old > 0, new / jnp.where(old > 0, old, 1), 0)
