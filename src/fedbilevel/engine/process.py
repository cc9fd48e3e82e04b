"""The process engine: every client is an operating-system process with only its own data."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing import Pipe
from typing import Any, Self

import jax.numpy as jnp

from fedbilevel.data.clients import Clients
from fedbilevel.engine.base import Engine, Session, Stepper, check_dropout
from fedbilevel.engine.remote import RemoteFederation
from fedbilevel.engine.session import agree
from fedbilevel.engine.wire import encode
from fedbilevel.portable import PortableError, name_of, pack
from fedbilevel.problem.base import Problem


class Process(Engine):
    """Runs every client in its own process, over a checked wire: the reference for real networks.

    For POSIX systems. As a context manager it keeps its processes for several runs; else each run
    starts its own.

        with fb.Process() as engine:
            fb.solve(problem, clients, algorithm, steps=20, engine=engine)

    Args:
        min_clients: fewer answers than this in an exchange are an error.
        timeout: seconds to wait for a client's answer before it is given up.
        dropout: probability that a client does not answer after a local computation (as in `Simulator`).
        factory: an importable function that makes the problem; default: the problem's own functions
            are sent by name, so they must be importable themselves.
        worker: the module that a client's process runs.
    """

    def __init__(
        self,
        min_clients: int = 1,
        timeout: float = 600.0,
        dropout: float = 0.0,
        factory: Callable[[], Problem] | None = None,
        worker: str = "fedbilevel.engine.worker",
    ) -> None:
        check_dropout(dropout)
        if min_clients < 1 or timeout <= 0:
            raise ValueError(
                f"min_clients is {min_clients} and timeout is {timeout}; they must be at least 1 and above 0"
            )
        self.min_clients, self.timeout, self.dropout = min_clients, timeout, dropout
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
        if _INSIDE in os.environ:
            raise RuntimeError(
                "this is a client's process, which must not start clients of its own. It runs your script to "
                "find the functions that the script defines: put what should run once, such as the call of "
                "`solve`, under `if __name__ == '__main__':`."
            )
        configure = self._configuration(problem, clients, stepper, probes)
        with contextlib.ExitStack() as stack:
            pool = self._pool or stack.enter_context(contextlib.closing(Pool(self.worker, self.timeout)))
            pool.grow(clients.n)
            federation = RemoteFederation(
                pool, problem, clients, stepper, probes, min_clients=self.min_clients, dropout=self.dropout
            )
            agree(federation, configure)
            yield federation.compile(stepper)

    def _configuration(
        self, problem: Problem, clients: Clients, stepper: Stepper, probes: Sequence[Stepper]
    ) -> Callable[[int], bytes]:
        """The message that sets a client up; made here first, so that a mistake shows before any start."""
        if self.factory is not None:
            name_of(self.factory)
        common = {
            "problem": self.factory or _without_metrics(problem),
            "algorithm": stepper.at(0),  # schedules stay with the server, which sends their values
            "probes": list(probes),
            "n": clients.n,
            "x64": jnp.result_type(float) == jnp.float64,
        }
        if "'__main__:" in str(pack(common)[0]) and not _main_script():
            raise PortableError(
                "a function or class of a notebook or prompt cannot be found by a client's process: "
                "put it into a module and import it from there"
            )
        return lambda id: encode(*_configure(common | {"clients": clients.only(id), "id": id}))


_START = 120.0
"""Seconds that a new process has, at least, to import what it needs and answer for the first time."""


class Pool:
    """Client processes and the connections to them."""

    def __init__(self, worker: str, timeout: float) -> None:
        self.worker, self.timeout = worker, timeout
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Any] = []
        self._threads = ThreadPoolExecutor(max_workers=1024)  # as many as there are clients, in fact
        self._starting: set[int] = set()

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
        talks = {c: self._threads.submit(_talk, self.connections[c], m, limit) for c, m in messages.items()}
        timeout = max(self.timeout, _START) if self._starting & messages.keys() else self.timeout
        self._starting -= messages.keys()
        try:
            wait(talks.values(), timeout)
        finally:  # also when interrupted: a reply that nobody reads would be taken for the next one
            late = self._give_up(talks)
        replies = {client: talk.exception() or talk.result() for client, talk in talks.items()}
        too_late = TimeoutError(f"it did not answer within {timeout:g} s and was given up")
        replies |= dict.fromkeys(late, too_late)
        return {client: self._reply(client, reply) for client, reply in replies.items()}

    def _give_up(self, talks: dict[int, Future[bytes]]) -> list[int]:
        """Drop the clients that have not answered yet."""
        late = [client for client, talk in talks.items() if not talk.done()]
        for client in late:
            self.processes[client].kill()
            talks[client].exception()  # its thread sees the end of the process and ends too
            self.drop(client)
        return late

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
        return code

    def close(self) -> None:
        """End all clients."""
        for client in range(len(self.connections)):
            self.drop(client)
        self._threads.shutdown()

    def _start(self, client: int) -> tuple[subprocess.Popen[bytes], Any]:
        """A new client: its end of a private pair of sockets is all that it gets."""
        self._starting.add(client)
        ours, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", self.worker, str(theirs.fileno()), *_main_script()]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=_environment())
        return process, ours


def _talk(connection: Any, message: bytes, limit: int) -> bytes:
    connection.send_bytes(message)
    return bytes(connection.recv_bytes(limit))


def _configure(content: dict[str, Any]) -> tuple[Any, list[Any]]:
    structure, arrays = pack(content)
    return {"configure": structure}, arrays


def _without_metrics(problem: Problem) -> Problem:
    """Metrics are the server's business, and may be lambdas."""
    return dataclasses.replace(problem, metrics={})


def _environment() -> dict[str, str]:
    """Clients find the modules that the server finds, and share the machine's cores."""
    own = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    if "XLA_FLAGS" not in os.environ:
        own["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    return dict(os.environ) | own | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", _INSIDE: "1"}


_INSIDE = "FEDBILEVEL_CLIENT_PROCESS"
"""Set in the environment of clients' processes."""


def _main_script() -> list[str]:
    """Where a client finds what the program itself defines, named `__main__:...`; nothing for a prompt."""
    main = sys.modules.get("__main__")
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return ["-m", spec.name]
    return [path] if path else []
