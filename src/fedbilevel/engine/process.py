"""The process engine: every client is an operating-system process with only its own data."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing import Pipe
from typing import Any, Self

from fedbilevel.data.clients import Clients
from fedbilevel.engine.base import Engine, Session, Stepper, check_dropout
from fedbilevel.engine.configuration import (
    client_environment,
    configuration,
    main_script,
    refuse_inside_client,
)
from fedbilevel.engine.hurry import REMEMBERED, Exchanges, Hurried, check_deadline, too_late
from fedbilevel.engine.remote import RemoteFederation
from fedbilevel.engine.session import agree
from fedbilevel.problem.base import Problem


class Process(Engine):
    """Runs every client in its own process, over a checked wire: the reference for real networks.

    For POSIX systems. As a context manager it keeps its processes for several runs; else each run
    starts its own. Clients share what they compile, in JAX's compilation cache if it is on, else in a
    temporary folder.

        with fb.Process() as engine:
            fb.solve(problem, clients, algorithm, steps=20, engine=engine)

    Args:
        min_clients: fewer answers than this in an exchange are an error.
        timeout: seconds to wait for a client's answer before it is given up.
        deadline: seconds after which an exchange goes on without those who have not answered (as in
            `Simulator`). They finish what they were asked, and take part in the next one. In its first
            exchange a client compiles its programs, which takes time too.
        dropout: probability that a client does not answer after a local computation (as in `Simulator`).
        factory: an importable function that makes the problem; default: the problem's own functions
            are sent by name, so they must be importable themselves.
        worker: the module that a client's process runs.

    Attributes:
        exchanges: for each of the last exchanges how many seconds each client took, `{client: seconds}`; of
            one that is late, once it is done. `Link.measured` makes a simulated link of them.
    """

    def __init__(
        self,
        min_clients: int = 1,
        timeout: float = 600.0,
        dropout: float = 0.0,
        factory: Callable[[], Problem] | None = None,
        worker: str = "fedbilevel.engine.serve",
        deadline: float | None = None,
    ) -> None:
        check_dropout(dropout)
        if min_clients < 1 or timeout <= 0:
            raise ValueError(
                f"min_clients is {min_clients} and timeout is {timeout}; they must be at least 1 and above 0"
            )
        check_deadline(deadline)
        self.min_clients, self.timeout, self.dropout, self.deadline = min_clients, timeout, dropout, deadline
        self.exchanges: Exchanges = deque(maxlen=REMEMBERED)
        self.factory, self.worker = factory, worker
        self._pool: Pool | None = None

    def __enter__(self) -> Self:
        self._pool = Pool(self.worker, self.timeout)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    @contextlib.contextmanager
    def connect(
        self, problem: Problem, clients: Clients, stepper: Stepper, probes: Sequence[Stepper] = ()
    ) -> Iterator[Session]:
        refuse_inside_client()
        configure = configuration(problem, clients, stepper, probes, self.factory)
        with contextlib.ExitStack() as stack:
            pool = self._pool or stack.enter_context(contextlib.closing(Pool(self.worker, self.timeout)))
            pool.grow(clients.n)
            federation = RemoteFederation(
                pool, problem, clients, stepper, probes, min_clients=self.min_clients, dropout=self.dropout
            )
            agree(federation, configure)
            # An evaluation is of all clients, however late.
            with pool.hurried(lambda: None if federation.whole else self.deadline, self.exchanges):
                yield federation.compile(stepper)


_START = 120.0
"""Seconds that a new process has, at least, to import what it needs and answer for the first time."""


class Pool(Hurried):
    """Client processes and the connections to them."""

    def __init__(self, worker: str, timeout: float) -> None:
        super().__init__(timeout)
        self.worker = worker
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Any] = []
        self._threads = ThreadPoolExecutor(max_workers=1024)  # as many as there are clients, in fact
        self._cache = tempfile.TemporaryDirectory(prefix="fedbilevel-", ignore_cleanup_errors=True)
        self._starting: set[int] = set()
        self._talks: dict[int, Future[bytes]] = {}
        self._begun: dict[int, float] = {}

    @property
    def alive(self) -> set[int]:
        return {i for i, connection in enumerate(self.connections) if connection is not None}

    def grow(self, n: int) -> None:
        """Have exactly the clients `0..n−1`, starting those that are missing or dead."""
        for client, process in enumerate(self.processes):
            if client >= n or process.poll() is not None:
                self.drop(client)
        del self.processes[n:], self.connections[n:]
        for client in range(n):
            if client == len(self.processes):
                process, connection = self._start(client)
                self.processes.append(process)
                self.connections.append(connection)
            elif self.connections[client] is None:
                self.processes[client], self.connections[client] = self._start(client)

    def exchange(self, messages: dict[int, bytes], limit: int) -> dict[int, bytes | Exception]:
        """Send each client its message and wait for all replies, at most `limit` bytes each.

        A thread a client, so that one that does not read or write holds up nobody longer than `timeout`.
        """
        seconds: dict[int, float] = {}
        talks = {client: self._begin(client, message, limit, seconds) for client, message in messages.items()}
        timeout = max(self.timeout, _START) if self._starting & messages.keys() else self.timeout
        self._starting -= messages.keys()
        self._exchanges.append(seconds)
        deadline = self._deadline() or math.inf
        try:
            wait(talks.values(), min(timeout, deadline))
        finally:  # also when interrupted: a reply that nobody reads would be taken for the next one
            late = self._late(talks, timeout, deadline)
        replies = {c: late.get(c) or talk.exception() or talk.result() for c, talk in talks.items()}
        return {client: self._reply(client, reply) for client, reply in replies.items()}

    def _begin(self, client: int, message: bytes, limit: int, seconds: dict[int, float]) -> Future[bytes]:
        """A talk with a client, behind the last one if that is still going on; notes its time."""
        earlier, connection = self._talks.get(client), self.connections[client]

        def talk() -> bytes:
            wait([] if earlier is None else [earlier])
            self._begun[client] = time.monotonic()
            reply = _talk(connection, message, limit)
            seconds[client] = time.monotonic() - self._begun[client]
            return reply

        self._talks[client] = self._threads.submit(talk)
        return self._talks[client]

    def _late(
        self, talks: dict[int, Future[bytes]], timeout: float, deadline: float
    ) -> dict[int, TimeoutError]:
        """Who has not answered yet, and why: past the deadline it goes on, past the timeout it is dropped."""
        late = {}
        for client, talk in talks.items():
            if talk.done():
                del self._talks[client]
            elif deadline < math.inf and time.monotonic() - self._begun.get(client, math.inf) < timeout:
                late[client] = TimeoutError(too_late(deadline))
            else:
                self._give_up(client, talk)
                late[client] = TimeoutError(f"it did not answer within {timeout:g} s and was given up")
        return late

    def _give_up(self, client: int, talk: Future[bytes]) -> None:
        self.processes[client].kill()
        talk.exception()  # its thread sees the end of the process and ends too
        self.drop(client)

    def _reply(self, client: int, reply: Any) -> bytes | Exception:
        broken = isinstance(reply, EOFError | OSError) and not isinstance(reply, TimeoutError)
        return EOFError(f"its process ended with code {self.drop(client)}") if broken else reply

    def drop(self, client: int) -> int:
        """Give a client up: end its process and close the connection; returns the exit code."""
        process, connection = self.processes[client], self.connections[client]
        process.kill()
        code = process.wait()
        if connection is not None:
            connection.close()
        self.connections[client] = None
        self._talks.pop(client, None)
        return code

    def label(self, client: int) -> str:
        return f"client {client}"

    @property
    def behind(self) -> set[int]:
        return set()

    def peer(self, client: int) -> str:
        return ""  # its processes have no way to each other

    def close(self) -> None:
        """End all clients."""
        for client in range(len(self.connections)):
            self.drop(client)
        self._threads.shutdown()
        self._cache.cleanup()

    def _start(self, client: int) -> tuple[subprocess.Popen[bytes], Any]:
        """A new client: its end of a private pair of sockets is all that it gets."""
        self._starting.add(client)
        ours, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", self.worker, str(theirs.fileno()), *main_script()]
            own = client_environment(self._cache.name)
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=own)
        return process, ours


def _talk(connection: Any, message: bytes, limit: int) -> bytes:
    connection.send_bytes(message)
    return bytes(connection.recv_bytes(limit))
