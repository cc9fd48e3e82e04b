"""CommFedBiO: a global hypergradient by compressed exchanges."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.random as jr

from fedbilevel.algorithm.base import Algorithm, Info, check_lengths
from fedbilevel.algorithm.exchange import Point
from fedbilevel.fed.codec import TopK, check_entries
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.place import Kept
from fedbilevel.fed.program import Program
from fedbilevel.local.descent import Descent
from fedbilevel.local.gradients import Assemble
from fedbilevel.local.tracking import AdjointSlope
from fedbilevel.local.work import Amount, Work, amount, check_amounts, most
from fedbilevel.number import check_count, whole
from fedbilevel.problem.oracle import Client
from fedbilevel.schedule import Rate, rate
from fedbilevel.tree import PyTree, copies, step, zeros_like


class AdjointGap(Program):
    """`(x, y, u) ↦ H_i u − ∇_y f_i`: the gradient of the quadratic whose minimiser is the adjoint."""

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y, u = values
        return AdjointSlope()(me, u, (x, y), me.key)


class Compressed(NamedTuple):
    """x, y, the adjoint u, and what every client has not sent yet."""

    x: PyTree
    y: PyTree
    u: PyTree
    memory: Kept


class CommFedBiO(Algorithm[Compressed]):
    """Alternates local SGD on y, Q compressed steps on the adjoint u, and a step on x.

        y ← mean of I local SGD steps
        repeat Q times:  u ← u − τ mean C(H_i u − ∇_y f_i + e_i),   e_i what the codec C left out
        x ← x − η mean (∇_x f_i − J_i u)

    C keeps the k entries of largest magnitude. u and the memories e_i go on from step to step; they start
    at zero. With k below the number of entries the fixed point is exact only where clients are alike; else
    it is off in proportion to the step sizes.

    Args:
        upper_lr: η, step size for x; a number or an optax schedule.
        lower_lr: γ, step size for y.
        adjoint_lr: τ, step size for u, below `2/λ_max(H)`.
        topk: k, a number of entries, or a share of all of them in (0, 1).
        terms: Q, compressed exchanges a step.
        lower_steps: I, local steps on y; a number, or a tuple with one for each client.
        cohort: clients in a round; None: all.

    Cost a step and client: Q + 2 exchanges; `d_x + (Q + 3)d_y` scalars down, `d_x + d_y` and Q times k
    values and positions up; I calls of g_y, Q each of f_y and g_yy, one each of f_x and g_xy.

    Reference: J. Li, J. Pei, H. Huang, Communication-efficient robust federated learning with noisy labels,
    KDD 2022.
    """

    upper_lr: Rate = eqx.field(converter=rate)
    lower_lr: Rate = eqx.field(converter=rate)
    adjoint_lr: Rate = eqx.field(converter=rate)
    topk: int | float = eqx.field(static=True)
    terms: int = eqx.field(static=True, converter=whole, default=5)
    lower_steps: Amount = eqx.field(static=True, converter=amount, default=1)
    cohort: int | None = eqx.field(static=True, converter=whole, default=None)

    def __check_init__(self) -> None:
        check_count("terms", self.terms)
        check_entries(self.topk)
        check_amounts(self, "lower_steps")

    @property
    def local_lower_steps(self) -> int:
        return most(self.lower_steps)

    def init(self, fed: Federation, key: jax.Array) -> Compressed:
        check_lengths(self, fed.n)
        y = fed.problem.y0
        nothing = zeros_like(y)
        return Compressed(
            fed.problem.constraint(fed.problem.x0), y, nothing, fed.keep(copies(nothing, fed.n))
        )

    def step(self, fed: Federation, state: Compressed, key: jax.Array) -> tuple[Compressed, Info]:
        k_cohort, k_lower, k_adjoint, k_upper = jr.split(key, 4)
        cohort, codec = fed.cohort(k_cohort, self.cohort), TopK.like(state.u, self.topk)
        x_there, x_note = cohort.read(fed.publish(state.x, "x"))
        descent = Descent(self.lower_lr, Work("lower", self.lower_steps))
        y = cohort.mean(cohort.run(descent, x_there, cohort.send(state.y, "y"), key=k_lower), "y")
        point = Point(x_note, fed.publish(y, "y"))
        x_there, y_there, point = point.read(cohort)

        def iterate(index: Any, carry: Any) -> Any:
            u, memory = carry
            own = jr.fold_in(k_adjoint, index)
            gap = cohort.run(AdjointGap(), x_there, y_there, cohort.send(u, "u"), key=own)
            mean, memory = cohort.mean_with_feedback(gap, memory, "u", codec)
            return step(u, self.adjoint_lr, mean), memory

        u, memory = fed.loop(self.terms, iterate, (state.u, state.memory))
        h, _ = point.ask(cohort, Assemble(), "h", k_upper, u)
        x = fed.problem.constraint(step(state.x, self.upper_lr, h))
        return Compressed(x, y, u, memory), {}

    def solution(self, state: Compressed) -> tuple[PyTree, PyTree]:
        return state.x, state.y
