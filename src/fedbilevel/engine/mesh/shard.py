"""What one device of a mesh computes: a simulator of its own clients, and sums over all devices.

All devices run the same program (`jax.shard_map`). What the server knows, every device knows, and computes
alike: the state, who is drawn, who answers. Of client values a device has the rows of its own clients. So
`mean` is a sum over them and one all-reduce; messages between clients (`push`) and single answers (`gather`)
are all that devices ever show each other besides. No sample leaves the device that holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedbilevel.engine.mesh.layout import AXIS
from fedbilevel.engine.simulated_cohort import SimulatedCohort, select
from fedbilevel.engine.simulator import SimulatedFederation
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.ledger import Counts
from fedbilevel.fed.loop import trace_once, zeros
from fedbilevel.fed.place import At, Kept
from fedbilevel.tree import PyTree, all_finite, zeros_like

_PARTS = 4
"""In how many parts a device computes a fair share of a cohort: it can do one more or less of them."""


class ShardFederation(SimulatedFederation):
    """The federation as one device sees it; `clients` are its own, with the weights of all.

    Attributes:
        everybody: how many clients there are on all devices.
        devices: how many devices there are.
    """

    everybody: int = eqx.field(static=True, kw_only=True)
    devices: int = eqx.field(static=True, kw_only=True)

    @property
    def n(self) -> int:  # type: ignore[override]
        return self.everybody

    @property
    def per_device(self) -> int:
        """How many places for clients a device has."""
        return len(self.clients.lower.size)

    def _cohort(self, ids: jax.Array, token: str, weights: Any) -> Cohort:
        return ShardCohort(self, ids, token, weights)

    def _keep(self, stacked: PyTree) -> Kept:
        ids = jnp.minimum(self.first + jnp.arange(self.per_device), self.n - 1)
        return Kept(jax.tree.map(lambda leaf: jnp.asarray(leaf)[ids], stacked))

    def stacked(self, kept: Kept) -> PyTree:
        return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, AXIS, tiled=True)[: self.n], kept.value)

    @property
    def first(self) -> jax.Array:
        """The number of this device's first client."""
        return jax.lax.axis_index(AXIS) * self.per_device

    def all_finite(self, state: PyTree) -> jax.Array:
        """On all devices; what they hold alike needs no exchange."""
        kept, shared = split_kept(state)
        if not jax.tree.leaves(kept):
            return all_finite(shared)
        broken = jax.lax.psum((~all_finite(kept)).astype(jnp.int32), AXIS)
        return all_finite(shared) & (broken == 0)


class ShardCohort(SimulatedCohort):
    """A cohort of which one device holds some clients.

    Ids ascend, so a device's clients lie one behind the other in the cohort. There is room for as many as a
    device can have of it; rows behind the last one are nobody's, and count nowhere.
    """

    fed: ShardFederation

    def __init__(self, fed: ShardFederation, ids: jax.Array, token: str, weights: Any) -> None:
        super().__init__(fed, ids, token, weights)
        self.held = min(self.size, fed.per_device)
        bounds = fed.first + jnp.asarray([0, fed.per_device])
        begin, end = jnp.searchsorted(ids, bounds.astype(ids.dtype))
        rows = jnp.arange(self.held)
        self.count = end - begin
        self.valid = rows < self.count
        # Behind the end: what is read there is the last row, what is written there is dropped.
        self.positions = jnp.where(self.valid, begin + rows, self.size)
        self.places = jnp.where(self.valid, ids[self.positions] - fed.first, fed.per_device)

    @property
    def is_full(self) -> bool:
        """Whether there is a client for every row, on every device."""
        return self.size == self.fed.devices * self.held

    def _here(self, stacked: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[self.positions], stacked)

    def _each(self, one: Callable[..., Any]) -> Callable[..., Any]:
        if self.size == self.fed.n or self.is_full:
            return super()._each(one)
        share = -(-self.size // (_PARTS * self.fed.devices))
        return first_rows(one, self.count, min(self.fed.chunk or share, self.held))

    def _worked(self, present: Any) -> jax.Array:
        return super()._worked(present) * self.valid

    def _own(self, value: Any, *, stacked: bool = True, present: Any = None) -> At:
        # A loop must know beforehand that clients may fail, and how many there are: the rows here do not say.
        if stacked and present is None and self.fed.dropout:
            present = jnp.ones(self.size, bool)
        return super()._own(value, stacked=stacked, present=present)

    def _total(self, shares: jax.Array, rows: PyTree) -> PyTree:
        return summed(super()._total(jnp.where(self.valid, self._here(shares), 0), self._real(rows)))

    def _real(self, rows: PyTree) -> PyTree:
        """Zeros in the rows that are nobody's: a NaN there would spoil a sum even with weight zero."""
        return rows if self.is_full else select(self.valid, rows, zeros_like(rows))

    def _collected(self, rows: PyTree) -> PyTree:
        def collect(leaf: jax.Array) -> jax.Array:
            if self.size == self.fed.n:
                return jax.lax.all_gather(leaf, AXIS, tiled=True)[: self.size]
            nothing = jnp.zeros((self.size, *leaf.shape[1:]), leaf.dtype)
            return jax.lax.psum(nothing.at[self.positions].set(leaf), AXIS).astype(leaf.dtype)

        return jax.tree.map(collect, rows)


def first_rows(function: Callable[..., Any], count: Any, chunk: int) -> Callable[..., Any]:
    """`function` on the first `count` rows of its arguments, `chunk` at once; zeros for the others.

    So the time a device takes is that of the clients it has, though every device runs the same program.
    """

    def over(*rows: PyTree) -> PyTree:
        length = jax.tree.leaves(rows)[0].shape[0]
        filled = jax.tree.map(lambda leaf: _filled(leaf, -length % chunk), rows)

        def part(first: Any) -> PyTree:
            return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, chunk), filled)

        compute, shapes = trace_once(jax.vmap(function), *part(0))

        def visit(index: Any, done: PyTree) -> PyTree:
            new = compute(*part(index * chunk))
            return jax.tree.map(
                lambda old, leaf: jax.lax.dynamic_update_slice_in_dim(old, leaf, index * chunk, 0), done, new
            )

        room = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), shapes)
        start = zeros(room, length + -length % chunk)
        done = jax.lax.fori_loop(0, -(-count // chunk), visit, start)
        return jax.tree.map(lambda leaf: leaf[:length], done)

    return over


def _filled(leaf: jax.Array, more: int) -> jax.Array:
    return jnp.concatenate([leaf, jnp.repeat(leaf[-1:], more, axis=0)]) if more else leaf


def summed(tree: PyTree) -> PyTree:
    """The sum over all devices: one all-reduce for all leaves of a dtype."""
    leaves, treedef = jax.tree.flatten(tree)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        places = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat, unravel = ravel_pytree([leaves[i] for i in places])
        for i, total in zip(places, unravel(jax.lax.psum(flat, AXIS)), strict=True):
            leaves[i] = total
    return jax.tree.unflatten(treedef, leaves)


def spent_by_all(counts: Counts) -> Counts:
    """A device books what its own clients compute, and what the server does: the first is to be summed."""
    own = {entry: times for entry, times in counts.items() if entry.kind in ("call", "samples")}
    return counts | summed(own) if own else counts


def split_kept(state: PyTree) -> tuple[PyTree, PyTree]:
    """What clients keep, and all the rest, each with None in the place of the other."""

    def is_kept(leaf: Any) -> bool:
        return isinstance(leaf, Kept)

    return eqx.partition(state, jax.tree.map(is_kept, state, is_leaf=is_kept))
