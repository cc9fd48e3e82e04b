"""FedProx: federated averaging whose clients are drawn back to where they started."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.random as jr

from fedbilevel.algorithm.base import Info, TwoVariables, Variables, check_learns_y, with_server
from fedbilevel.data.batches import Batch
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.links import Complete, Links
from fedbilevel.fed.program import Program
from fedbilevel.local.work import Amount, Work, amount, check_amounts
from fedbilevel.number import check_not_negative, whole
from fedbilevel.problem.oracle import Client
from fedbilevel.schedule import Rate, rate
from fedbilevel.tree import PyTree, add, scale, step, sub


class ProximalSteps(Program):
    """`(x, y) ↦ z` after τ steps `z ← z − lr (∇_y g_i(x, z) + μ (z − y))` from y."""

    lr: Any
    mu: Any
    work: Work

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y = values

        def body(batch: Batch, factor: Any, z: PyTree) -> PyTree:
            return step(z, self.lr * factor, add(me.g_y(x, z, batch), scale(self.mu, sub(z, y))))

        return self.work.run(me, me.key, body, y)


class FedProx(TwoVariables):
    """τ local SGD steps on `g_i(x0, z) + (μ/2)‖z − y‖²` from the server's y, then the average.

    The penalty keeps clients that differ from drifting apart between two averages; μ = 0 is FedAvg. It
    minimises `mean g_i(x0, ·)`, without touching x.

    Args:
        lower_lr: step size; a number or an optax schedule of the step.
        mu: μ, at least 0.
        steps: τ, a number or a tuple with one for each client.
        epochs: shuffled passes over the data in the place of steps.
        cohort: clients in a round; None: all.
        links: must be complete, since it needs a server; others are refused with a `CannotRunError`.

    Cost a step and client: one exchange, `d_x + d_y` scalars down, `d_y` up, τ calls of g_y.

    Reference: T. Li et al., Federated optimization in heterogeneous networks, MLSys 2020.
    """

    lower_lr: Rate = eqx.field(converter=rate)
    mu: Any
    steps: Amount = eqx.field(static=True, converter=amount, default=1)
    epochs: Amount | None = eqx.field(static=True, converter=amount, default=None)
    cohort: int | None = eqx.field(static=True, converter=whole, default=None)
    links: Links = Complete()

    def __check_init__(self) -> None:
        check_amounts(self, "steps", "epochs")
        check_not_negative(self, "mu")

    def among(self, n: int) -> Any:
        return with_server(self, n)

    def init(self, fed: Federation, key: jax.Array) -> Variables:
        check_learns_y(fed.problem)
        return super().init(fed, key)

    def step(self, fed: Federation, state: Variables, key: jax.Array) -> tuple[Variables, Info]:
        k_cohort, k_steps = jr.split(key)
        cohort = fed.cohort(k_cohort, self.cohort)
        program = ProximalSteps(self.lower_lr, self.mu, Work("lower", self.steps, self.epochs))
        there = cohort.send(state.x, "x"), cohort.send(state.y, "y")
        return state._replace(y=cohort.mean(cohort.run(program, *there, key=k_steps), "y")), {}
