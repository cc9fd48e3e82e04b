"""Momenta that correct themselves (STORM): the same batch at the new point and at the old one."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.random as jr

from fedbilevel.fed.loop import repeat
from fedbilevel.fed.program import Program
from fedbilevel.local.field import Field, Ownership, Values, moved
from fedbilevel.local.work import Amount, of_client
from fedbilevel.number import whole
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree, add, scale, sub


class Storm(eqx.Module):
    """The rule of the momenta, and the step size.

        α_t = δ/(t₀ + t)^{1/3}
        m ← d(z; B) + (1 − c α_t²) (m − d(z_before; B))

    Args:
        field: d, the directions.
        decay: c, one for each variable.
        delta, t0: δ and t₀.
    """

    field: Field
    decay: tuple[Any, ...]
    delta: Any
    t0: Any

    def alpha(self, time: Any) -> Any:
        """`α_t`."""
        return self.delta / (self.t0 + time) ** (1 / 3)

    def __call__(self, me: Client, trail: Trail, time: Any, key: jax.Array) -> Values:
        """The momenta at `trail.z`, after the step of the given time."""
        here, before = self.field(me, trail.z, key), self.field(me, trail.before, key)
        keep = [1 - c * self.alpha(time) ** 2 for c in self.decay]
        parts = zip(here, before, trail.momenta, keep, strict=True)
        return tuple(add(d, scale(share, sub(m, d_before))) for d, d_before, m, share in parts)


class Trail(NamedTuple):
    """Where a client is: its variables, those one step before, and the momenta of that step."""

    z: Values
    before: Values
    momenta: Values


class StormSteps(Program):
    """I steps `z ← z − rates α_t ⊙ m`, the momenta moved along between them.

    The momenta of the last step stay: moving them needs the point after averaging (`StormMomenta`).
    Takes the variables, then their momenta; returns the variables to average, and the `Trail`.

    Args:
        storm: the rule.
        rates: a step size for each variable.
        time: the number of the first step.
        steps: I.
        whose: which variables are averaged.

    Reference: FedBiOAcc, algorithms 2 and 4.
    """

    storm: Storm
    rates: tuple[Any, ...]
    time: Any
    steps: Amount = eqx.field(static=True)
    whose: Ownership

    def __call__(self, me: Client, *values: Any) -> PyTree:
        count = len(self.rates)
        first = self._advance(me, values[:count], values[count:], self.time)

        def body(index: Any, trail: Trail) -> Trail:
            time = self.time + index
            return self._advance(
                me, trail.z, self.storm(me, trail, time, jr.fold_in(me.key, index)), time + 1
            )

        trail = repeat(of_client(self.steps, me.id) - 1, body, first)
        return self.whose.parted(trail.z)[0], tuple(trail)

    def _advance(self, me: Client, z: Values, momenta: Values, time: Any) -> Trail:
        rates = tuple(rate * self.storm.alpha(time) for rate in self.rates)
        return Trail(moved(me, z, rates, momenta), z, momenta)


class StormMomenta(Program):
    """The momenta after the last of I steps, with the averaged variables in the place of the client's.

    Takes the averaged variables and the trail; returns the momenta to average, the client's own, and the
    client's own variables.
    """

    storm: Storm
    time: Any
    steps: Amount = eqx.field(static=True)
    whose: Ownership

    def __call__(self, me: Client, *values: Any) -> PyTree:
        averaged, trail = values[0], Trail(*values[1])
        _, own = self.whose.parted(trail.z)
        last = self.time + of_client(self.steps, me.id) - 1
        momenta = self.storm(me, trail._replace(z=self.whose.joined(averaged, own)), last, me.key)
        return *self.whose.parted(momenta), own


class FirstMomenta(Program):
    """Plain directions on a larger first batch (None: all samples): the momenta before the first step."""

    field: Field
    size: int | None = eqx.field(static=True, converter=whole)
    whose: Ownership

    def __call__(self, me: Client, *values: Any) -> PyTree:
        return self.whose.parted(self.field(me.with_batches_of(self.size), tuple(values), me.key))
