"""SimFBO and ShroFBO: clients send the sums of their directions, and the server makes the step."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.algorithm.base import Algorithm, Info, check_lengths, decides
from fedbilevel.fed.federation import Federation
from fedbilevel.local.field import GlobalField
from fedbilevel.local.field_steps import SummedSteps
from fedbilevel.local.work import Amount, amount, check_amounts, most
from fedbilevel.number import check_positive, check_shares, whole
from fedbilevel.schedule import Rate, rate
from fedbilevel.tree import PyTree, norm, scale, step, zeros_like


class ThreeVariables(NamedTuple):
    """x, y, and u, which tracks the adjoint."""

    x: PyTree
    y: PyTree
    u: PyTree


class SimFBO(Algorithm[ThreeVariables]):
    """One exchange a step: clients add up their directions, and the server steps along the mean of the sums.

    With z = (x, y, u) and the directions of `FedBiO`, `d = (∇_x f − J u, ∇_y g, H u − ∇_y f)`,

        client i:  z_i ← z_i − a_k η d_i(z_i)    for k < τ_i, from z;    q_i = Σ_k a_k d_i
        server:    z ← z − γ mean q_i ;   ‖u‖ at most r

    so the local step sizes η and those of the server, γ, are chosen apart; with γ = η, all a_k = 1 and an
    x that is free it is FedBiO. A client that makes more steps has a longer q_i: where the τ_i differ,
    the limit (as η falls) is the solution with clients weighted by `‖a_i‖₁`, which is τ_i where all a_k
    are 1. `ShroFBO` is not drawn there.

    Args:
        upper_lr: γ of x, the server's step size; a number or an optax schedule of the round.
        lower_lr: γ of y.
        adjoint_lr: γ of u.
        local_lr: η over γ: all local step sizes are so many times the server's. 1: the client's walk and the
            server's step are alike.
        sync_every: τ, local steps; a number, or a tuple with one for each client.
        discount: a_k is `discount^(τ_i − 1 − k)`: below 1, later steps count more, as in local steps with a
            proximal term. 1: all count the same.
        radius: r, the longest u; None: any.
        per_step: clients send `q_i/‖a_i‖₁`, and the server multiplies the mean by the mean `‖a_i‖₁`
            (`ShroFBO`).
        cohort: clients in a round; None: all.

    Cost a step and client: one exchange, `d_x + 2d_y` scalars each way (`per_step`: one more up); τ calls
    each of f_x, f_y, g_y, g_xy, g_yy.

    Reference: Y. Yang, P. Xiao, K. Ji, SimFBO: Towards simple, flexible and communication-efficient federated
    bilevel learning, NeurIPS 2023, algorithms 1 and 2.
    """

    upper_lr: Rate = eqx.field(converter=rate)
    lower_lr: Rate = eqx.field(converter=rate)
    adjoint_lr: Rate = eqx.field(converter=rate)
    local_lr: Rate = eqx.field(converter=rate, default=1.0)
    sync_every: Amount = eqx.field(static=True, converter=amount, default=1)
    discount: Any = 1.0
    radius: Any = None
    per_step: bool = eqx.field(static=True, default=False)
    cohort: int | None = eqx.field(static=True, converter=whole, default=None)

    def __check_init__(self) -> None:
        check_amounts(self, "sync_every")
        check_positive(self, "discount")
        check_shares(self, "discount")
        if self.radius is not None:
            check_positive(self, "radius")

    @property
    def local_lower_steps(self) -> int:
        return most(self.sync_every)

    def init(self, fed: Federation, key: jax.Array) -> ThreeVariables:
        check_lengths(self, fed.n)
        y = fed.problem.y0
        return ThreeVariables(fed.problem.constraint(fed.problem.x0), y, zeros_like(y))

    def step(self, fed: Federation, state: ThreeVariables, key: jax.Array) -> tuple[ThreeVariables, Info]:
        k_cohort, k_steps = jr.split(key)
        cohort = fed.cohort(k_cohort, self.cohort)
        rates: tuple[Any, ...] = (self.upper_lr, self.lower_lr, self.adjoint_lr)
        local = tuple(lr * self.local_lr for lr in rates)
        program = SummedSteps(GlobalField(), local, self.sync_every, self.discount, self.per_step)
        q = cohort.mean(cohort.run(program, cohort.send(tuple(state), "z"), key=k_steps), "q")
        q = scale(q[1], q[0]) if self.per_step else q
        x, y, u = (step(*each) for each in zip(state, rates, q, strict=True))
        return ThreeVariables(fed.problem.constraint(x), y, self._shortened(u)), {}

    def _shortened(self, u: PyTree) -> PyTree:
        if self.radius is None:
            return u
        return scale(self.radius / jnp.maximum(norm(u), self.radius), u)

    def solution(self, state: ThreeVariables) -> tuple[PyTree, PyTree]:
        return state.x, state.y


@decides("per_step")
def ShroFBO(upper_lr: Rate, lower_lr: Rate, adjoint_lr: Rate, **options: Any) -> SimFBO:
    """SimFBO in which clients count alike however many steps they make: they send means of their directions.

        z ← z − γ (mean ‖a_i‖₁) mean (q_i/‖a_i‖₁)

    Its limit is the solution, up to the order of the local step sizes, where clients make different numbers
    of steps. Where all make the same number it is SimFBO.

    Cost a step and client: one exchange, `d_x + 2d_y` scalars down, one more up; τ calls each of f_x, f_y,
    g_y, g_xy, g_yy.

    Reference: SimFBO, algorithm 2.
    """
    return SimFBO(upper_lr, lower_lr, adjoint_lr, per_step=True, **options)
