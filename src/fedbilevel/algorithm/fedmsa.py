"""FedMSA: local steps that keep to a common direction, on all variables at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.algorithm.base import Algorithm, Info, check_lengths
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.place import At
from fedbilevel.local.field import Field, GlobalField, Values
from fedbilevel.local.field_steps import AnchoredSteps, Directions
from fedbilevel.local.work import Amount, amount, check_amounts, most
from fedbilevel.number import check_positive, check_shares, whole
from fedbilevel.schedule import Rate, rate
from fedbilevel.tree import PyTree, add, scale, zeros_like


class Anchored(NamedTuple):
    """What FedMSA carries.

    Attributes:
        z: (x, y, u).
        before: the same, one round before; empty without memory.
        momenta: m, likewise.
        time: the number of the round, from 0.
    """

    z: Values
    before: Values
    momenta: Values
    time: jax.Array


class FedMSA(Algorithm[Anchored]):
    """Multi-sequence stochastic approximation: local steps on (x, y, u) that begin along a common direction.

    With z = (x, y, u) and the directions of `FedBiO`, `d = (∇_x f − J u, ∇_y g, H u − ∇_y f)`, a step is

        m ← mean [d_i(z; ξ_i) − (1 − ρ) d_i(z_before; ξ_i)] + (1 − ρ) m          STORM
        client i:  d ← m;  repeat I times:  z_i ← z_i − rates ⊙ d ,  d ← d + d_i(z_i; ζ) − d_i(z_i before; ζ)
        z ← mean z_i

    Where m is zero nothing moves, so there is no drift: with all samples the fixed point is the solution,
    whatever the clients' differences and however many local steps they make (FedBiO's is not).

    Args:
        upper_lr: step size for x; a number or an optax schedule of the round.
        lower_lr: step size for y.
        adjoint_lr: step size for u.
        sync_every: I, local steps; a number, or a tuple with one for each client.
        renew: ρ, in (0, 1]; None: no memory, m is the mean direction itself (ρ = 1, for half of the calls and
            less to send). The first round has no memory in either case.
        cohort: clients in a round; None: all.

    Cost a step and client: two exchanges; `2d_x + 4d_y` scalars each way, and half as many more down where
    there is memory; 2I − 1 calls each of f_x, f_y, g_y, g_xy, g_yy (with memory: 2I).

    Reference: D. A. Tarzanagh, M. Li, P. Sharma, S. Oymak, Federated multi-sequence stochastic approximation
    with local hypergradient estimation, 2023.
    """

    upper_lr: Rate = eqx.field(converter=rate)
    lower_lr: Rate = eqx.field(converter=rate)
    adjoint_lr: Rate = eqx.field(converter=rate)
    sync_every: Amount = eqx.field(static=True, converter=amount, default=1)
    renew: Any = None
    cohort: int | None = eqx.field(static=True, converter=whole, default=None)

    def __check_init__(self) -> None:
        check_amounts(self, "sync_every")
        if self.renew is not None:
            check_positive(self, "renew")
            check_shares(self, "renew")

    @property
    def local_lower_steps(self) -> int:
        return most(self.sync_every)

    def init(self, fed: Federation, key: jax.Array) -> Anchored:
        check_lengths(self, fed.n)
        y = fed.problem.y0
        z = (fed.problem.constraint(fed.problem.x0), y, zeros_like(y))
        before, momenta = ((), ()) if self.renew is None else (z, zeros_like(z))
        return Anchored(z, before, momenta, jnp.zeros((), jnp.int32))

    def step(self, fed: Federation, state: Anchored, key: jax.Array) -> tuple[Anchored, Info]:
        k_cohort, k_momenta, k_steps = jr.split(key, 3)
        cohort = fed.cohort(k_cohort, self.cohort)
        there = cohort.send(state.z, "z")
        m = self._momenta(cohort, there, state, k_momenta)
        rates = (self.upper_lr, self.lower_lr, self.adjoint_lr)
        z = anchored(cohort, GlobalField(), rates, self.sync_every, there, m, k_steps)
        before, momenta = ((), ()) if self.renew is None else (state.z, m)
        return Anchored(z, before, momenta, state.time + 1), {}

    def _momenta(self, cohort: Cohort, there: At, state: Anchored, key: jax.Array) -> Values:
        """The directions in which all clients begin."""
        if self.renew is None:
            return common_direction(cohort, GlobalField(), there, key)
        renew = jnp.where(state.time == 0, 1.0, self.renew)  # in the first round there is nothing to keep
        both = there, cohort.send(state.before, "z")
        change = cohort.mean(cohort.run(Directions(GlobalField(), renew), *both, key=key), "m")
        return add(change, scale(1 - renew, state.momenta))

    def solution(self, state: Anchored) -> tuple[PyTree, PyTree]:
        return state.z[0], state.z[1]


def common_direction(cohort: Cohort, field: Field, there: At, key: jax.Array) -> Values:
    """The mean of the clients' directions at one point: one exchange."""
    mean: Values = cohort.mean(cohort.run(Directions(field), there, key=key), "m")
    return mean


def anchored(
    cohort: Cohort, field: Field, rates: Values, steps: Amount, there: At, anchor: Values, key: jax.Array
) -> Values:
    """The mean of what clients reach by local steps that begin along a common direction: one exchange."""
    program = AnchoredSteps(field, rates, steps)
    mean: Values = cohort.mean(cohort.run(program, there, cohort.send(anchor, "m"), key=key), "z")
    return mean
