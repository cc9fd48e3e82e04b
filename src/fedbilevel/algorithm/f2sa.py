"""F²SA: bilevel optimisation by gradients alone."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.random as jr

from fedbilevel.algorithm.base import Algorithm, Info, check_lengths
from fedbilevel.fed.federation import Federation
from fedbilevel.local.field import Ownership, PenaltyField
from fedbilevel.local.field_steps import FieldSteps
from fedbilevel.local.work import Amount, amount, check_amounts, most
from fedbilevel.number import known_number, whole
from fedbilevel.schedule import Rate, rate
from fedbilevel.tree import PyTree


class Penalised(NamedTuple):
    """x, the y of `f + λ g`, and v, the minimiser of g alone."""

    x: PyTree
    y: PyTree
    v: PyTree


def _penalty(value: Any) -> Any:
    """λ as a leaf of the algorithm's tree: a number above zero, or a schedule."""
    number = known_number(value)
    later = callable(value) or (number is None and hasattr(value, "shape"))
    if not later and not (number is not None and 0 < number < math.inf):
        raise ValueError(
            f"penalty is {value!r}; it must be a number above 0, or an optax schedule: it is what makes y "
            "solve the lower level"
        )
    return rate(value)


class F2SA(Algorithm[Penalised]):
    """Fully first-order: a penalty in the place of second derivatives, federated by local steps.

    It minimises `f(x, y) + λ (g(x, y) − min_v g(x, v))` over x and y. A step is one round: every client makes
    I local steps, all directions at the old point,

        v ← v − a ∇_y g(x, v)
        y ← y − a (∇_y f(x, y)/λ + ∇_y g(x, y))
        x ← x − b (∇_x f(x, y) + λ (∇_x g(x, y) − ∇_x g(x, v)))

    and the server averages (x, y, v). No product with a Hessian is taken; all directions are means over
    clients, so with I = 1 there is no drift. The solution is O(1/λ) away from that of the bilevel problem; a
    λ that grows (an optax schedule) takes it there. Both terms of g in the last line see one batch: its noise
    is that of second derivatives times `λ (y − v)`, which stays bounded as λ grows.

    Args:
        upper_lr: b, step size for x; a number or an optax schedule of the round.
        lower_lr: a, step size for y and v.
        penalty: λ, above zero; a number or an optax schedule of the round. Twice the smoothness of f over the
            strong convexity of g, at least, or `f + λ g` need not be convex in y.
        sync_every: I, local steps between two averages; a number, or a tuple with one for each client.
        cohort: clients in a round; None: all.

    Cost a step and client: one exchange, `d_x + 2d_y` scalars each way; I calls each of f_x and f_y, 2I each
    of g_x and g_y.

    Reference: J. Kwon, D. Kwon, S. Wright, R. Nowak, A fully first-order method for stochastic bilevel
    optimization, ICML 2023 (on one machine, y and v before x).
    """

    upper_lr: Rate = eqx.field(converter=rate)
    lower_lr: Rate = eqx.field(converter=rate)
    penalty: Rate = eqx.field(converter=_penalty)
    sync_every: Amount = eqx.field(static=True, converter=amount, default=1)
    cohort: int | None = eqx.field(static=True, converter=whole, default=None)

    def __check_init__(self) -> None:
        check_amounts(self, "sync_every")

    @property
    def local_lower_steps(self) -> int:
        return most(self.sync_every)

    def init(self, fed: Federation, key: jax.Array) -> Penalised:
        check_lengths(self, fed.n)
        return Penalised(fed.problem.constraint(fed.problem.x0), fed.problem.y0, fed.problem.y0)

    def step(self, fed: Federation, state: Penalised, key: jax.Array) -> tuple[Penalised, Info]:
        k_cohort, k_steps = jr.split(key)
        cohort = fed.cohort(k_cohort, self.cohort)
        rates = (self.upper_lr, self.lower_lr, self.lower_lr)
        steps = FieldSteps(PenaltyField(self.penalty), rates, self.sync_every, Ownership((True, True, True)))
        sent = cohort.send(tuple(state), "z")
        out = cohort.run(steps, *(sent[i] for i in range(3)), key=k_steps)
        return Penalised(*cohort.mean(out[0], "z")), {}

    def solution(self, state: Penalised) -> tuple[PyTree, PyTree]:
        return state.x, state.y
