"""Federated averaging, for one variable and for a saddle point."""

from __future__ import annotations

from typing import Any, Literal

import equinox as eqx
import jax
import jax.random as jr

from fedbilevel.algorithm.base import (
    Info,
    TwoVariables,
    Variables,
    check_learns_y,
    check_minimax,
    check_tunes_x,
    with_server,
)
from fedbilevel.data.batches import Batch
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.links import Complete, Links
from fedbilevel.fed.program import Program
from fedbilevel.local.descent import Descent
from fedbilevel.local.work import Amount, Work, amount, check_amounts
from fedbilevel.number import whole
from fedbilevel.problem.oracle import Client
from fedbilevel.schedule import Rate, rate
from fedbilevel.tree import PyTree, step


class FedAvg(TwoVariables):
    """τ local SGD steps on one variable, then the average. One exchange a step.

    Args:
        lr: step size; a number or an optax schedule.
        level: "upper": minimise `mean f_i` over x (single-level problems); "lower": minimise
            `mean g_i(x0, ·)` over y, that is, train without touching x.
        steps: τ, a number or a tuple with one for each client.
        epochs: shuffled passes over the data in the place of steps.
        cohort: clients in a round; None: all.
        scale_by_steps: client i steps with `lr/τ_i`.
        links: must be complete, since it needs a server; others are refused with a `CannotRunError`.

    Cost a step and client: `d_x` (or `d_x + d_y`) scalars down, the trained variable up, τ gradients.

    Reference: H. B. McMahan et al., Communication-efficient learning of deep networks from
    decentralized data, AISTATS 2017.
    """

    lr: Rate = eqx.field(converter=rate)
    level: Literal["upper", "lower"] = eqx.field(static=True, default="upper")
    steps: Amount = eqx.field(static=True, converter=amount, default=1)
    epochs: Amount | None = eqx.field(static=True, converter=amount, default=None)
    cohort: int | None = eqx.field(static=True, converter=whole, default=None)
    scale_by_steps: bool = eqx.field(static=True, default=False)
    links: Links = Complete()

    def __check_init__(self) -> None:
        check_amounts(self, "steps", "epochs")
        if self.level not in ("upper", "lower"):
            raise ValueError(f'level is {self.level!r}; it must be "upper" or "lower"')

    def among(self, n: int) -> Any:
        return with_server(self, n)

    def init(self, fed: Federation, key: jax.Array) -> Variables:
        (check_tunes_x if self.level == "upper" else check_learns_y)(fed.problem)
        return super().init(fed, key)

    def step(self, fed: Federation, state: Variables, key: jax.Array) -> tuple[Variables, Info]:
        k_cohort, k_steps = jr.split(key)
        cohort = fed.cohort(k_cohort, self.cohort)
        program = Descent(self.lr, Work(self.level, self.steps, self.epochs, self.scale_by_steps))
        there = cohort.send(state.x, "x"), cohort.send(state.y, "y")
        label = "x" if self.level == "upper" else "y"
        new = cohort.mean(cohort.run(program, *there, key=k_steps), label)
        return state._replace(**{label: new}), {}


class SaddleSteps(Program):
    """τ simultaneous steps, down in x and up in y, on the same batches: returns `(x_i, y_i)`."""

    upper_lr: Any
    lower_lr: Any
    work: Work

    def __call__(self, me: Client, *values: Any) -> PyTree:
        def body(batch: Batch, factor: Any, xy: Any) -> Any:
            f_x, f_y = me.f_x_and_y(xy[0], xy[1], batch)
            x = me.problem.constraint(step(xy[0], self.upper_lr * factor, f_x))
            return x, step(xy[1], -self.lower_lr * factor, f_y)

        return self.work.run(me, me.key, body, values)


class FedAvgS(TwoVariables):
    """FedAvg-S, or local SGDA: simultaneous local descent in x and ascent in y, then the average of both.

    Biased when the clients differ and make more than one local step (`FedGDAGT` is not). One exchange a step,
    `d_x + d_y` scalars each way, τ calls of f_x and f_y.

    Args:
        upper_lr: step size for x; a number or an optax schedule.
        lower_lr: step size for y.
        steps: τ, a number or a tuple with one for each client.
        epochs: shuffled passes over the data in the place of steps.
        cohort: clients in a round; None: all.
        scale_by_steps: client i steps with `lr/τ_i`.

    References: C. Hou, K. K. Thekumparampil, G. Fanti, S. Oh, Efficient algorithms for federated
    saddle point optimization, 2021; Y. Deng, M. Mahdavi, Local stochastic gradient descent ascent:
    Convergence analysis and communication efficiency, AISTATS 2021.
    """

    upper_lr: Rate = eqx.field(converter=rate)
    lower_lr: Rate = eqx.field(converter=rate)
    steps: Amount = eqx.field(static=True, converter=amount, default=1)
    epochs: Amount | None = eqx.field(static=True, converter=amount, default=None)
    cohort: int | None = eqx.field(static=True, converter=whole, default=None)
    scale_by_steps: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        check_amounts(self, "steps", "epochs")

    def init(self, fed: Federation, key: jax.Array) -> Variables:
        check_minimax(fed.problem, "FedAvgS")
        return super().init(fed, key)

    def step(self, fed: Federation, state: Variables, key: jax.Array) -> tuple[Variables, Info]:
        k_cohort, k_steps = jr.split(key)
        cohort = fed.cohort(k_cohort, self.cohort)
        work = Work("upper", self.steps, self.epochs, self.scale_by_steps)
        there = cohort.send(state.x, "x"), cohort.send(state.y, "y")
        both = cohort.run(SaddleSteps(self.upper_lr, self.lower_lr, work), *there, key=k_steps)
        return Variables(*cohort.mean(both, "xy")), {}
