"""FedGDA-GT: local descent and ascent on a saddle point, without drift."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.random as jr

from fedbilevel.algorithm.base import Info, TwoVariables, Variables, check_minimax
from fedbilevel.algorithm.fedmsa import anchored, common_direction
from fedbilevel.fed.federation import Federation
from fedbilevel.local.field import SaddleField
from fedbilevel.local.work import Amount, amount, check_amounts, most
from fedbilevel.number import whole
from fedbilevel.schedule import Rate, rate


class FedGDAGT(TwoVariables):
    """Federated gradient descent ascent with gradient tracking, for minimax problems.

    With z = (x, y) and `d = (∇_x f, −∇_y f)`, a step is

        m ← mean d_i(z)
        client i:  d ← m;  repeat K times:  z_i ← z_i − rates ⊙ d ,  d ← d + d_i(z_i; ζ) − d_i(z_i before; ζ)
        z ← mean z_i

    With all samples d is `m + d_i(z_i) − d_i(z)`, and the fixed point is the saddle point, whatever the
    clients' differences and however many local steps they make (FedAvgS' is not).

    Args:
        upper_lr: step size for x; a number or an optax schedule of the round.
        lower_lr: step size for y.
        sync_every: K, local steps; a number, or a tuple with one for each client.
        cohort: clients in a round; None: all.

    Cost a step and client: two exchanges, `2d_x + 2d_y` scalars each way; 2K − 1 calls each of f_x and f_y.

    Reference: Z. Sun, E. Wei, A communication-efficient algorithm with linear convergence for federated
    minimax learning, NeurIPS 2022.
    """

    upper_lr: Rate = eqx.field(converter=rate)
    lower_lr: Rate = eqx.field(converter=rate)
    sync_every: Amount = eqx.field(static=True, converter=amount, default=1)
    cohort: int | None = eqx.field(static=True, converter=whole, default=None)

    def __check_init__(self) -> None:
        check_amounts(self, "sync_every")

    @property
    def local_lower_steps(self) -> int:
        return most(self.sync_every)

    def init(self, fed: Federation, key: jax.Array) -> Variables:
        check_minimax(fed.problem, "FedGDAGT")
        return super().init(fed, key)

    def step(self, fed: Federation, state: Variables, key: jax.Array) -> tuple[Variables, Info]:
        k_cohort, k_direction, k_steps = jr.split(key, 3)
        cohort, field = fed.cohort(k_cohort, self.cohort), SaddleField()
        there = cohort.send(tuple(state), "z")
        m = common_direction(cohort, field, there, k_direction)
        rates = (self.upper_lr, self.lower_lr)
        return Variables(*anchored(cohort, field, rates, self.sync_every, there, m, k_steps)), {}
