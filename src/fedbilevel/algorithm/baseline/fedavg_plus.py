"""FedAvg+: federated averaging, then a few steps of every client by itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.algorithm.base import Algorithm, Info, check_lengths, with_server
from fedbilevel.algorithm.baseline.local import first_own
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.links import Complete, Links
from fedbilevel.fed.place import Kept
from fedbilevel.local.descent import Descent
from fedbilevel.local.work import Amount, Work, amount, check_amounts
from fedbilevel.number import check_count, whole
from fedbilevel.schedule import Rate, rate, rate_if_given
from fedbilevel.tree import PyTree


class Tuned(NamedTuple):
    """x at the clients, the server's y, every client's own copy of it, and how many steps were made."""

    x: Kept
    y: PyTree
    own: Kept
    time: jax.Array


class FedAvgPlus(Algorithm[Tuned]):
    """FedAvg on y (τ local SGD steps on `g_i(x0, ·)`, then the average), fine-tuned at every client.

        y ← mean of y_i after τ steps from y;      own_i = y after T more steps on g_i, for all clients

    `result.y` has one row a client: own_i. To fine-tune once, after the last round, would be enough for the
    last row of a history, but then no other row would show personal models. So ALL clients download and
    fine-tune the new average after every `tune_every` steps, and that is booked; in between they keep the
    last ones. Let `tune_every` be the number of steps between two rows. The own models are never averaged.

    Args:
        lower_lr: step size; a number or an optax schedule of the step.
        steps: τ, a number or a tuple with one for each client.
        epochs: shuffled passes over the data in the place of steps.
        tune_steps: T, likewise.
        tune_epochs: passes in the place of `tune_steps`.
        tune_lr: step size of these; None: `lower_lr`.
        tune_every: steps between two times that clients fine-tune.
        cohort: clients in a round of FedAvg; None: all.
        links: must be complete, since it needs a server; others are refused with a `CannotRunError`.

    Cost a step and client of the cohort: one exchange, `d_y` scalars each way, τ calls of g_y. Every
    `tune_every` steps each client besides: `d_y` scalars down, T calls of g_y.

    Reference: Y. Jiang, J. Konečný, K. Rush, S. Kannan, Improving federated learning personalization via
    model agnostic meta learning, arXiv:1909.12488, 2019.
    """

    lower_lr: Rate = eqx.field(converter=rate)
    steps: Amount = eqx.field(static=True, converter=amount, default=1)
    epochs: Amount | None = eqx.field(static=True, converter=amount, default=None)
    tune_steps: Amount = eqx.field(static=True, converter=amount, default=1)
    tune_epochs: Amount | None = eqx.field(static=True, converter=amount, default=None)
    tune_lr: Any = eqx.field(converter=rate_if_given, default=None)
    tune_every: int = eqx.field(static=True, converter=whole, default=1)
    cohort: int | None = eqx.field(static=True, converter=whole, default=None)
    links: Links = Complete()

    def __check_init__(self) -> None:
        check_amounts(self, "steps", "epochs", "tune_steps", "tune_epochs")
        check_count("tune_every", self.tune_every)

    def among(self, n: int) -> Any:
        return with_server(self, n)

    def init(self, fed: Federation, key: jax.Array) -> Tuned:
        check_lengths(self, fed.n)
        x, own = first_own(fed)
        return Tuned(x, fed.problem.y0, own, jnp.zeros((), jnp.int32))

    def step(self, fed: Federation, state: Tuned, key: jax.Array) -> tuple[Tuned, Info]:
        k_cohort, k_steps, k_tune = jr.split(key, 3)
        cohort = fed.cohort(k_cohort, self.cohort)
        program = Descent(self.lower_lr, Work("lower", self.steps, self.epochs))
        there = cohort.take(state.x), cohort.send(state.y, "y")
        y, time = cohort.mean(cohort.run(program, *there, key=k_steps), "y"), state.time + 1
        own = fed.loop(
            jnp.where(time % self.tune_every == 0, 1, 0),
            lambda index, own: self._tuned(fed, state.x, y, own, k_tune),
            state.own,
        )
        return Tuned(state.x, y, own, time), {}

    def _tuned(self, fed: Federation, x: Kept, y: PyTree, own: Kept, key: jax.Array) -> Kept:
        everyone, lr = fed.everyone, self.lower_lr if self.tune_lr is None else self.tune_lr
        program = Descent(lr, Work("lower", self.tune_steps, self.tune_epochs))
        there = everyone.take(x), everyone.send(y, "tune")
        return everyone.put(own, everyone.run(program, *there, key=key))

    def solution(self, state: Tuned) -> tuple[PyTree, PyTree]:
        return state.x, state.own
