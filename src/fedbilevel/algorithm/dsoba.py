"""D-SOBA: decentralised bilevel optimisation in one loop, with corrections for nodes that differ."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from fedbilevel.algorithm.base import Algorithm, CannotRunError, Info, check_learns_y, check_tunes_x
from fedbilevel.algorithm.sgp import step_keys
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.network import Lazy, Links, Network
from fedbilevel.fed.network_check import (
    check_all_answer,
    check_doubly_stochastic,
    check_fixed_symmetric,
    check_links,
    check_nobody_away,
)
from fedbilevel.fed.place import At, Kept
from fedbilevel.local.correction import Correction, ExactDiffusion, Received, Sent, Tracking, Uncorrected
from fedbilevel.local.field import GlobalField, Values
from fedbilevel.number import known_number
from fedbilevel.schedule import Rate, Schedule, rate
from fedbilevel.tree import PyTree, copies, zeros_like

CORRECTIONS: dict[str | None, Correction] = {
    None: Uncorrected(),
    "tracking": Tracking(),
    "diffusion": ExactDiffusion(),
}


class Mixing(NamedTuple):
    """What nodes keep, and how many exchanges there were.

    That is `(x, y, u)`, and in `memory` the moving average of x's direction and what a correction remembers.
    """

    x: Kept
    y: Kept
    u: Kept
    memory: Kept
    time: jax.Array


def share(value: Any) -> Any:
    """θ of a moving average as a leaf of the algorithm's tree: schedules are wrapped, the rest stays."""
    return rate(value) if callable(value) else value


class DSOBA(Algorithm[Mixing]):
    """Every node moves all of its variables along its own directions, and mixes them with its neighbours'.

        min_x mean_i f_i(x, y*(x)) ,   y*(x) = argmin_y mean_i g_i(x, y)

    Node i has its own `z_i = (x_i, y_i, u_i)`; u tracks the adjoint `u* = H⁻¹∇_y f`. A step is one exchange,
    all directions at the old point, with rates `R = (α, β, γ)` and doubly stochastic weights W:

        d_i = (∇_x f_i − J_i u_i,  ∇_y g_i,  H_i u_i − ∇_y f_i)
        h_i ← (1 − θ) h_i + θ d_i^x                 takes the place of d_i^x; h starts at 0

        None         z ← W (z − R d)
        "tracking"   s ← s' + d − d of the step before ;  z ← W (z − R s) ,  s' ← W s
        "diffusion"  ψ' = z − R d ,  φ = ψ' + z − ψ ,  z ← (I + W)/2 φ ,  ψ ← ψ'

    Where nodes differ, None ends at a distance from the solution, and nodes at one from each other, that are
    in proportion to the step sizes (with complete links there is none). With a correction every node ends at
    the solution; but "diffusion" adds up what rounding does to the mean of z: after k steps x is off by about
    k times the rounding of z, over α (in single precision 1e-3 after 4,000 steps of 0.05); long runs want
    "tracking". In all means node i counts by its share p_i of the weights of `Clients`: d_i is multiplied
    by `n p_i`.

    x is projected onto its set after mixing: nodes are in it after every step, and what they send need not
    be. Corrections stay exact: where all rest, x is the projection of x minus α times the mean direction.
    "tracking" projects x and leaves s as it is. The z in φ of "diffusion" has the mixed x from before the
    projection (d has the projected one); otherwise φ would forget what projections cut off, and nodes could
    rest anywhere.

    Args:
        links: who hears whom (`fedbilevel.links`). Rows and columns of their weights must sum to one in every
            exchange: `Complete`, `Ring`, `ErdosRenyi`, such `Given`, `Stochastic` with balanced weights.
            Others are refused with a `CannotRunError`. "diffusion" needs fixed, symmetric ones. Where clients
            come and go (`Simulator(availability=...)`), only symmetric weights keep their sums.
        upper_lr: α, step size for x; a number or an optax schedule of the step.
        lower_lr: β, step size for y.
        adjoint_lr: γ, step size for u. All three must suit the node that counts most.
        average: θ, the share of the new direction in the moving average; 1: no average. A number above 0 and
            of at most 1, or an optax schedule of the step.
        correction: None, "tracking" or "diffusion".

    Cost a step: one round; over every link that is present `d_x + 2d_y` scalars, twice as many with
    "tracking"; a node one call each of f_x, f_y, g_y, g_xy, g_yy.

    References: B. Kong, S. Zhu, S. Lu, X. Huang, K. Yuan, Decentralized bilevel optimization over graphs:
    loopless algorithmic update and transient iteration complexity, 2024; corrections: A. Nedić, A. Olshevsky,
    W. Shi, SIAM J. Optim. 2017 (tracking), K. Yuan, B. Ying, X. Zhao, A. H. Sayed, IEEE TSP 2019 (exact
    diffusion), both on all levels: S. Zhu, B. Kong, S. Lu, X. Huang, K. Yuan, SPARKLE, NeurIPS 2024.
    """

    links: Links
    upper_lr: Rate = eqx.field(converter=rate)
    lower_lr: Rate = eqx.field(converter=rate)
    adjoint_lr: Rate = eqx.field(converter=rate)
    average: Rate = eqx.field(converter=share, default=1.0)
    correction: Literal["tracking", "diffusion"] | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        check_links(self.links)
        check_average(self.average)
        if self.correction not in CORRECTIONS:
            raise ValueError(f'correction is {self.correction!r}; it must be None, "tracking" or "diffusion"')

    def among(self, n: int) -> DSOBA:
        network = mixing_network(self, n)
        if self.correction == "diffusion":
            check_fixed_symmetric(network)
        return eqx.tree_at(lambda method: method.links, self, network)

    def init(self, fed: Federation, key: jax.Array) -> Mixing:
        if self.correction == "diffusion":
            check_nobody_away(fed)
        z = first_values(fed)
        return first_state(fed, z, (zeros_like(z[0]), CORRECTIONS[self.correction].first(z)))

    def step(self, fed: Federation, state: Mixing, key: jax.Array) -> tuple[Mixing, Info]:
        k_batch, k_links = step_keys(key)
        everyone, correction = fed.everyone, CORRECTIONS[self.correction]
        rates = (self.upper_lr, self.lower_lr, self.adjoint_lr)
        *z, memory = (everyone.take(value) for value in state[:-1])
        program = Sent(GlobalField(), rates, self.average, correction)
        out = everyone.run(program, *z, memory, everyone.relative_weights(), key=k_batch)
        links = Lazy(self.links) if self.correction == "diffusion" else self.links
        mixed = everyone.push(out[0], links, "z", key=k_links, time=state.time)
        new = everyone.run(Received(correction), mixed, out[1], key=k_batch)
        return next_state(everyone, state, (*(new[0][i] for i in range(len(z))), new[1]), 1), {}

    def solution(self, state: Mixing) -> tuple[PyTree, PyTree]:
        return state.x, state.y


# ------------------------------------------- what D-SOBA and MA-DSBO share


def check_average(value: Any) -> None:
    """Raise an error that explains unless θ is above 0 and at most 1, or a schedule."""
    number = known_number(value)
    later = isinstance(value, Schedule) or (number is None and hasattr(value, "shape"))
    if not later and not (number is not None and 0 < number <= 1):
        raise ValueError(
            f"average is {value!r}; it is the share of the new direction in a moving average: a number above "
            "0 (with 0 nothing would move) and of at most 1 (which is no average), or an optax schedule"
        )


def mixing_network(method: Any, n: int) -> Network:
    """The links of a method among n clients; an error that says so if their weights do not keep the mean."""
    network: Network = method.links.network(n)
    try:
        check_doubly_stochastic(network)
    except ValueError as why:
        raise CannotRunError(f"{type(method).__name__} cannot mix over these links: {why}") from None
    return network


def first_values(fed: Federation) -> Values:
    """`(x, y, u)` of all nodes, a row each: x and y where the problem starts, u at zero."""
    check_tunes_x(fed.problem)
    check_learns_y(fed.problem)
    check_all_answer(fed)
    x, y = fed.problem.constraint(fed.problem.x0), fed.problem.y0
    values: Values = copies((x, y, zeros_like(y)), fed.n)
    return values


def first_state(fed: Federation, z: Values, memory: PyTree) -> Mixing:
    """Every node at its row of z and of the memory; nothing has been exchanged."""
    x, y, u = z
    return Mixing(fed.keep(x), fed.keep(y), fed.keep(u), fed.keep(memory), jnp.zeros((), jnp.int32))


def next_state(everyone: Cohort, state: Mixing, now: tuple[At, ...], exchanges: int) -> Mixing:
    """The state with what all nodes hold now, `(x, y, u, memory)`, after some more exchanges."""
    x, y, u, memory = (everyone.put(*pair) for pair in zip(state[:-1], now, strict=True))
    return Mixing(x, y, u, memory, state.time + exchanges)
