"""Which part of a model a client holds in a round: the rules of HeteroFL, Federated Dropout and FedRolex."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.fed.federation import Federation
from fedbilevel.fed.place import Kept
from fedbilevel.fed.program import Program
from fedbilevel.local.learn import Learn
from fedbilevel.local.narrow import Narrow
from fedbilevel.problem.oracle import Client
from fedbilevel.problem.submodel import Kernels
from fedbilevel.selection import best
from fedbilevel.tree import PyTree, times


class Parts(eqx.Module):
    """How much every client can hold.

    Attributes:
        kernels: of the model.
        ratios: the width ratio of every client.
    """

    kernels: Kernels = eqx.field(static=True)
    ratios: tuple[float, ...] = eqx.field(static=True)

    def counts(self, id: Any) -> jax.Array:
        """How many kernels of each name a client holds."""
        return jnp.asarray([self.kernels.counts(ratio) for ratio in self.ratios], jnp.int32)[id]

    def bytes(self) -> tuple[int, ...]:
        """Of the sub-model of every client."""
        return tuple(int(self.kernels.cost(ratio)["bytes"]) for ratio in self.ratios)


class Share(NamedTuple):
    """What a rule has to go by: how much a client can hold, what it kept, and the number of the round."""

    parts: Parts
    memory: PyTree
    time: Any


class MaskRule(eqx.Module):
    """Which numbers of a model y a client trains, and which it sends."""

    def first(self, fed: Federation, parts: Parts, work: Train, key: jax.Array) -> tuple[PyTree, Kept | None]:
        """The server's first y, and what clients keep between rounds."""
        return fed.problem.y0, None

    @abc.abstractmethod
    def mask(self, me: Client, x: PyTree, y: PyTree, share: Share) -> PyTree:
        """Like y: 1 where a number is held and trained, 0 elsewhere."""

    def start(self, y: PyTree, mask: PyTree, share: Share) -> PyTree:
        """What is trained, before the first step: of y what is held, and came down."""
        return times(mask, y)

    def seen(self, me: Client, y: PyTree, share: Share) -> PyTree:
        """What the loss is evaluated at while y is trained."""
        return y

    def sent(self, me: Client, y: PyTree, mask: PyTree, share: Share) -> PyTree:
        """Like y: 1 where a number is sent after the training."""
        return mask

    def kept(self, mask: PyTree, share: Share) -> PyTree:
        """What the client keeps for its next round."""
        return share.memory

    def down(self, parts: Parts) -> tuple[int, ...]:
        """Bytes that every client downloads."""
        return parts.bytes()

    def up(self, parts: Parts) -> tuple[int, ...]:
        """Bytes that every client uploads."""
        return parts.bytes()


class Train(Program):
    """`(x, y, memory) ↦ ({"y": θ, "held": mask}, memory)`: a client trains its part of y on `f_i(x, ·)`.

    θ starts at what is held of y and makes so many steps of an optimiser, each on a fresh minibatch; outside
    of what is sent it is zero.
    """

    rule: MaskRule
    parts: Parts
    learn: Learn
    time: Any
    narrow: bool = eqx.field(static=True, default=False)

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y, memory = values
        share = Share(self.parts, memory, self.time)
        mask = self.rule.mask(me.rekeyed(0), x, y, share)
        theta = self._trained(me, x, self.rule.start(y, mask, share), mask, share)
        sent = self.rule.sent(me, theta, mask, share)
        return {"y": times(sent, theta), "held": sent}, self.rule.kept(mask, share)

    def part(self, me: Client) -> Narrow | None:
        """What is held, as a small model to compute with; None: compute with the whole one times a mask."""
        if not self.narrow or not isinstance(self.rule, KernelRule):
            return None
        return self.rule.part(me.rekeyed(0), Share(self.parts, (), self.time))

    def _trained(self, me: Client, x: PyTree, start: PyTree, mask: PyTree, share: Share) -> PyTree:
        part, data = self.part(me), me.rekeyed(1)
        if part is not None:
            return part.trained(lambda small: self.learn(data, x, small), start)
        return self.learn(data, x, start, mask, lambda y: self.rule.seen(me, y, share))


class KernelRule(MaskRule):
    """Whole kernels: those of every name with the best scores."""

    @abc.abstractmethod
    def scores(self, key: jax.Array, size: int, time: Any) -> jax.Array:
        """`(size,)`: the kernels of one name with the largest scores are held."""

    def mask(self, me: Client, x: PyTree, y: PyTree, share: Share) -> PyTree:
        return share.parts.kernels.mask(y, self.part(me, share).keep)

    def part(self, me: Client, share: Share) -> Narrow:
        """The kernels that a client holds."""
        kernels, counts = share.parts.kernels, share.parts.counts(me.id)
        keep = [
            best(self.scores(jr.fold_in(me.key, place), size, share.time), counts[place])
            for place, size in enumerate(kernels.sizes)
        ]
        return Narrow(kernels, keep, share.parts.ratios, me.id)


class Leading(KernelRule):
    """The first kernels of every layer, always; those that no client ever holds are zero from the start."""

    def first(self, fed: Federation, parts: Parts, work: Train, key: jax.Array) -> tuple[PyTree, Kept | None]:
        widest = parts.kernels.leading(max(parts.ratios))
        return times(parts.kernels.mask(fed.problem.y0, widest), fed.problem.y0), None

    def scores(self, key: jax.Array, size: int, time: Any) -> jax.Array:
        return -jnp.arange(size, dtype=float)


class Random(KernelRule):
    """Kernels drawn afresh by every client in every round."""

    def scores(self, key: jax.Array, size: int, time: Any) -> jax.Array:
        return jr.uniform(key, (size,))


class Rolling(KernelRule):
    """A window of neighbouring kernels that moves on by one in every round, and round the end."""

    def scores(self, key: jax.Array, size: int, time: Any) -> jax.Array:
        return -((jnp.arange(size) - time) % size).astype(float)
