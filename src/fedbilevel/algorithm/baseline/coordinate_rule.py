"""Rules that hold single weights, not kernels: ZeroFL, FedDST and Flash, at the cost of a narrow model.

At the width ratio ρ a client holds as many numbers as the sub-model of width ρ has: all biases, scales and
shifts, and of each weight a number in proportion to that of the sub-model. Unlike kernels, single weights are
named on the wire, by one bit for each weight of the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from fedbilevel.algorithm.baseline.mask_rule import MaskRule, Parts, Share, Train
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.place import Kept
from fedbilevel.fed.program import Program
from fedbilevel.local.learn import Learn
from fedbilevel.number import check_shares, whole
from fedbilevel.problem.oracle import Client
from fedbilevel.problem.submodel import Kernels
from fedbilevel.selection import best
from fedbilevel.tree import PyTree, copies, normal_like, times, where, zeros_like


def budget(kernels: Kernels, ratio: float) -> tuple[int, ...]:
    """How many numbers of every leaf are held: in all as many as a model of this width has."""
    whole = [math.prod(shape) for shape in kernels.shapes]
    is_weight = [len(shape) > 1 for shape in kernels.shapes]
    left = kernels.cost(ratio)["parameters"] - sum(n for n, w in zip(whole, is_weight, strict=True) if not w)
    narrow = [n if w else 0 for n, w in zip(kernels.numbers(kernels.counts(ratio)), is_weight, strict=True)]
    if left < sum(is_weight):
        raise ValueError(
            f"at the width ratio {ratio} there is no room for weights beside the biases and scales of the "
            "whole model; take a larger ratio, or a rule that holds kernels, such as HeteroFL"
        )
    exact = [n * left / sum(narrow) for n in narrow]
    shares = [math.floor(own) for own in exact]
    # What was lost by rounding goes to the leaves that lost most.
    for place in sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])[: left - sum(shares)]:
        shares[place] += 1
    return tuple(s if w else n for s, n, w in zip(shares, whole, is_weight, strict=True))


def budgets(parts: Parts, id: Any) -> jax.Array:
    """`budget` of a client, `(leaves,)`."""
    return jnp.asarray([budget(parts.kernels, ratio) for ratio in parts.ratios], jnp.int32)[id]


def largest(scores: PyTree, counts: Any) -> PyTree:
    """1 at the so many largest scores of every leaf, 0 elsewhere."""
    leaves, structure = jax.tree.flatten(scores)
    masks = [
        best(leaf.ravel(), counts[place]).reshape(leaf.shape).astype(leaf.dtype)
        for place, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, masks)


def magnitude(y: PyTree) -> PyTree:
    """`|y|`."""
    return jax.tree.map(jnp.abs, y)


class CoordinateRule(MaskRule):
    """Single weights; their values and one bit for each weight are sent, only their values come down."""

    def up(self, parts: Parts) -> tuple[int, ...]:
        weights = sum(math.prod(shape) for shape in parts.kernels.shapes if len(shape) > 1)
        return tuple(own + math.ceil(weights / 8) for own in parts.bytes())


class LargestForward(CoordinateRule):
    """ZeroFL: all weights are trained, the loss sees only the largest, and only the largest are sent."""

    def mask(self, me: Client, x: PyTree, y: PyTree, share: Share) -> PyTree:
        return jax.tree.map(jnp.ones_like, y)

    def seen(self, me: Client, y: PyTree, share: Share) -> PyTree:
        return times(largest(magnitude(y), budgets(share.parts, me.id)), y)

    def sent(self, me: Client, y: PyTree, mask: PyTree, share: Share) -> PyTree:
        return largest(magnitude(y), budgets(share.parts, me.id))

    def down(self, parts: Parts) -> tuple[int, ...]:
        return (int(parts.kernels.cost(1.0)["bytes"]),) * len(parts.ratios)


class PruneAndGrow(CoordinateRule):
    """FedDST: a client's own mask, of which the smallest weights make room for those with the largest slope.

    Weights that are new in the mask start at zero (as in RigL). The first mask is drawn from the client's
    key, which the server knows. A client keeps its mask as one bit for each weight.

    Attributes:
        regrown: the share of the held weights that is exchanged at first; it falls as half a cosine.
        until: the number of the round from which on masks stay.
        every: rounds between two exchanges.
    """

    regrown: Any = 0.1
    until: int = eqx.field(static=True, converter=whole, default=1000)
    every: int = eqx.field(static=True, converter=whole, default=10)

    def __check_init__(self) -> None:
        check_shares(self, "regrown")

    def first(self, fed: Federation, parts: Parts, work: Train, key: jax.Array) -> tuple[PyTree, Kept | None]:
        # All zeros: the client has none yet, and draws one.
        return fed.problem.y0, fed.keep(copies(packed(zeros_like(fed.problem.y0)), fed.n))

    def mask(self, me: Client, x: PyTree, y: PyTree, share: Share) -> PyTree:
        counts = budgets(share.parts, me.id)
        drawn = largest(magnitude(normal_like(me.key, y)), counts)
        old = self._or_earlier(drawn, y, share)
        slope = magnitude(me.f_y(x, times(old, y), me.batch("upper", me.key)))
        new = self._exchanged(y, old, slope, counts, share.time)
        return where(jnp.any(share.memory) & (share.time % self.every == 0), new, old)

    def start(self, y: PyTree, mask: PyTree, share: Share) -> PyTree:
        # Of weights that grow, no values came down: the server sent those of the old mask. They start at 0.
        return times(times(mask, self._or_earlier(mask, y, share)), y)

    def _or_earlier(self, mask: PyTree, y: PyTree, share: Share) -> PyTree:
        """The client's mask from its last round, if it has one; else this mask."""
        return where(jnp.any(share.memory), unpacked(share.memory, y), mask)

    def _exchanged(self, y: PyTree, old: PyTree, slope: PyTree, counts: Any, time: Any) -> PyTree:
        falling = (1 + jnp.cos(jnp.pi * jnp.minimum(time / self.until, 1.0))) / 2
        stay = counts - jnp.floor(self.regrown * falling * counts).astype(jnp.int32)
        # A held weight that is zero still comes before those that are not held.
        survivors = largest(jax.tree.map(lambda m, w: m * (1 + jnp.abs(w)), old, y), stay)
        grown = jax.tree.map(lambda m, s: jnp.where(m > 0, jnp.inf, s), survivors, slope)
        return largest(grown, counts)

    def kept(self, mask: PyTree, share: Share) -> PyTree:
        return packed(mask)


class Sensitive(CoordinateRule):
    """Flash: fixed masks, denser where the largest weights of warmed-up models are.

    The server makes them and sends each client its own, once, as one bit for each weight (`"masks"` in the
    ledger); what clients keep are these bits.

    Attributes:
        warm_steps: how many steps clients train the whole model before the first round.
        warm_cohort: how many clients do; None: all.
    """

    warm_steps: int = eqx.field(static=True, converter=whole, default=10)
    warm_cohort: int | None = eqx.field(static=True, converter=whole, default=None)

    def first(self, fed: Federation, parts: Parts, work: Train, key: jax.Array) -> tuple[PyTree, Kept | None]:
        everyone, levels = fed.everyone, sorted(set(parts.ratios))
        warm = fed.cohort(jr.fold_in(key, 1), self.warm_cohort)
        there = warm.agreed(fed.problem.constraint(fed.problem.x0)), warm.send(fed.problem.y0, "warm")
        whole = Train(Everything(), parts, Learn(work.learn.rule, self.warm_steps), 0)
        y, shares = warm.mean(warm.run(WarmUp(whole, tuple(levels)), *there, key=key), "warm")
        masks = [_dense_where(y, shares[place], parts.kernels, own) for place, own in enumerate(levels)]
        own = np.asarray([levels.index(ratio) for ratio in parts.ratios])
        bits = jnp.stack([packed(mask) for mask in masks])[own]
        return y, everyone.put(fed.keep(jnp.zeros_like(bits)), everyone.deal(bits, "masks"))

    def mask(self, me: Client, x: PyTree, y: PyTree, share: Share) -> PyTree:
        return unpacked(share.memory, y)

    def up(self, parts: Parts) -> tuple[int, ...]:
        return parts.bytes()  # the server made the masks


class Everything(MaskRule):
    """The whole model."""

    def mask(self, me: Client, x: PyTree, y: PyTree, share: Share) -> PyTree:
        return jax.tree.map(jnp.ones_like, y)


class WarmUp(Program):
    """`(x, y) ↦ (y after some steps, shares)`: how the largest weights of all divide among the leaves.

    `shares[level, leaf]` is the share of the leaf's weights among as many as a model of that width has.
    """

    train: Train
    levels: tuple[float, ...] = eqx.field(static=True)

    def __call__(self, me: Client, *values: Any) -> PyTree:
        y = self.train(me, *values, ())[0]["y"]
        kernels = self.train.parts.kernels
        sizes = [math.prod(shape) if len(shape) > 1 else 0 for shape in kernels.shapes]
        flat = jnp.concatenate([jnp.abs(leaf).ravel() for leaf in _weights(y, kernels)])
        owner = jnp.asarray(np.repeat(np.arange(len(sizes)), sizes))
        totals = [_weights_held(kernels, ratio) for ratio in self.levels]
        chosen = jnp.stack([best(flat, total) for total in totals]).astype(flat.dtype)
        counts = jax.vmap(lambda row: jax.ops.segment_sum(row, owner, len(sizes)))(chosen)
        return y, counts / jnp.asarray(totals, flat.dtype)[:, None]


def packed(mask: PyTree) -> jax.Array:
    """A mask as bytes, with one bit for each weight."""
    return jnp.packbits(
        jnp.concatenate([leaf.ravel() > 0 for leaf in jax.tree.leaves(mask) if leaf.ndim > 1])
    )


def unpacked(bits: jax.Array, y: PyTree) -> PyTree:
    """The mask of the weights of y in these bytes; the rest of y is held whole."""
    leaves, structure = jax.tree.flatten(y)
    return jax.tree.unflatten(structure, _cut(jnp.unpackbits(bits), leaves))


def _weights(y: PyTree, kernels: Kernels) -> list[Any]:
    return [leaf for leaf, shape in zip(jax.tree.leaves(y), kernels.shapes, strict=True) if len(shape) > 1]


def _weights_held(kernels: Kernels, ratio: float) -> int:
    return sum(n for n, shape in zip(budget(kernels, ratio), kernels.shapes, strict=True) if len(shape) > 1)


def _dense_where(y: PyTree, shares: Any, kernels: Kernels, ratio: float) -> PyTree:
    """The mask of a width ratio: the largest weights of every leaf, divided among the leaves by shares."""
    leaves, total = jax.tree.leaves(y), _weights_held(kernels, ratio)
    ranks = [
        # A weight's rank over how many the leaf may have: below one for those that are to be held. Of all
        # weights the lowest are taken, so that their number is right whatever the rounding.
        jnp.arange(leaf.size) / jnp.maximum(shares[place] * total, 0.5)
        for place, leaf in enumerate(leaves)
        if leaf.ndim > 1
    ]
    taken = _cut(best(-jnp.concatenate(ranks), total), leaves)
    return largest(magnitude(y), [jnp.sum(leaf, dtype=int) for leaf in taken])


def _cut(chosen: jax.Array, leaves: Sequence[Any]) -> list[jax.Array]:
    """A mask of all weights as one for each leaf; the rest is held whole."""
    masks, start = [], 0
    for leaf in leaves:
        if leaf.ndim > 1:
            masks.append(chosen[start : start + leaf.size].reshape(leaf.shape).astype(leaf.dtype))
            start += leaf.size
        else:
            masks.append(jnp.ones_like(leaf))
    return masks
