"""A method of one's own: penalties in the place of second derivatives, with local steps and sampled clients.

It minimises `f(x, y) + λ (g(x, y) − min_z g(x, z))` over x and y, whose solution is O(1/λ) away from that of
the bilevel problem, by gradients alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.random as jr

import fedbilevel as fb
from fedbilevel import tree
from fedbilevel.algorithm import Algorithm
from fedbilevel.fed import Program, repeat
from fedbilevel.schedule import Rate, rate


class PenaltySteps(Program):
    """`(x, y, z) ↦ (y, z)`: a client's steps on `f + λ g` and on `g`."""

    lower_lr: Rate
    penalty: float
    steps: int = eqx.field(static=True)

    def __call__(self, me: Any, x: Any, y: Any, z: Any) -> Any:
        def step(i: Any, carry: Any) -> Any:
            y, z = carry
            k_upper, k_lower = jr.split(jr.fold_in(me.key, i))
            batch = me.batch("lower", k_lower)
            slope = tree.add(
                me.f_y(x, y, me.batch("upper", k_upper)), tree.scale(self.penalty, me.g_y(x, y, batch))
            )
            y = tree.step(y, self.lower_lr / (1 + self.penalty), slope)
            return y, tree.step(z, self.lower_lr, me.g_y(x, z, batch))

        return repeat(self.steps, step, (y, z))


class PenaltySlope(Program):
    """`(x, y, z) ↦ ∇_x f(x, y) + λ (∇_x g(x, y) − ∇_x g(x, z))`."""

    penalty: float

    def __call__(self, me: Any, x: Any, y: Any, z: Any) -> Any:
        k_upper, k_lower = jr.split(me.key)
        batch = me.batch("lower", k_lower)
        change = tree.sub(me.g_x(x, y, batch), me.g_x(x, z, batch))
        return tree.add(me.f_x(x, y, me.batch("upper", k_upper)), tree.scale(self.penalty, change))


class State(NamedTuple):
    """What goes from step to step."""

    x: Any
    y: Any
    z: Any


class FedPenalty(Algorithm[State]):
    """Local steps on y and z, then a step of x along the mean slope.

    Args:
        upper_lr, lower_lr: step sizes of x, and of y and z.
        penalty: λ.
        lower_steps: τ, local steps; with more than one, clients that differ drift apart.
        cohort: how many clients take part in a step; None: everyone.

    Cost a step: 2 rounds; a client gets x, and y and z twice, and sends y, z and a slope like x.
    """

    upper_lr: Rate = eqx.field(converter=rate)
    lower_lr: Rate = eqx.field(converter=rate)
    penalty: float = 100.0
    lower_steps: int = eqx.field(static=True, default=1)
    cohort: int | None = eqx.field(static=True, default=None)

    def init(self, fed: Any, key: jax.Array) -> State:
        return State(fed.problem.x0, fed.problem.y0, fed.problem.y0)

    def step(self, fed: Any, state: State, key: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        k_cohort, k_lower, k_upper = jr.split(key, 3)
        clients = fed.cohort(k_cohort, self.cohort)
        x, yz = clients.send(state.x, "x"), (clients.send(state.y, "y"), clients.send(state.z, "z"))
        own = clients.run(PenaltySteps(self.lower_lr, self.penalty, self.lower_steps), x, *yz, key=k_lower)
        y, z = clients.mean(own, "yz")
        yz = clients.send(y, "y"), clients.send(z, "z")
        slope = clients.mean(clients.run(PenaltySlope(self.penalty), x, *yz, key=k_upper), "x")
        new = fed.problem.constraint(tree.step(state.x, self.upper_lr, slope))
        return State(new, y, z), {"gap": tree.norm(tree.sub(y, z))}

    def solution(self, state: State) -> tuple[Any, Any]:
        return state.x, state.y


def main() -> None:
    """Ten times the penalty, a tenth of the error; and a method with second derivatives beside it."""
    known = fb.Quadratic.random(jr.key(0), clients=5, dx=3, dy=4)
    problem, clients = known.problem(), known.clients()
    for penalty in (10.0, 100.0, 1000.0):
        result = fb.solve(problem, clients, FedPenalty(0.2, 0.2, penalty), steps=500)
        print(
            f"penalty {penalty:6.0f}: error {result.history[-1]['error']:.5f}, {result.ledger.rounds} rounds"
        )
    nested = fb.solve(problem, clients, fb.FedNest(0.3, 0.2, lower_steps=5, terms=4, series="cg"), steps=60)
    print(f"FedNest       : error {nested.history[-1]['error']:.5f}, {nested.ledger.rounds} rounds")


if __name__ == "__main__":
    main()
