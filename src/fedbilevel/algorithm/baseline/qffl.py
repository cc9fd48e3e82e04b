"""q-FFL: federated averaging that stresses clients with large losses."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.random as jr

from fedbilevel.algorithm.base import Info, TwoVariables, Variables, check_learns_y
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.program import Program
from fedbilevel.local.descent import Descent
from fedbilevel.local.work import Amount, Work, amount, check_amounts
from fedbilevel.number import whole
from fedbilevel.problem.oracle import Client
from fedbilevel.schedule import Rate, rate
from fedbilevel.tree import PyTree, dot, scale, step, sub

_LEAST = 1e-10
"""Added to a loss, whose power q − 1 < 0 would not be finite at zero."""


class FairSteps(Program):
    """`(x, y) ↦ (Δ_i, h_i)` of q-FedAvg: local steps from y, scaled by powers of the loss at y."""

    descent: Descent
    q: Any

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y = values
        everything = me.with_batches_of(None)
        loss = everything.g(x, y, everything.batch("lower", me.key)) + _LEAST
        smooth = 1 / self.descent.lr
        moved = scale(smooth, sub(y, self.descent(me, x, y)))
        curvature = self.q * loss ** (self.q - 1) * dot(moved, moved) + smooth * loss**self.q
        return scale(loss**self.q, moved), curvature


class QFFL(TwoVariables):
    """q-FedAvg: minimises `mean_i g_i(x0, y)^(q+1)/(q+1)` over y, without touching x.

    A step, with `F_i = g_i(x0, y)` on all of a client's training data, y_i after τ local SGD steps, L = 1/lr:

        w_i = L (y − y_i);   Δ_i = F_i^q w_i;   h_i = q F_i^(q−1) ‖w_i‖² + L F_i^q
        y ← y − Σ Δ_i / Σ h_i

    L stands for the Lipschitz constant of the gradients; h_i bounds the curvature of the power, so that one
    step size serves every q. q = 0 is FedAvg. The losses must be positive.

    Args:
        lr: step size of the local steps, 1/L; a number or an optax schedule.
        q: exponent of fairness, at least 0.
        steps: τ, a number or a tuple with one for each client.
        epochs: shuffled passes over the data in the place of steps.
        cohort: clients in a round; None: all.

    Cost a step and client: one exchange, `d_x + d_y` scalars down, `d_y + 1` up; τ calls of g_y and one of g
    on all training data.

    Reference: T. Li, M. Sanjabi, A. Beirami, V. Smith, Fair resource allocation in federated learning, ICLR
    2020, algorithm 2.
    """

    lr: Rate = eqx.field(converter=rate)
    q: Any = 1.0
    steps: Amount = eqx.field(static=True, converter=amount, default=1)
    epochs: Amount | None = eqx.field(static=True, converter=amount, default=None)
    cohort: int | None = eqx.field(static=True, converter=whole, default=None)

    def __check_init__(self) -> None:
        check_amounts(self, "steps", "epochs")
        if isinstance(self.q, int | float) and not self.q >= 0:
            raise ValueError(f"q is {self.q!r}; it must be at least 0")

    def init(self, fed: Federation, key: jax.Array) -> Variables:
        check_learns_y(fed.problem)
        return super().init(fed, key)

    def step(self, fed: Federation, state: Variables, key: jax.Array) -> tuple[Variables, Info]:
        k_cohort, k_steps = jr.split(key)
        cohort = fed.cohort(k_cohort, self.cohort)
        program = FairSteps(Descent(self.lr, Work("lower", self.steps, self.epochs)), self.q)
        there = cohort.send(state.x, "x"), cohort.send(state.y, "y")
        direction, curvature = cohort.mean(cohort.run(program, *there, key=k_steps), "y")
        return state._replace(y=step(state.y, 1 / curvature, direction)), {}
