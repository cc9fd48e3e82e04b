"""Local steps along a field, on all variables at once: plain, summed for the server, or anchored."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.fed.loop import repeat
from fedbilevel.fed.program import Program
from fedbilevel.local.field import Field, Ownership, Values, moved
from fedbilevel.local.work import Amount, of_client
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree, add, scale, sub, zeros_like


class FieldSteps(Program):
    """I local steps `z ← z − rates ⊙ field(z)`: returns the variables to average, and the client's own.

    Args:
        field: the directions.
        rates: a step size for each variable.
        steps: I.
        whose: which variables are averaged.
    """

    field: Field
    rates: tuple[Any, ...]
    steps: Amount = eqx.field(static=True)
    whose: Ownership

    def __call__(self, me: Client, *values: Any) -> PyTree:
        def body(index: Any, z: Values) -> Values:
            return moved(me, z, self.rates, self.field(me, z, jr.fold_in(me.key, index)))

        return self.whose.parted(repeat(of_client(self.steps, me.id), body, tuple(values)))


class SummedSteps(Program):
    """τ_i local steps with weights a: `z ↦ q = Σ_k a_k d_k`, the weighted sum of the directions taken.

        z ← z − a_k rates ⊙ d_k ,   d_k = field(z) ,   a_k = discount^(τ_i − 1 − k)

    `per_step`: returns `(q/‖a‖₁, ‖a‖₁)` in its place, with `‖a‖₁ = Σ_k a_k`, how much the client has worked.

    Reference: SimFBO, algorithm 1; ShroFBO, algorithm 2.
    """

    field: Field
    rates: tuple[Any, ...]
    steps: Amount = eqx.field(static=True)
    discount: Any
    per_step: bool = eqx.field(static=True, default=False)

    def __call__(self, me: Client, *values: Any) -> PyTree:
        count = of_client(self.steps, me.id)

        def body(k: Any, carry: Any) -> Any:
            z, q, total = carry
            directions, weight = self.field(me, z, jr.fold_in(me.key, k)), self.discount ** (count - 1 - k)
            z = moved(me, z, tuple(weight * rate for rate in self.rates), directions)
            return z, add(q, scale(weight, directions)), total + weight

        z = tuple(values[0])
        _, q, total = repeat(count, body, (z, zeros_like(z), jnp.zeros(())))
        return (scale(1 / total, q), total) if self.per_step else q


class Directions(Program):
    """`(z,) ↦ field(z)`, or `(z, before) ↦ field(z) − (1 − ρ) field(before)` on the same batches.

    The mean of the latter over clients, and `1 − ρ` times the last momentum, is STORM's.
    """

    field: Field
    renew: Any = None

    def __call__(self, me: Client, *values: Any) -> PyTree:
        here = self.field(me, tuple(values[0]), me.key)
        if self.renew is None:
            return here
        return sub(here, scale(1 - self.renew, self.field(me, tuple(values[1]), me.key)))


class AnchoredSteps(Program):
    """I local steps from a common direction: `(z, d) ↦ z` after them.

        z ← z − rates ⊙ d ,   d ← d + field(z; ζ) − field(z_before; ζ)

    each on a fresh batch ζ in both terms. A client whose field is the mean of all would keep to that mean;
    what a client's own field adds is only how it changes on the way, so there is no drift where `d = 0`.

    Args:
        field: the directions.
        rates: a step size for each variable.
        steps: I.

    Cost: 2(I − 1) evaluations of the field.
    """

    field: Field
    rates: tuple[Any, ...]
    steps: Amount = eqx.field(static=True)

    def __call__(self, me: Client, *values: Any) -> PyTree:
        start, first = (tuple(value) for value in values)

        def body(k: Any, carry: Any) -> Any:
            z, before, d = carry
            key = jr.fold_in(me.key, k)
            change = sub(self.field(me, z, key), self.field(me, before, key))
            d = add(d, change)
            return moved(me, z, self.rates, d), z, d

        carry = moved(me, start, self.rates, first), start, first
        return repeat(of_client(self.steps, me.id) - 1, body, carry)[0]
