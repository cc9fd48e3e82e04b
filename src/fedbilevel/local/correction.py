"""What nodes that differ add to a step, so that they agree where their mean direction is zero.

A node that steps by its own direction and then mixes comes to rest where the two balance, which is not where
the mean of all directions is zero: the error is in proportion to the step sizes.
"""

from __future__ import annotations

import abc
from typing import Any

import equinox as eqx

from fedbilevel.fed.program import Program
from fedbilevel.local.field import Field, Values
from fedbilevel.local.tracking import moving_average, tracked
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree, add, scale, step, sub, zeros_like


class Correction(eqx.Module):
    """What a node sends in the place of its variables, and what it makes of what the exchange mixed."""

    @abc.abstractmethod
    def first(self, z: Values) -> PyTree:
        """What a node remembers before its first step."""

    @abc.abstractmethod
    def sent(self, z: Values, rates: Values, directions: Values, memory: PyTree) -> tuple[PyTree, PyTree]:
        """The message, and what the node notes for the time when it is mixed."""

    @abc.abstractmethod
    def received(self, mixed: PyTree, note: PyTree) -> tuple[Values, PyTree]:
        """The variables, before x is projected, and what the node remembers."""


class Uncorrected(Correction):
    """`z ← W(z − R d)`."""

    def first(self, z: Values) -> PyTree:
        return ()

    def sent(self, z: Values, rates: Values, directions: Values, memory: PyTree) -> tuple[PyTree, PyTree]:
        return stepped(z, rates, directions), ()

    def received(self, mixed: PyTree, note: PyTree) -> tuple[Values, PyTree]:
        return mixed, ()


class Tracking(Correction):
    """`s ← s' + d − before`, `z ← W(z − R s)`, `s' ← W s`: steps by an estimate of the mean direction.

    Remembers `(s', before)`, both zero at first. The mean of s is that of d, whatever becomes of z.

    Reference: A. Nedić, A. Olshevsky, W. Shi, Achieving geometric convergence for distributed optimization
    over time-varying graphs, SIAM J. Optim. 2017.
    """

    def first(self, z: Values) -> PyTree:
        return zeros_like(z), zeros_like(z)

    def sent(self, z: Values, rates: Values, directions: Values, memory: PyTree) -> tuple[PyTree, PyTree]:
        s = tracked(memory[0], directions, memory[1])
        return (stepped(z, rates, s), s), directions

    def received(self, mixed: PyTree, note: PyTree) -> tuple[Values, PyTree]:
        return mixed[0], (mixed[1], note)


class ExactDiffusion(Correction):
    """`ψ' = z − R d`, `φ = ψ' + v − ψ`, `v ← (I + W)/2 φ`, `z` is v with x projected; ψ starts at z.

    Remembers `v − ψ`, which is zero at first and in the mean over the nodes: the mean of v is that of
    `z − R d`. It is the v before the projection, or the mean would have what projections cut off.

    References: K. Yuan, B. Ying, X. Zhao, A. H. Sayed, Exact diffusion for distributed optimization and
    learning, part I, IEEE TSP 2019; with projections: S. A. Alghunaim, K. Yuan, A. H. Sayed, A linearly
    convergent proximal gradient algorithm for decentralized optimization, NeurIPS 2019.
    """

    def first(self, z: Values) -> PyTree:
        return zeros_like(z)

    def sent(self, z: Values, rates: Values, directions: Values, memory: PyTree) -> tuple[PyTree, PyTree]:
        psi = stepped(z, rates, directions)
        return add(psi, memory), psi

    def received(self, mixed: PyTree, note: PyTree) -> tuple[Values, PyTree]:
        return mixed, sub(mixed, note)


def stepped(z: Values, rates: Values, directions: Values) -> Values:
    """`z − rates ⊙ directions`."""
    return tuple(step(*each) for each in zip(z, rates, directions, strict=True))


# ------------------------------------------------- one step, in two halves


class Sent(Program):
    """`(x, y, u, (average, memory), relative) ↦ (message, (average, note))`.

    Directions are multiplied by the node's relative weight; that of x is replaced by its moving average.

    Args:
        field: the directions.
        rates: a step size for each variable.
        share: θ of the moving average.
        correction: what is sent.
    """

    field: Field
    rates: tuple[Any, ...]
    share: Any
    correction: Correction

    def __call__(self, me: Client, *values: Any) -> PyTree:
        *z, (average, memory), relative = values
        h, *rest = scale(relative, self.field(me, tuple(z), me.key))
        average = moving_average(average, h, self.share)
        message, note = self.correction.sent(tuple(z), self.rates, (average, *rest), memory)
        return message, (average, note)


class Received(Program):
    """`(mixed, (average, note)) ↦ (z, (average, memory))`, with x where it may be."""

    correction: Correction

    def __call__(self, me: Client, *values: Any) -> PyTree:
        mixed, (average, note) = values
        (x, *rest), memory = self.correction.received(mixed, note)
        return (me.problem.constraint(x), *rest), (average, memory)
