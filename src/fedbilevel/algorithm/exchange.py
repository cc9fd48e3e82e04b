"""Exchanges at one point `(x, y)`: the clients answer questions about f and g there."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.random as jr

from fedbilevel.adjoint.base import Adjoint, relative_residual
from fedbilevel.algorithm.base import Info
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.place import At, Published
from fedbilevel.fed.program import Program
from fedbilevel.local.gradients import Curvature, UpperGradient
from fedbilevel.tree import PyTree, add, scale


class Point(eqx.Module):
    """A point `(x, y)` that clients download once, when they are first asked about it."""

    x: Published
    y: Published

    def read(self, cohort: Cohort) -> tuple[At, At, Point]:
        """x and y at the clients of a cohort, and who holds them now."""
        x, x_note = cohort.read(self.x)
        y, y_note = cohort.read(self.y)
        return x, y, Point(x_note, y_note)

    def ask(
        self, cohort: Cohort, program: Program, label: str, key: jax.Array, *vectors: PyTree
    ) -> tuple[PyTree, Point]:
        """One exchange: send the vectors, run `program(x, y, *vectors)` there, average the answers."""
        x, y, point = self.read(cohort)
        sent = [cohort.send(vector, "u") for vector in vectors]
        return cohort.mean(cohort.run(program, x, y, *sent, key=key), label), point


def global_adjoint(
    fed: Federation,
    adjoint: Adjoint,
    cohort: Cohort,
    size: int | None,
    point: Point,
    key: jax.Array,
    *,
    residual: bool = False,
) -> tuple[PyTree, Point, Info]:
    """`u ≈ (mean H_i)⁻¹ mean ∇_y f_i`: FedIHGP and its relatives, through exchanges.

    Every exchange draws its own cohort and batch (reusing one in all of them would be biased), unless
    the adjoint needs one symmetric operator: then all of them use `cohort` and one batch.

    Args:
        fed: the federation.
        adjoint: how the system is solved.
        cohort: the cohort of the round.
        size: how many clients a fresh cohort has; None: everyone.
        point: where.
        key: of the solve.
        residual: report `‖H u − b‖/‖b‖` too, for one more exchange.

    Returns:
        u, the point (with its new holders), and what the solve reports.

    Cost: one exchange for `b` and one for each product, `d_y` scalars each way (b: up only), and
    `(x, y)` down for clients that do not have it yet.

    Reference: FedNest, algorithm 3.
    """
    k_right, k_products, k_series, k_check = jr.split(key, 4)

    def ask(
        program: Program, label: str, key: jax.Array, point: Point, *vectors: PyTree
    ) -> tuple[PyTree, Point]:
        k_who, k_what = jr.split(key)
        asked = cohort if adjoint.one_operator else fed.cohort(k_who, size)
        return point.ask(asked, program, label, k_what, *vectors)

    def product(index: Any, v: PyTree, point: Point) -> tuple[PyTree, Point]:
        own = k_products if adjoint.one_operator else jr.fold_in(k_products, index)
        return ask(Curvature(), "u", own, point, v)

    b, point = ask(UpperGradient(), "u", k_right, point)
    u, point, report = adjoint.solve(product, b, point, k_series, fed.loop)
    if residual:
        k_last = k_products if adjoint.one_operator else k_check
        hu, point = ask(Curvature(), "residual", k_last, point, u)
        damped_hu = add(hu, scale(adjoint.damping, u))
        report = report | {"adjoint_residual": relative_residual(damped_hu, b)}
    return u, point, report
