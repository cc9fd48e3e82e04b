"""The simulator's cohort: client values are rows of arrays, computed all at once or chunk by chunk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from fedbilevel.engine.conditions.cohort import ConditionedCohort
from fedbilevel.fed.federation import answers
from fedbilevel.fed.ledger import Counts, as_arrays, book, metering
from fedbilevel.fed.place import At, Kept, Published
from fedbilevel.fed.program import Program
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree, nbytes, row, zeros_like

if TYPE_CHECKING:
    from fedbilevel.engine.simulator import SimulatedFederation


class SimulatedCohort(ConditionedCohort):
    """A cohort whose client values are stacked arrays.

    Attributes:
        places: which rows of the federation's arrays are those of its clients.
        held: how many rows a client value has here: one a client, unless other devices hold some.
    """

    def __init__(self, fed: SimulatedFederation, ids: jax.Array, token: str, weights: Any) -> None:
        self.fed, self.ids, self.token, self.weights = fed, ids, token, weights
        self.size = self.held = ids.shape[0]
        self.places = ids

    def _send(self, tree: PyTree) -> PyTree:
        # One copy for all: every client computes with the same value, which XLA can exploit.
        return jax.tree.map(jnp.asarray, tree)

    def _read_published(self, published: Published) -> tuple[PyTree, jax.Array, jax.Array]:
        new = ~published.holders[self.ids]
        self._arriving(nbytes(published.value), who=new)
        newcomers = jnp.sum(new).astype(jnp.int32)
        return self._send(published.value), published.holders.at[self.ids].set(True), newcomers

    def _deal(self, stacked: PyTree) -> PyTree:
        return self._here(jax.tree.map(jnp.asarray, stacked))

    def _here(self, stacked: PyTree) -> PyTree:
        """Of one row for each client of the cohort, those that are held here."""
        return stacked

    def _run(self, program: Program, values: tuple[At, ...], key: jax.Array, *, fails: bool) -> At:
        def one(place: jax.Array, id: jax.Array, own: tuple[PyTree, ...]) -> tuple[PyTree, Counts]:
            arguments = [v.value if not v.stacked else own[i] for i, v in enumerate(values)]
            with metering() as meter:
                me = Client(self.fed.problem, self.fed.clients, place, id, jax.random.fold_in(key, id))
                out = program(me, *arguments)
            return jax.tree.map(jnp.asarray, out), as_arrays(meter.counts)

        stacked = tuple(v.value if v.stacked else () for v in values)
        out, spent = self._each(one)(self.places, self._here(self.ids), stacked)
        present = self._present(values, key, self.fed.dropout if fails else 0.0)
        self._computed(spent, present)
        worked = self._worked(present)
        book({entry: jnp.sum(times * worked) for entry, times in spent.items()})
        return self._own(out, present=present)

    def _each(self, one: Callable[..., Any]) -> Callable[..., Any]:
        """`one` on every row that is held here."""
        chunk = self.fed.chunk
        return _each(one, None if chunk is not None and 1 < chunk >= self.held else chunk)

    def _worked(self, present: Any) -> jax.Array:
        """1 for a row whose work counts, 0 for that of a client that failed."""
        return jnp.ones(self.held, jnp.int32) if present is None else self._here(present).astype(jnp.int32)

    def _present(self, values: tuple[At, ...], key: jax.Array, dropout: float) -> Any:
        masks = [v.present for v in values if v.present is not None]
        had = functools.reduce(jnp.logical_and, masks) if masks else None
        return answers(key, self.ids, dropout, had)

    def _take(self, kept: Kept) -> PyTree:
        return row(kept.value, self.places)

    def _put(self, kept: Kept, value: At) -> Kept:
        rows = self._rows(value)
        if value.present is not None:
            rows = select(self._here(value.present), rows, row(kept.value, self.places))
        return Kept(jax.tree.map(lambda old, new: old.at[self.places].set(new), kept.value, rows))

    def _gather(self, value: At) -> tuple[PyTree, jax.Array]:
        rows = self._rows(value)
        if value.present is None:
            return rows, jnp.ones(self.size, bool)
        return select(self._here(value.present), rows, zeros_like(rows)), value.present

    def _push(self, value: At, weights: jax.Array) -> tuple[PyTree, int, jax.Array]:
        rows, senders = self._gather(value)
        heard = self._here(weights)
        mixed = jax.tree.map(
            lambda leaf: jnp.tensordot(heard.astype(leaf.dtype), leaf, axes=1), self._collected(rows)
        )
        return mixed, nbytes(row(rows, 0)), senders

    def _rows(self, value: At) -> PyTree:
        if value.stacked:
            return value.value
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.held, *leaf.shape)), value.value)


def _each(function: Callable[..., Any], chunk: int | None) -> Callable[..., Any]:
    """`function` on every row of its arguments: all at once, or in chunks."""
    if chunk is None:
        return jax.vmap(function)
    if chunk == 1:  # no batching rule at all: what convolutions on CPU want
        return lambda *rows: jax.lax.map(lambda r: function(*r), rows)
    return lambda *rows: jax.lax.map(lambda r: function(*r), rows, batch_size=chunk)


def select(mask: jax.Array, a: PyTree, b: PyTree) -> PyTree:
    """Row by row: that of `a` where the mask holds, else that of `b`."""

    def pick(p: jax.Array, q: jax.Array) -> jax.Array:
        return jnp.where(mask.reshape(-1, *(1,) * (p.ndim - 1)), p, q)

    return jax.tree.map(pick, a, b)
