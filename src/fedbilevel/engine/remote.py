"""A federation over a wire: commands are queued and sent when an answer is needed.

Shared by all network engines: one read-back (`mean`, `gather`, `push`) is exactly one round trip.
A client that fails is reported and left out of that mean; the run goes on.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.data.clients import Clients
from fedbilevel.engine.base import Block, Session, Stepper
from fedbilevel.engine.programs import names, programs_of
from fedbilevel.engine.wire import WireError, decode, encode
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.federation import Federation, answers, choose
from fedbilevel.fed.ledger import ORACLES, Counts, Entry, book, metering
from fedbilevel.fed.place import At, Kept, Published, map_kept
from fedbilevel.fed.program import Program, ProgramError
from fedbilevel.portable import Array, Json, pack
from fedbilevel.problem.base import Problem
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree, all_finite, nbytes, row

log = logging.getLogger("fedbilevel")


class TooFewClientsError(RuntimeError):
    """Not enough clients answered for the run to go on."""


class Channel(Protocol):
    """How messages reach clients: what a network engine supplies."""

    def exchange(self, messages: dict[int, bytes], limit: int) -> dict[int, bytes | Exception]:
        """Send each client its message and wait for all replies of at most `limit` bytes."""

    @property
    def alive(self) -> set[int]:
        """The clients that can still be reached."""


class Ref:
    """A value that stays on the clients: its number there, a path into it, its shapes."""

    def __init__(self, root: Any, path: tuple[Any, ...], spec: PyTree) -> None:
        self.root, self.path, self.spec = root, path, spec

    def __getitem__(self, part: Any) -> Ref:
        return Ref(self.root, (*self.path, part), self.spec[part])

    @property
    def address(self) -> Json:
        return [self.root.number, list(self.path)]


class _Root:
    """Owns a number in the clients' stores; when the last `Ref` is gone the clients may forget it."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Queue:
    """Commands for one client, with the arrays that they refer to."""

    def __init__(self) -> None:
        self.commands: list[Json] = []
        self.arrays: list[Array] = []

    def add(self, verb: str, *content: Json) -> None:
        self.commands.append([verb, *content])

    def array(self, value: Any) -> int:
        self.arrays.append(np.asarray(value))
        return len(self.arrays) - 1

    def put(self, number: int, tree: PyTree) -> None:
        structure, arrays = pack(tree)
        self.add("put", number, _shifted(structure, len(self.arrays)))
        self.arrays.extend(arrays)


class RemoteFederation(Federation):
    """Clients behind a channel."""

    def __init__(
        self,
        channel: Channel,
        problem: Problem,
        clients: Clients,
        stepper: Stepper,
        *,
        min_clients: int = 1,
        dropout: float = 0.0,
    ) -> None:
        self.channel, self.problem, self.n, self.weights = channel, problem, clients.n, clients.weights
        self.min_clients, self.dropout = min_clients, dropout
        self.example = clients.only(0)
        self.programs = programs_of(problem, self.example, self.n, stepper)
        self.places = {jax.tree.structure(program): i for i, program in enumerate(self.programs)}
        self.queues = [_Queue() for _ in range(self.n)]
        self.failures: list[str] = []
        self._numbers, self._tokens = itertools.count(), itertools.count()
        self._forgotten: list[int] = []
        self._shapes: dict[Any, PyTree] = {}

    # -------------------------------------------------------------- language

    @property
    def everyone(self) -> Cohort:
        return RemoteCohort(self, np.arange(self.n), "everyone")

    def sample(self, key: jax.Array, size: int) -> Cohort:
        return RemoteCohort(self, np.asarray(choose(key, self.n, size)), f"sample {next(self._tokens)}")

    def publish(self, value: PyTree, label: str) -> Published:
        return Published(value, (self.new_ref(_spec(value)), frozenset()), label)

    def keep(self, stacked: PyTree) -> Kept:
        ref = self.new_ref(jax.eval_shape(lambda: row(stacked, 0)))
        for client, queue in enumerate(self.queues):
            queue.put(ref.root.number, row(stacked, client))
        return Kept(ref)

    def stacked(self, kept: Kept) -> PyTree:
        rows, present = self.read(np.arange(self.n), kept.value, None)
        if present.all():
            return rows
        return jax.tree.map(lambda leaf: leaf.at[~present].set(jnp.nan), rows)

    def loop(self, times: Any, body: Callable[[Any, PyTree], PyTree], carry: PyTree) -> PyTree:
        for index in range(int(times)):
            carry = body(index, carry)
        return carry

    # --------------------------------------------------------------- traffic

    def new_ref(self, spec: PyTree) -> Ref:
        """A new number in the clients' stores."""
        root = _Root(next(self._numbers))
        weakref.finalize(root, self._forgotten.append, root.number)
        return Ref(root, (), spec)

    def read(self, ids: Iterable[int], ref: Ref, had: Any) -> tuple[PyTree, np.ndarray[Any, Any]]:
        """The value of `ref` at each client, stacked, and who answered: one round trip."""
        ids = [int(i) for i in ids]
        asked = [i for k, i in enumerate(ids) if (had is None or had[k]) and i in self.channel.alive]
        for client in asked:
            self.queues[client].add("get", ref.address)
        replies = self.flush(asked, nbytes(ref.spec))
        values = {i: self._checked(i, reply, ref.spec) for i, reply in replies.items()}
        finite = {i: v for i, v in values.items() if v is not None and bool(all_finite(v))}
        if not finite and any(v is not None for v in values.values()):
            finite = {i: v for i, v in values.items() if v is not None}  # nobody's is finite: it diverged
        else:
            for client in sorted({i for i, v in values.items() if v is not None} - set(finite)):
                self.report(client, "its answer holds a NaN or an infinity")
        if len(finite) < self.min_clients:
            raise TooFewClientsError(self._too_few(len(finite), len(ids)))
        nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), ref.spec)
        rows = [finite.get(i, nothing) for i in ids]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows), np.array([i in finite for i in ids])

    def flush(self, ids: Iterable[int], expected: int = 0) -> dict[int, tuple[Json, list[Array]]]:
        """Send the queues of these clients and wait; books what their programs spent."""
        forgotten, self._forgotten[:] = list(self._forgotten), []
        messages = {}
        for queue in self.queues if forgotten else ():
            queue.add("free", forgotten)
        for client in ids:
            queue, self.queues[client] = self.queues[client], _Queue()
            messages[client] = encode({"commands": queue.commands}, queue.arrays)
        replies = {}
        for client, reply in self.channel.exchange(messages, _limit(expected)).items():
            try:
                replies[client] = _decoded(reply)
            except (WireError, OSError, EOFError) as error:
                self.report(client, f"{error}")
        for body, _ in replies.values():
            book({Entry(*entry): times for *entry, times in body["spent"]})
        return replies

    def flush_all(self) -> None:
        """Deferred local work belongs to the step that asked for it."""
        late = [i for i in sorted(self.channel.alive) if self.queues[i].commands]
        if late:
            self.flush(late)

    def report(self, client: int, reason: str) -> None:
        """Note that a client failed; it is left out of the current mean."""
        line = f"client {client}: {reason}"
        self.failures.append(line)
        log.warning("%s", line)

    def shapes(self, program: Program, arguments: list[PyTree]) -> PyTree:
        """The shapes of what a program returns, found without running it."""
        spot = (jax.tree.structure(program), jax.tree.structure(arguments), *map(str, jax.tree.leaves(arguments)))
        if spot not in self._shapes:

            def call(clients: Clients, key: jax.Array, *values: PyTree) -> PyTree:
                with metering():
                    out = program(Client(self.problem, clients, 0, 0, key), *values)
                return jax.tree.map(jnp.asarray, out)

            self._shapes[spot] = jax.eval_shape(call, self.example, jax.random.key(0), *arguments)
        return self._shapes[spot]

    def _checked(self, client: int, reply: tuple[Json, list[Array]], spec: PyTree) -> PyTree | None:
        """A client's answer to the last `get`, if it is of the right shapes and dtypes."""
        body, arrays = reply
        try:
            answer = body["answers"][-1]
            if "broken" in answer:
                raise WireError(str(answer["broken"]))
            leaves = [arrays[int(i)] for i in answer["leaves"]]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            self.report(client, str(error) if isinstance(error, WireError) else f"its answer is incomplete: {error!r}")
            return None
        expected, treedef = jax.tree.flatten(spec)
        seen = [(leaf.shape, leaf.dtype) for leaf in leaves]
        if seen != [(leaf.shape, leaf.dtype) for leaf in expected]:
            self.report(client, f"it answered with shapes and dtypes {seen}, expected {expected}")
            return None
        return jax.tree.unflatten(treedef, leaves)

    def _too_few(self, answered: int, asked: int) -> str:
        return (
            f"{answered} of {asked} clients answered, and min_clients is {self.min_clients}. Last reports: "
            + "; ".join(self.failures[-3:])
        )


class RemoteCohort(Cohort):
    """A cohort whose client values are handles of what the clients hold."""

    def __init__(self, fed: RemoteFederation, ids: np.ndarray[Any, Any], token: str) -> None:
        self.fed, self.ids, self.token, self.size = fed, ids, token, len(ids)
        self.weights = None if fed.weights is None else fed.weights[ids]

    def _queues(self, who: Any = None) -> list[tuple[int, _Queue]]:
        """The queues of those who can be reached, with their places in the cohort."""
        chosen = range(self.size) if who is None else np.flatnonzero(who)
        alive = self.fed.channel.alive
        return [(int(k), self.fed.queues[self.ids[k]]) for k in chosen if int(self.ids[k]) in alive]

    def _send(self, tree: PyTree) -> Ref:
        ref = self.fed.new_ref(_spec(tree))
        for _, queue in self._queues():
            queue.put(ref.root.number, tree)
        return ref

    def _read_published(self, published: Published) -> tuple[Ref, Any, int]:
        ref, holders = published.holders
        new = np.array([int(i) not in holders for i in self.ids])
        for _, queue in self._queues(new):
            queue.put(ref.root.number, published.value)
        return ref, (ref, holders | {int(i) for i in self.ids}), int(new.sum())

    def _deal(self, stacked: PyTree) -> Ref:
        ref = self.fed.new_ref(jax.eval_shape(lambda: jax.tree.map(jnp.asarray, row(stacked, 0))))
        for place, queue in self._queues():
            queue.put(ref.root.number, row(stacked, place))
        return ref

    def _run(self, program: Program, values: tuple[At, ...], key: jax.Array) -> At:
        place = self.fed.places.get(jax.tree.structure(program))
        if place is None:
            raise ProgramError(
                f"{program!r} is not among the programs that the clients agreed to. An algorithm must run the "
                "same programs, with the same static settings, in every step: they are found by tracing one step."
            )
        ref = self.fed.new_ref(self.fed.shapes(program, [v.value.spec for v in values]))
        masks = [np.asarray(v.present) for v in values if v.present is not None]
        had = np.logical_and.reduce(masks) if masks else None
        present = answers(key, jnp.asarray(self.ids), self.fed.dropout, had)
        settings, key_data = jax.tree.leaves(program), jax.random.key_data(key)
        for _, queue in self._queues(present):
            leaves = [queue.array(leaf) for leaf in settings]
            addresses = [v.value.address for v in values]
            queue.add("run", ref.root.number, place, leaves, queue.array(key_data), addresses)
        return self._own(ref, present=present)

    def _take(self, kept: Kept) -> Ref:
        return kept.value  # type: ignore[no-any-return]

    def _put(self, kept: Kept, value: At) -> Kept:
        ref = self.fed.new_ref(kept.value.spec)
        mine = {int(i) for k, i in enumerate(self.ids) if value.present is None or value.present[k]}
        for client in sorted(self.fed.channel.alive):
            new = value.value if client in mine else kept.value
            self.fed.queues[client].add("keep", ref.root.number, new.address, kept.value.address)
        return Kept(ref)

    def _gather(self, value: At) -> tuple[PyTree, jax.Array]:
        rows, answered = self.fed.read(self.ids, value.value, value.present)
        return rows, jnp.asarray(answered)

    def _push(self, value: At, weights: jax.Array) -> tuple[Ref, int]:
        # The server relays: it reads every value and deals every client its mixture.
        rows, _ = self.fed.read(self.ids, value.value, value.present)
        mixed = jax.tree.map(lambda leaf: jnp.tensordot(weights.astype(leaf.dtype), leaf, axes=1), rows)
        return self._deal(mixed), nbytes(value.value.spec)


class RemoteSession(Session):
    """An algorithm over a wire: the server runs eagerly, the clients their compiled programs."""

    def __init__(self, federation: RemoteFederation, stepper: Stepper) -> None:
        self.federation: RemoteFederation = federation
        self.stepper = stepper

    @property
    def failures(self) -> list[str]:
        return self.federation.failures

    def init(self, key: jax.Array) -> tuple[PyTree, Counts]:
        return self._metered(lambda: self.stepper.at(0).init(self.federation, key))

    def advance(self, state: PyTree, key: jax.Array, first: int, steps: int, capacity: int) -> Block:
        records: list[tuple[Any, Counts]] = []
        for time in range(first, first + steps):
            own = jax.random.fold_in(key, time)
            (new, info), counts = self._metered(
                lambda own=own, time=time: self.stepper.at(time).step(self.federation, state, own)
            )
            records.append((info, counts))
            if not bool(all_finite(map_kept(lambda _: (), new))):
                return _block(state, len(records) - 1, False, records)
            state = new
        return _block(state, len(records), True, records)

    def _metered(self, work: Callable[[], PyTree]) -> tuple[PyTree, Counts]:
        with metering() as meter:
            out = work()
            self.federation.flush_all()
        return out, meter.counts


def agree(federation: RemoteFederation, configure: Callable[[int], bytes]) -> None:
    """Configure every client and compare what it will run with what the server will ask for."""
    messages = {i: configure(i) for i in sorted(federation.channel.alive)}
    expected = names(federation.programs)
    for client, reply in federation.channel.exchange(messages, _limit(1 << 20)).items():
        body, _ = _decoded(reply)
        if "error" in body:
            raise RuntimeError(f"client {client} could not be set up: {body['error']}")
        if body["programs"] != expected:
            raise RuntimeError(
                f"client {client} has other programs than the server: {body['programs']} against {expected}; "
                "both need the same version of the algorithm"
            )


def _block(state: PyTree, done: int, finite: bool, records: list[tuple[Any, Counts]]) -> Block:
    info = {name: np.array([np.asarray(i[name]) for i, _ in records]) for name in (records[0][0] if records else ())}
    entries = {entry for _, counts in records for entry in counts}
    counts = {e: np.array([int(c.get(e, 0)) for _, c in records], np.int64) for e in sorted(entries)}
    return Block(state, done, finite, info, counts)


def _decoded(reply: bytes | Exception) -> tuple[Json, list[Array]]:
    if isinstance(reply, Exception):
        raise WireError(str(reply) or type(reply).__name__) from reply
    try:
        body, arrays = decode(reply)
        spent = body.get("spent", [])
        known = all(
            kind in ("call", "samples") and label in (*ORACLES, "") and unit == 1 and isinstance(times, int) and times >= 0
            for kind, label, unit, times in spent
        )
    except (WireError, AttributeError, TypeError, ValueError) as error:
        raise WireError(f"it sent a message that cannot be read: {error}") from None
    if not known:
        raise WireError("it sent a bill that cannot be right")
    return body, arrays


def _limit(expected: int) -> int:
    return (1 << 20) + 2 * expected


def _spec(tree: PyTree) -> PyTree:
    return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, tree))


def _shifted(structure: Json, by: int) -> Json:
    """A packed structure whose arrays come behind `by` others."""
    if isinstance(structure, list):
        return [_shifted(item, by) for item in structure]
    if not isinstance(structure, dict):
        return structure
    (tag, content), = structure.items()
    return {tag: content + by} if tag == "array" else {tag: _shifted(content, by)}
