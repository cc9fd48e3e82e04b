"""Local training: every client by itself."""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax

from fedbilevel.algorithm.base import Algorithm, Info, check_learns_y, check_lengths
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.place import Kept
from fedbilevel.local.descent import Descent
from fedbilevel.local.work import Amount, Work, amount, check_amounts
from fedbilevel.schedule import Rate, rate
from fedbilevel.tree import PyTree, copies


class Own(NamedTuple):
    """What every client has for itself: x and y."""

    x: Kept
    y: Kept


def first_own(fed: Federation) -> Own:
    """Every client where the problem starts."""
    check_learns_y(fed.problem)
    x0 = fed.problem.constraint(fed.problem.x0)
    return Own(fed.keep(copies(x0, fed.n)), fed.keep(copies(fed.problem.y0, fed.n)))


class Local(Algorithm[Own]):
    """Every client minimises its own `g_i(x0, y_i)` alone: what all that talk must be better than.

    A step is τ SGD steps at every client. On `fedbilevel.Mixture` it trains all models of a client's own
    mixture, with equal weights. `result.y` has one row a client.

    Args:
        lower_lr: step size; a number or an optax schedule of the step.
        steps: τ, a number or a tuple with one for each client.
        epochs: shuffled passes over the data in the place of steps.

    Cost a step and client: τ calls of g_y, and no traffic at all.
    """

    lower_lr: Rate = eqx.field(converter=rate)
    steps: Amount = eqx.field(static=True, converter=amount, default=1)
    epochs: Amount | None = eqx.field(static=True, converter=amount, default=None)

    def __check_init__(self) -> None:
        check_amounts(self, "steps", "epochs")

    def init(self, fed: Federation, key: jax.Array) -> Own:
        check_lengths(self, fed.n)
        return first_own(fed)

    def step(self, fed: Federation, state: Own, key: jax.Array) -> tuple[Own, Info]:
        everyone = fed.everyone
        program = Descent(self.lower_lr, Work("lower", self.steps, self.epochs))
        y = everyone.run(program, everyone.take(state.x), everyone.take(state.y), key=key)
        return state._replace(y=everyone.put(state.y, y)), {}

    def solution(self, state: Own) -> tuple[PyTree, PyTree]:
        return state.x, state.y
