"""FedBiOAcc: FedBiO with self-correcting momenta."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.algorithm.base import Algorithm, Info, decides
from fedbilevel.algorithm.fedbio import (
    FieldState,
    Lower,
    Upper,
    check_field_settings,
    field_of,
    first_variables,
    kept,
    ownership,
    placed,
    rates_of,
)
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.place import At, Kept, map_kept
from fedbilevel.local.storm import FirstMomenta, Storm, StormMomenta, StormSteps
from fedbilevel.local.work import Amount, amount, most
from fedbilevel.number import check_count, check_not_negative, whole
from fedbilevel.schedule import Rate, rate
from fedbilevel.tree import PyTree, copies, zeros_like


class StormState(NamedTuple):
    """What FedBiOAcc carries.

    Attributes:
        variables: (x, y, u), or x and the clients' own y.
        momenta: likewise.
        held: the averaged variables and momenta as the clients hold them since the last round; where cohorts
            are sampled they do not, and it is empty.
        time: the number of the next local step, from 1.
    """

    variables: FieldState
    momenta: FieldState
    held: tuple[Kept, ...]
    time: jax.Array


class FedBiOAcc(Algorithm[StormState]):
    """FedBiO with STORM momenta (ν, ω, q) of the directions of (x, y, u), and `α_t = δ/(t₀ + t)^{1/3}`.

    A step is one round of I local steps, counted by t from 1:

        x ← x − η α_t ν;   y ← y − γ α_t ω;   u ← u − τ α_t q           averaged after the last
        m ← d(z; B) + (1 − c α_t²) (m − d(z_before; B))                 for m = ν, ω, q

    with the same batches in both evaluations of d; z in the momenta is the averaged point, and the momenta
    are averaged too. The first momenta are every client's own: plain directions on a larger first batch
    (where cohorts are sampled, the average of everyone's).

    Args:
        upper_lr: η, of x, times the α_t above.
        lower_lr: γ, of y, likewise.
        adjoint_lr: τ, of u, likewise.
        sync_every: I, local steps between two averages; a number, or a tuple with one for each client.
        delta, t0: δ and t₀ of the step size.
        c_upper, c_lower, c_adjoint: c of ν, ω, q. `c α²` should lie in (0, 1]; 1 is no memory.
        first_batch: samples of the first momenta; None: all of a client's.
        cohort: clients in a round; None: all.
        lower, terms, upper: as in `FedBiO`.

    Cost a step and client: two exchanges (variables, then momenta) of `d_x + 2d_y` scalars each way; 2I calls
    each of f_x, f_y, g_y, g_xy, g_yy. Local lower level: two exchanges of `d_x`. Sampled cohorts download the
    variables at the start of a round too, since others have moved them. Before the first step all clients
    download the variables and take every direction once (and upload these, where cohorts are sampled).

    Reference: J. Li, F. Huang, H. Huang, NeurIPS 2023, algorithms 2 and 4.
    """

    upper_lr: Rate = eqx.field(converter=rate)
    lower_lr: Rate = eqx.field(converter=rate)
    adjoint_lr: Rate = eqx.field(converter=rate)
    sync_every: Amount = eqx.field(static=True, converter=amount, default=1)
    delta: Any = 1.0
    t0: Any = 1.0
    c_upper: Any = 1.0
    c_lower: Any = 1.0
    c_adjoint: Any = 1.0
    first_batch: int | None = eqx.field(static=True, converter=whole, default=None)
    cohort: int | None = eqx.field(static=True, converter=whole, default=None)
    lower: Lower = eqx.field(static=True, default="global")
    terms: int = eqx.field(static=True, converter=whole, default=5)
    upper: Upper = eqx.field(static=True, default="shared")

    def __check_init__(self) -> None:
        check_field_settings(self)
        check_not_negative(self, "delta", "t0", "c_upper", "c_lower", "c_adjoint")

    @classmethod
    def from_constants(
        cls, L: float, mu: float, sigma: float, clients: int, sync_every: int, batch: int, **options: Any
    ) -> FedBiOAcc:
        """The step sizes of the theorem.

        With `κ = L/μ`, `K = L sqrt(1 + κ²)`, `s = b M σ`: `δ = s^{2/3}/K`; `c_ν = K² (64/(bM) + 1/(24 I
        (bM)²))`, and 48 in the place of 64 in `c_ω = c_u` (the theorem's `O(1/(bM))`); `t₀ = max(2s², 16³
        I^{9/2} s², (c_ν δ²)^{3/2})`, so that `α_t ≤ 1/(16 I^{3/2} K)` and `c α_t² ≤ 1`; `γ = τ = 1/(2L)`, `η
        = 1/(36 κ L)`. The steps are as small as a proof needs them: good for rates, too small for practice.

        Args:
            L: smoothness of f, g and their derivatives.
            mu: strong convexity of g in y.
            sigma: standard deviation of a sample's derivatives.
            clients: M.
            sync_every: I.
            batch: b, samples in a minibatch.
            **options: as for `FedBiOAcc`.

        Reference: J. Li, F. Huang, H. Huang, NeurIPS 2023, theorem 6.
        """
        for name, value in {"L": L, "mu": mu, "sigma": sigma}.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be positive and finite")
        for name, number in {"clients": clients, "sync_every": sync_every, "batch": batch}.items():
            check_count(name, number)
        if mu > L:
            raise ValueError(f"mu is {mu} and L is {L}; no function is more convex than smooth")
        kappa, noise = L / mu, batch * clients * sigma
        smooth = L * math.sqrt(1 + kappa**2)
        delta, team = noise ** (2 / 3) / smooth, batch * clients
        c_upper, c_other = (smooth**2 * (a / team + 1 / (24 * sync_every * team**2)) for a in (64, 48))
        t0 = max(2 * noise**2, 16**3 * sync_every**4.5 * noise**2, (c_upper * delta**2) ** 1.5)
        rules = {"delta": delta, "t0": t0, "c_upper": c_upper, "c_lower": c_other, "c_adjoint": c_other}
        steps = (1 / (36 * kappa * L), 1 / (2 * L), 1 / (2 * L))
        return cls(*steps, sync_every=sync_every, **rules | options)

    # ---------------------------------------------------------------- a step

    @property
    def local_lower_steps(self) -> int:
        return most(self.sync_every) if self.lower == "global" else 1

    def init(self, fed: Federation, key: jax.Array) -> StormState:
        variables = first_variables(self, fed)
        everyone, shared = fed.everyone, variables.shared
        program = FirstMomenta(field_of(self), self.first_batch, ownership(self))
        first = everyone.run(program, *placed(everyone, ownership(self), variables, "z"), key=key)
        # Of a client that does not answer, the first momenta are zero.
        nothing = [
            map_kept(lambda kept: fed.keep(zeros_like(fed.stacked(kept))), each) for each in variables.own
        ]
        own, time = kept(everyone, tuple(nothing), first[1]), jnp.ones((), int)
        if self.cohort is not None:
            mean = everyone.mean(first[0], "m")
            return StormState(variables, FieldState(mean, own), (), time)
        z, m = (fed.keep(copies(each, fed.n)) for each in (shared, zeros_like(shared)))
        return StormState(variables, FieldState((), own), (z, everyone.put(m, first[0])), time)

    def step(self, fed: Federation, state: StormState, key: jax.Array) -> tuple[StormState, Info]:
        k_cohort, k_steps, k_momenta = jr.split(key, 3)
        cohort = fed.cohort(k_cohort, self.cohort)
        settings = (state.time, self.sync_every, ownership(self))
        steps, momenta = (
            StormSteps(self._storm(), rates_of(self, fed.n), *settings),
            StormMomenta(self._storm(), *settings),
        )
        out = cohort.run(steps, *self._start(cohort, state), key=k_steps)
        z = cohort.mean(out[0], "z")
        z_there = cohort.send(z, "z")
        after = cohort.run(momenta, z_there, out[1], key=k_momenta)
        m = cohort.mean(after[0], "m")
        return StormState(
            FieldState(z, kept(cohort, state.variables.own, after[2])),
            FieldState(() if state.held else m, kept(cohort, state.momenta.own, after[1])),
            self._hold(cohort, state.held, z_there, m),
            state.time + (self.sync_every if isinstance(self.sync_every, int) else max(self.sync_every)),
        ), {}

    def _start(self, cohort: Cohort, state: StormState) -> list[At]:
        """Variables and momenta at the clients: as they hold them, or sent to those of a sampled cohort."""
        whose = ownership(self)
        if not state.held:
            both = (state.variables, "z"), (state.momenta, "m")
            return [at for part, label in both for at in placed(cohort, whose, part, label)]
        values: list[At] = []
        for held, own in zip(state.held, (state.variables.own, state.momenta.own), strict=True):
            there = cohort.take(held)
            shared = [there[i] for i in range(len(state.variables.shared))]
            values += whose.joined(shared, [cohort.take(value) for value in own])
        return values

    def _hold(self, cohort: Cohort, held: tuple[Kept, ...], z: At, m: PyTree) -> tuple[Kept, ...]:
        """What all clients hold after a round: the averaged variables, and the averaged momenta."""
        if not held:
            return ()
        return cohort.put(held[0], z), cohort.put(held[1], cohort.send(m, "m"))

    def _storm(self) -> Storm:
        decay = (self.c_upper, self.c_lower, self.c_adjoint)
        return Storm(field_of(self), decay if self.lower == "global" else decay[:2], self.delta, self.t0)

    def solution(self, state: StormState) -> tuple[PyTree, PyTree]:
        x, y, *_ = ownership(self).joined(*state.variables)
        return x, y


@decides("lower", "upper", "c_adjoint")
def FedBiOAccLocal(upper_lr: Rate, lower_lr: Rate, adjoint_lr: Rate, **options: Any) -> FedBiOAcc:
    """FedBiOAcc where every client's lower level is its own: only x and its momentum are averaged.

    Cost a step and client: two exchanges of `d_x` scalars each way; 2I calls each of f_x, f_y, g_y, g_xy, and
    2Q I of g_yy.

    Reference: FedBiO, algorithm 4.
    """
    return FedBiOAcc(upper_lr, lower_lr, adjoint_lr, lower="local", **options)
