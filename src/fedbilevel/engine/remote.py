"""A federation over a wire: commands are queued and sent when an answer is needed.

Shared by all network engines: one read-back (`mean`, `gather`, `push`) is exactly one round trip.
A client that fails is reported and left out of that mean; the run goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from fedbilevel.data.clients import Clients
from fedbilevel.engine.base import Session, Stepper, TooFewClientsError
from fedbilevel.engine.handle import Numbers, Queue, Ref, spec_of
from fedbilevel.engine.programs import programs_of
from fedbilevel.engine.remote_cohort import RemoteCohort
from fedbilevel.engine.reply import Reply, accepted
from fedbilevel.engine.session import RemoteSession
from fedbilevel.engine.wire import WireError, encode
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.federation import Federation, choose
from fedbilevel.fed.ledger import book, metering
from fedbilevel.fed.place import Kept, Published
from fedbilevel.fed.program import Program
from fedbilevel.problem.base import Problem
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree, nbytes, row

log = logging.getLogger("fedbilevel")


class Channel(Protocol):
    """How messages reach clients: what a network engine supplies."""

    def exchange(self, messages: dict[int, bytes], limit: int) -> dict[int, bytes | Exception]:
        """Send each client its message and wait for all replies of at most `limit` bytes."""

    @property
    def alive(self) -> set[int]:
        """The clients that can still be reached."""

    @property
    def behind(self) -> set[int]:
        """Those of them that are still busy with an earlier message."""

    def drop(self, client: int) -> Any:
        """Give a client up."""

    def label(self, client: int) -> str:
        """What a client is called in reports."""

    def peer(self, client: int) -> str:
        """What a client is called by its peers; "" where clients cannot reach each other."""

    @property
    def patience(self) -> float:
        """Seconds that an exchange waits for answers."""


class RemoteFederation(Federation):
    """Clients behind a channel."""

    def __init__(
        self,
        channel: Channel,
        problem: Problem,
        clients: Clients,
        stepper: Stepper,
        probes: Sequence[Stepper] = (),
        *,
        min_clients: int = 1,
        dropout: float = 0.0,
    ) -> None:
        self.channel, self.problem, self.n, self.weights = channel, problem, clients.n, clients.weights
        self.min_clients, self.dropout = min_clients, dropout
        self.example, self.whole = clients.only(0), False
        self._shapes: dict[Any, PyTree] = {}
        self.programs = programs_of(problem, self.example, self.n, stepper, probes, self.shapes)
        self.places = {jax.tree.structure(program): i for i, program in enumerate(self.programs)}
        self.queues = [Queue() for _ in range(self.n)]
        self.numbers = Numbers()
        self.failures: list[str] = []
        self.agreed: dict[Any, tuple[Ref, set[int], list[Any]]] = {}
        self.made = stepper.made()
        self._tokens, self.rounds = itertools.count(), itertools.count()

    # -------------------------------------------------------------- language

    @property
    def everyone(self) -> Cohort:
        return RemoteCohort(self, np.arange(self.n), "everyone")

    def _sample(self, key: jax.Array, size: int) -> Cohort:
        return RemoteCohort(self, np.asarray(choose(key, self.n, size)), f"sample {next(self._tokens)}")

    def publish(self, value: PyTree, label: str) -> Published:
        return Published(value, (self.numbers.new(spec_of(value)), frozenset()), label)

    def _keep(self, stacked: PyTree) -> Kept:
        ref = self.numbers.new(spec_of(row(stacked, 0)))
        for client in sorted(self.channel.alive):
            self.queues[client].put(ref, row(stacked, client))
        return Kept(ref)

    def stacked(self, kept: Kept) -> PyTree:
        """Every client's kept value as rows; NaN for a client that is gone."""
        with self.on_all_data():  # for a result or a checkpoint: of all clients, however late
            rows, present = self.read(np.arange(self.n), kept.value, None)
        if present.all():
            return rows
        return jax.tree.map(lambda leaf: leaf.at[~present].set(jnp.nan), rows)

    def compile(self, algorithm: Stepper) -> Session:
        return RemoteSession(self, algorithm)

    def loop(self, times: Any, body: Callable[[Any, PyTree], PyTree], carry: PyTree) -> PyTree:
        for index in range(int(times)):
            carry = body(index, carry)
        return carry

    @contextlib.contextmanager
    def on_all_data(self) -> Iterator[None]:
        """Inside, clients compute on all of their samples in the place of minibatches, and none drops out."""
        self.whole = True
        try:
            yield
        finally:
            self.whole = False

    # --------------------------------------------------------------- traffic

    def read(self, ids: Iterable[int], ref: Ref, had: Any) -> tuple[PyTree, npt.NDArray[Any]]:
        """The value of `ref` at each client, stacked, and who answered: one round trip."""
        ids = [int(i) for i in ids]
        asked = [i for k, i in enumerate(ids) if (had is None or had[k]) and i in self.channel.alive]
        values = self.values(asked, ref)
        if len(values) < self.min_clients:
            raise TooFewClientsError(
                f"{len(values)} of {len(ids)} clients answered, and min_clients is {self.min_clients}. "
                f"Last reports: {'; '.join(self.failures[-3:]) or 'none'}"
            )
        nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), ref.spec)
        rows = [values.get(i, nothing) for i in ids]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows), np.array([i in values for i in ids])

    def values(self, asked: Iterable[int], ref: Ref) -> dict[int, PyTree]:
        """The values of `ref` at those of the clients that answer: one round trip."""
        asked = list(asked)
        for client in asked:
            self.queues[client].add("get", ref.address)
        return self._accepted(self.flush(asked, nbytes(ref.spec), ref.origin), ref)

    def _accepted(self, replies: dict[int, Reply], ref: Ref) -> dict[int, PyTree]:
        """The values that may enter a mean; whoever sent another one is reported."""
        values, refused = accepted({c: partial(reply.value, ref.spec) for c, reply in replies.items()})
        for client, reason in refused.items():
            self.report(client, reason, ref.origin)
        return values

    def flush(self, ids: Iterable[int], expected: int = 0, origin: str = "") -> dict[int, Reply]:
        """Send the queues of these clients and wait; books what their programs spent."""
        unused = self.numbers.unused()
        for client in self.channel.alive if unused else ():
            self.queues[client].add("free", unused)
        messages = {}
        for client in ids:
            queue, self.queues[client] = self.queues[client], Queue()
            messages[client] = encode({"commands": queue.commands}, queue.arrays)
        replies = {}
        for client, message in self.channel.exchange(messages, (1 << 20) + 2 * expected).items():
            try:
                replies[client] = Reply(message)
                book(replies[client].spent)
            except WireError as error:
                self.report(client, str(error), origin)
        return replies

    def finish(self) -> None:
        """Deferred local work belongs to the step that asked for it."""
        late = [i for i in sorted(self.channel.alive) if self.queues[i].has_work]
        if late:
            self.flush(late)

    def report(self, client: int, reason: str, origin: str = "") -> None:
        """Note that a client failed, and what it was asked for; it is left out of the current mean."""
        line = f"{self.channel.label(client)}: {reason}" + (f" (asked for {origin})" if origin else "")
        self.failures.append(line)
        log.warning("%s", line)

    def shapes(self, program: Program, arguments: list[PyTree]) -> PyTree:
        """The shapes of what a program returns, found without running it."""
        leaves = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arguments))
        spot = (jax.tree.structure(program), jax.tree.structure(arguments), leaves, self.whole)
        if spot not in self._shapes:

            def call(clients: Clients, key: jax.Array, *values: PyTree) -> PyTree:
                with metering():
                    out = program(Client(self.problem, clients, 0, 0, key), *values)
                return jax.tree.map(jnp.asarray, out)

            example = self.example.whole() if self.whole else self.example
            self._shapes[spot] = jax.eval_shape(call, example, jax.random.key(0), *arguments)
        return self._shapes[spot]
