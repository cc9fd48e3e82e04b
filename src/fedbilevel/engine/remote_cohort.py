"""The cohort of a network engine: client values are handles of what the clients hold, verbs are commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from fedbilevel.engine.handle import Queue, Ref, spec_of
from fedbilevel.engine.peers import push_directly
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.federation import answers
from fedbilevel.fed.place import At, Kept, Published
from fedbilevel.fed.program import Program, ProgramError
from fedbilevel.tree import PyTree, nbytes, row

if TYPE_CHECKING:
    from fedbilevel.engine.remote import RemoteFederation

_AGREED = 16
"""How many values that everybody could make by itself are remembered, so as not to be sent again."""


class RemoteCohort(Cohort):
    """A cohort whose client values are handles of what the clients hold."""

    def __init__(self, fed: RemoteFederation, ids: npt.NDArray[Any], token: str) -> None:
        self.fed, self.ids, self.token, self.size = fed, ids, token, len(ids)
        self.weights = None if fed.weights is None else fed.weights[ids]

    @property
    def reached(self) -> int:
        return sum(int(i) in self.fed.channel.alive for i in self.ids)

    def _queues(self, who: Any = None) -> list[tuple[int, Queue]]:
        """The queues of those who can be reached, with their places in the cohort."""
        chosen = range(self.size) if who is None else np.flatnonzero(who)
        alive = self.fed.channel.alive
        return [(int(k), self.fed.queues[self.ids[k]]) for k in chosen if int(self.ids[k]) in alive]

    def _send(self, tree: PyTree) -> Ref:
        ref = self.fed.numbers.new(spec_of(tree))
        for _, queue in self._queues():
            queue.put(ref, tree)
        return ref

    def _agreed(self, tree: PyTree) -> Ref:
        # Sent once to each client, however often it is used: the same arrays are the same value.
        spot = _spot(tree)
        ref, holders, _ = self.fed.agreed.setdefault(
            spot, (self.fed.numbers.new(spec_of(tree)), set(), jax.tree.leaves(tree))
        )
        while len(self.fed.agreed) > _AGREED:  # what a method makes anew in every round is not kept for ever
            del self.fed.agreed[next(iter(self.fed.agreed))]
        made = spot == _spot(self.fed.made)
        for place, queue in self._queues(np.array([int(i) not in holders for i in self.ids])):
            queue.add("make", ref.number) if made else queue.put(ref, tree)
            holders.add(int(self.ids[place]))
        return ref

    def _read_published(self, published: Published) -> tuple[Ref, Any, int]:
        ref, holders = published.holders
        new = np.array([int(i) not in holders for i in self.ids])
        queues = self._queues(new)
        for _, queue in queues:
            queue.put(ref, published.value)
        return ref, (ref, holders | {int(i) for i in self.ids}), len(queues)

    def _deal(self, stacked: PyTree) -> Ref:
        ref = self.fed.numbers.new(spec_of(row(stacked, 0)))
        for place, queue in self._queues():
            queue.put(ref, row(stacked, place))
        return ref

    def _run(self, program: Program, values: tuple[At, ...], key: jax.Array, *, fails: bool) -> At:
        shapes = self.fed.shapes(program, [v.value.spec for v in values])
        ref = self.fed.numbers.new(shapes, f"the result of {type(program).__name__}")
        masks = [np.asarray(v.present) for v in values if v.present is not None]
        had = np.logical_and.reduce(masks) if masks else None
        present = answers(
            key, jnp.asarray(self.ids), self.fed.dropout if fails and not self.fed.whole else 0.0, had
        )
        settings, key_data = jax.tree.leaves(program), jax.random.key_data(key)
        place, addresses = self._place(program), [v.value.address for v in values]
        for _, queue in self._queues(present):
            # A Python number stays one: it takes the dtype of what it is multiplied with.
            leaves = [s if isinstance(s, int | float) else {"array": queue.array(s)} for s in settings]
            queue.add("run", ref.number, place, leaves, queue.array(key_data), addresses, self.fed.whole)
        return self._own(ref, present=present)

    def _place(self, program: Program) -> int:
        """Where a program stands in the list that server and clients agreed on."""
        place = self.fed.places.get(jax.tree.structure(program))
        if place is None:
            raise ProgramError(
                f"{program!r} is not among the programs that the clients agreed to. An algorithm must run "
                "the same programs, with the same static settings, in every step: they are found by "
                "tracing one step."
            )
        return place

    def _take(self, kept: Kept) -> Ref:
        return kept.value

    def _put(self, kept: Kept, value: At) -> Kept:
        ref = self.fed.numbers.new(kept.value.spec, value.value.origin)
        mine = {int(i) for k, i in enumerate(self.ids) if value.present is None or value.present[k]}
        for client in sorted(self.fed.channel.alive):
            new = value.value if client in mine else kept.value
            self.fed.queues[client].add("keep", ref.number, new.address, kept.value.address)
        return Kept(ref)

    def _gather(self, value: At) -> tuple[PyTree, jax.Array]:
        rows, answered = self.fed.read(self.ids, value.value, value.present)
        return rows, jnp.asarray(answered)

    def _push(self, value: At, weights: jax.Array) -> tuple[Ref, int, Any]:
        if self.fed.channel.peer(0):
            ref, senders = push_directly(self, value, weights)
            return ref, nbytes(value.value.spec), senders
        # The server relays: it reads every value and deals every client its mixture.
        rows, senders = self.fed.read(self.ids, value.value, value.present)
        mixed = jax.tree.map(lambda leaf: jnp.tensordot(weights.astype(leaf.dtype), leaf, axes=1), rows)
        return self._deal(mixed), nbytes(value.value.spec), senders


def _spot(tree: PyTree) -> tuple[Any, ...]:
    """Which arrays a tree is made of: those very ones, not such as equal them."""
    return jax.tree.structure(tree), tuple(map(id, jax.tree.leaves(tree)))
