"""Local descent on one variable: plain (SGD) or corrected by an anchor (SVRG)."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.adjoint.base import Adjoint
from fedbilevel.adjoint.hypergradient import own_hypergradient
from fedbilevel.data.batches import Batch
from fedbilevel.fed.loop import repeat
from fedbilevel.fed.program import Program
from fedbilevel.local.work import Work
from fedbilevel.number import whole
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree, add, norm, step, sub


class Descent(Program):
    """τ local steps on y with `∇_y g_i` (work on the lower level) or on x with `∇_x f_i` (upper).

    Called with `(x, y)` it is SGD, `z ← z − lr·G_i(z; ζ)`; called with `(x, y, q)` it is SVRG,
    `z ← z − lr·[G_i(z; ζ) − G_i(z⁰; ζ) + q]`, with one fresh batch ζ a step in both terms.
    Returns the last z. x is projected onto its set after every step. In steps on y x stays, so features of
    the samples that depend on x alone are computed once, if the steps read them all.

    Reference: FedNest, algorithms 2, 4 (SVRG) and 6 (SGD).
    """

    lr: Any
    work: Work

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y, *anchor = values
        if self.work.level == "lower" and self.work.sees_all(me):
            me = me.at_fixed(x, "lower")

        start = y if self.work.level == "lower" else x

        def direction(z: PyTree, batch: Batch) -> PyTree:
            if anchor:
                return self._corrected(self._change(me, (x, y), z, batch), anchor[0])
            return me.g_y(x, z, batch) if self.work.level == "lower" else me.f_x(z, y, batch)

        def body(batch: Batch, factor: Any, z: PyTree) -> PyTree:
            z = step(z, self.lr * factor, direction(z, batch))
            return z if self.work.level == "lower" else me.problem.constraint(z)

        return self.work.run(me, me.key, body, start)

    def _change(self, me: Client, start: tuple[PyTree, PyTree], z: PyTree, batch: Batch) -> PyTree:
        """`G_i(z; ζ) − G_i(z⁰; ζ)`."""
        x, y = start
        if self.work.level == "lower":
            return me.g_y_change(x, y, z, batch)
        return sub(me.f_x(z, y, batch), me.f_x(x, y, batch))

    def _corrected(self, change: PyTree, anchor: PyTree) -> PyTree:
        """`change + q`. In a single step the change is zero: it is billed, but not computed."""
        return anchor if self.work.single else add(change, anchor)


class HyperDescent(Program):
    """τ local steps on x, each with the client's own hypergradient at `(x_i, y)`: returns x_i.

    The number of terms of a sampled series is drawn once, and kept for all steps of the call. With
    `residual` it returns `(x_i, report)`, the report on the adjoint of its last step.

    Reference: FedNest, algorithm 5, with `∇_y f_i(x_i, y)` in its line 6 (the paper's `∇_x f_i(y_i, y)`
    has the wrong dimension).
    """

    lr: Any
    work: Work
    adjoint: Adjoint | None
    residual: bool = eqx.field(static=True, default=False)

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y = values
        k_series, k_batches, k_steps = jr.split(me.key, 3)

        def body(batch: Batch, factor: Any, carry: Any) -> Any:
            x, index, _ = carry
            key = jr.fold_in(k_batches, index)
            h, report = own_hypergradient(
                me, self.adjoint, x, y, batch, key=key, series_key=k_series, residual=self.residual
            )
            return me.problem.constraint(step(x, self.lr * factor, h)), index + 1, report

        names = ("adjoint_residual", "adjoint_failed") if self.residual and self.adjoint else ()
        nothing = dict.fromkeys(names, jnp.zeros((), norm(y).dtype))
        x, _, report = self.work.run(me, k_steps, body, (x, 0, nothing))
        return (x, report) if self.residual else x


class Both(Program):
    """T rounds of descent on the client's own y_i, then steps on x_i at that y_i: returns both."""

    inner: Descent
    outer: HyperDescent
    rounds: int = eqx.field(static=True, converter=whole)

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y = values
        y = repeat(self.rounds, lambda t, y: self.inner(me.rekeyed(t), x, y), y)
        return self.outer(me.rekeyed(self.rounds), x, y), y
