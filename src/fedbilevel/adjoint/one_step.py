"""One Richardson step on the adjoint system: for methods that carry u along from round to round."""

from __future__ import annotations

from typing import Any

import equinox as eqx

from fedbilevel.tree import PyTree, add, scale, step, sub


class OneStep(eqx.Module):
    """`u ← u − adjoint_lr · [(H + damping·I) u − ∇_y f]`: one gradient step on `½uᵀHu − ⟨∇_y f, u⟩`.

    Converges with `u` fixed elsewhere for `adjoint_lr < 2/(λ_max + damping)`.

    Reference: J. Li et al., FedBiO, 2023, algorithm 1.
    """

    adjoint_lr: Any
    damping: Any = 0.0

    def __call__(self, u: PyTree, hu: PyTree, b: PyTree) -> PyTree:
        """The next u from the product `hu = H u` and the right-hand side `b`."""
        return step(u, self.adjoint_lr, sub(add(hu, scale(self.damping, u)), b))
