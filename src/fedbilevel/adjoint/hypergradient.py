"""A client's own hypergradient: the adjoint applied locally."""

from __future__ import annotations

from typing import Any

import jax
import jax.random as jr

from fedbilevel.adjoint.base import Adjoint, damped, failed, relative_residual
from fedbilevel.data.batches import Batch
from fedbilevel.fed.loop import repeat
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree, sub

_LAST = 1 << 30
"""The number of a product behind all those of a solve: it draws a batch of its own."""


def own_hypergradient(
    me: Client,
    adjoint: Adjoint | None,
    x: PyTree,
    y: PyTree,
    xi: Batch,
    *,
    key: jax.Array,
    series_key: jax.Array,
    residual: bool = False,
) -> tuple[PyTree, dict[str, jax.Array]]:
    """`∇_x f_i(x, y) − J_i u` with `H_i u ≈ ∇_y f_i(x, y)`, all of it the client's own.

    Without an adjoint (minimax, single level) it is `∇_x f_i`. Cost: f_x, f_y, one g_xy and the
    products of the adjoint, no traffic.

    Args:
        me: the client.
        adjoint: how to solve for u.
        x, y: where.
        xi: the batch of the upper-level derivatives.
        key: draws the lower-level batches: a fresh one for every product, unless the adjoint needs one
            operator.
        series_key: draws the number of terms of a sampled series.
        residual: report on the solve too, for one more product.

    Returns:
        the hypergradient, and the report: `adjoint_residual`, and `adjoint_failed`, 1 if the series
        cannot converge or H_i is not positive definite.
    """
    if adjoint is None:
        return me.f_x(x, y, xi), {}
    k_products, k_mixed = jr.split(key)
    f_x, f_y = me.f_x_and_y(x, y, xi)

    def product(index: Any, v: PyTree, memo: PyTree) -> tuple[PyTree, PyTree]:
        own = k_products if adjoint.one_operator else jr.fold_in(k_products, index)
        return me.g_yy(x, y, v, me.batch("lower", own)), memo

    u, _, found = adjoint.solve(product, f_y, (), series_key, repeat)
    h = sub(f_x, me.g_xy(x, y, u, me.batch("lower", k_mixed)))
    if not residual:
        return h, {}
    hu, _ = damped(product, adjoint.damping)(_LAST, u, ())
    gap = relative_residual(hu, f_y)
    return h, {"adjoint_residual": gap, "adjoint_failed": failed(found).astype(gap.dtype)}
