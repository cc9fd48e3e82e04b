"""MA-DSBO: decentralised bilevel optimisation, gradient tracking at the lower level and for the adjoint."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.random as jr

from fedbilevel.algorithm.base import Algorithm, Info
from fedbilevel.algorithm.dsoba import (
    Mixing,
    check_average,
    first_state,
    first_values,
    mixing_network,
    next_state,
    share,
)
from fedbilevel.algorithm.sgp import step_keys
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.network import Links
from fedbilevel.fed.network_check import check_links
from fedbilevel.fed.place import At
from fedbilevel.local.gradients import Assemble
from fedbilevel.local.tracking import (
    AdjointSlope,
    Averaged,
    Descended,
    Followed,
    LowerSlope,
    Slope,
    Tracked,
    Untracked,
)
from fedbilevel.number import check_count, whole
from fedbilevel.schedule import Rate, rate
from fedbilevel.tree import PyTree, zeros_like


class GradientTracking(eqx.Module):
    """Steps `v ← W v − β s`, `s ← W s + slope(new v) − slope(old v)`; s starts at the slope, at every node.

    All v_i come to where the mean of the slopes is zero, if there are many steps; a few leave them at a
    distance, since s starts anew in every run.

    Cost a step: one round; over every link that is present v and s in one message; a node one slope.

    Args:
        links: who hears whom; with doubly stochastic weights.
        slope: whose mean shall be zero.
        lr: β.
        steps: how many.
    """

    links: Links
    slope: Slope
    lr: Any
    steps: int = eqx.field(static=True)

    def run(
        self, fed: Federation, start: At, at: tuple[At, ...], label: str, key: jax.Array, first: Any
    ) -> At:
        """v after all steps from `start`, at values that stay; the first exchange has the number `first`."""
        everyone = fed.everyone
        relative = everyone.relative_weights()

        def body(index: Any, held: At) -> At:
            k_batch, k_links = step_keys(jr.fold_in(key, index))
            own = everyone.run(Tracked(self.slope), held, relative, *at, key=k_batch)
            mixed = everyone.push(own[0], self.links, label, key=k_links, time=first + index)
            return everyone.run(Followed(self.lr), own, mixed, key=k_batch)

        held: At = fed.loop(self.steps, body, everyone.run(Untracked(), start, key=key))
        return held[0]


class MADSBO(Algorithm[Mixing]):
    """Nodes agree on the lower level and on the adjoint by gradient tracking, then step by a moving average.

        min_x mean_i f_i(x, y*(x)) ,   y*(x) = argmin_y mean_i g_i(x, y)

    Node i has its own `(x_i, y_i, u_i)`. A step, with doubly stochastic weights W:

        T times      y ← W y − β v ,   v ← W v + ∇_y g(x, new y) − ∇_y g(x, old y)
        N times      u ← W u − γ s ,   s ← W s + H(new u − old u)
        r_i ← (1 − θ) r_i + θ (∇_x f_i − J_i u_i)
        x ← W x − α r

    y and u go on from the step before; v and s start anew, at `∇_y g_i` and `H_i u_i − ∇_y f_i`. x moves by
    the r that has the new direction in it, so that θ = 1 is no average; r starts at 0.

    With many inner steps y and u are exact also where nodes differ. x is not tracked: where the directions
    of x differ at the solution, nodes end at a distance from it in proportion to α, also with complete links
    (`DSOBA` with a correction has no such error). In all means node i counts by its share p_i of the weights
    of `Clients`: its slopes and directions are multiplied by `n p_i`. x is projected onto its set after its
    step.

    Args:
        links: who hears whom (`fedbilevel.links`). Rows and columns of their weights must sum to one in every
            exchange: `Complete`, `Ring`, `ErdosRenyi`, such `Given`, `Stochastic` with balanced weights.
            Others are refused with a `CannotRunError`. Where clients come and go
            (`Simulator(availability=...)`), only symmetric weights keep their sums.
        upper_lr: α, step size for x; a number or an optax schedule of the step.
        lower_lr: β, step size for y. Tracking in this order takes smaller steps than descent: of nodes that
            are alike, below `(1 + λ)²/(2L)`, λ the smallest eigenvalue of W, L the largest curvature of g.
        adjoint_lr: γ, step size for u; as β. All three must suit the node that counts most.
        lower_steps: T, steps on y in a step of x.
        terms: N, steps on u in a step of x.
        average: θ, the share of the new direction in the moving average; 1: no average. A number above 0 and
            of at most 1, or an optax schedule of the step.

    Cost a step: `T + N + 1` rounds; over every link that is present `2d_y` scalars in T + N of them, and d_x
    in one; a node T calls of g_y, N each of g_yy and f_y, one each of f_x and g_xy.

    Reference: X. Chen, M. Huang, S. Ma, K. Balasubramanian, Decentralized stochastic bilevel optimization
    with improved per-iteration complexity, ICML 2023.
    """

    links: Links
    upper_lr: Rate = eqx.field(converter=rate)
    lower_lr: Rate = eqx.field(converter=rate)
    adjoint_lr: Rate = eqx.field(converter=rate)
    lower_steps: int = eqx.field(static=True, converter=whole)
    terms: int = eqx.field(static=True, converter=whole)
    average: Rate = eqx.field(converter=share, default=1.0)

    def __check_init__(self) -> None:
        check_links(self.links)
        check_count("lower_steps", self.lower_steps)
        check_count("terms", self.terms)
        check_average(self.average)

    def among(self, n: int) -> MADSBO:
        return eqx.tree_at(lambda method: method.links, self, mixing_network(self, n))

    def init(self, fed: Federation, key: jax.Array) -> Mixing:
        z = first_values(fed)
        return first_state(fed, z, zeros_like(z[0]))

    def step(self, fed: Federation, state: Mixing, key: jax.Array) -> tuple[Mixing, Info]:
        k_lower, k_adjoint, k_upper, k_links = jr.split(key, 4)
        everyone, time = fed.everyone, state.time + self.lower_steps
        lower = GradientTracking(self.links, LowerSlope(), self.lower_lr, self.lower_steps)
        adjoint = GradientTracking(self.links, AdjointSlope(), self.adjoint_lr, self.terms)
        x, y, u, r = (everyone.take(value) for value in state[:-1])
        y = lower.run(fed, y, (x,), "y", k_lower, state.time)
        u = adjoint.run(fed, u, (x, y), "u", k_adjoint, time)
        h = everyone.run(Assemble(), x, y, u, key=k_upper)
        r = everyone.run(Averaged(self.average), r, h, everyone.relative_weights(), key=k_upper)
        mixed = everyone.push(x, self.links, "x", key=k_links, time=time + self.terms)
        x = everyone.run(Descended(self.upper_lr), mixed, r, key=k_upper)
        return next_state(everyone, state, (x, y, u, r), self.lower_steps + self.terms + 1), {}

    def solution(self, state: Mixing) -> tuple[PyTree, PyTree]:
        return state.x, state.y
