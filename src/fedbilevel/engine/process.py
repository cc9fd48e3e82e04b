"""The process engine: every client is an operating-system process with only its own data."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any, Self

import jax.numpy as jnp

from fedbilevel.data.clients import Clients
from fedbilevel.engine.base import Engine, Session, Stepper
from fedbilevel.engine.remote import RemoteFederation
from fedbilevel.engine.session import RemoteSession, agree
from fedbilevel.engine.wire import encode
from fedbilevel.portable import name_of, pack
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
    def connect(self, problem: Problem, clients: Clients, stepper: Stepper) -> Iterator[Session]:
        configure = self._configuration(problem, clients, stepper)
        with contextlib.ExitStack() as stack:
            pool = self._pool or stack.enter_context(contextlib.closing(Pool(self.worker, self.timeout)))
            pool.grow(clients.n)
            federation = RemoteFederation(
                pool, problem, clients, stepper, min_clients=self.min_clients, dropout=self.dropout
            )
            agree(federation, configure)
            yield RemoteSession(federation, stepper)

    def _configuration(self, problem: Problem, clients: Clients, stepper: Stepper) -> Callable[[int], bytes]:
        """The message that sets a client up; made here first, so that a mistake shows before any start."""
        if self.factory is not None:
            name_of(self.factory)
        common = {
            "problem": self.factory or _without_metrics(problem),
            "algorithm": stepper.at(0),  # schedules stay with the server, which sends their values
            "n": clients.n,
            "x64": jnp.result_type(float) == jnp.float64,
        }
        pack(common)
        return lambda id: encode(*_configure(common | {"clients": clients.only(id), "id": id}))


class Pool:
    """Client processes and the connections to them."""

    def __init__(self, worker: str, timeout: float) -> None:
        self.worker, self.timeout = worker, timeout
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Any] = []

    @property
    def alive(self) -> set[int]:
        return {i for i, connection in enumerate(self.connections) if connection is not None}

    def grow(self, n: int) -> None:
        """Have exactly the clients `0..n−1`, starting those that are missing or dead."""
        for client in range(n, len(self.connections)):
            self.drop(client)
        del self.processes[n:], self.connections[n:]
        for client in range(n):
            if client == len(self.processes):
                process, connection = self._start()
                self.processes.append(process)
                self.connections.append(connection)
            elif self.connections[client] is None:
                self.processes[client], self.connections[client] = self._start()

    def exchange(self, messages: dict[int, bytes], limit: int) -> dict[int, bytes | Exception]:
        """Send each client its message and wait for all replies, at most `limit` bytes each."""
        replies: dict[int, bytes | Exception] = {}
        waiting: dict[Any, int] = {}
        for client, message in messages.items():
            connection = self.connections[client]
            try:
                assert connection is not None
                connection.send_bytes(message)
                waiting[connection] = client
            except OSError as error:
                replies[client] = self.drop(client, error)
        deadline = time.monotonic() + self.timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = TimeoutError(f"it did not answer within {self.timeout:g} s and was given up")
                replies |= {client: self.drop(client, late) for client in waiting.values()}
                break
            for connection in ready:
                client = waiting.pop(connection)
                replies[client] = self._receive(client, connection, limit)
        return dict(sorted(replies.items()))

    def drop(self, client: int, error: Exception | None = None) -> Exception:
        """Give a client up: close its connection and end its process."""
        connection, self.connections[client] = self.connections[client], None
        if connection is not None:
            connection.close()
        process = self.processes[client]
        process.kill()
        code = process.wait()
        if isinstance(error, TimeoutError):
            return error
        return EOFError(f"its process ended with code {code}")

    def close(self) -> None:
        """End all clients: they stop when the connection closes."""
        for client in range(len(self.connections)):
            self.drop(client)

    def _receive(self, client: int, connection: Any, limit: int) -> bytes | Exception:
        try:
            return bytes(connection.recv_bytes(limit))
        except (EOFError, OSError) as error:
            return self.drop(client, error)

    def _start(self) -> tuple[subprocess.Popen[bytes], Any]:
        """A new client: its end of a private pair of sockets is all that it gets."""
        ours, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", self.worker, str(theirs.fileno()), *_main_script()]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=_environment())
        return process, ours


def _configure(content: dict[str, Any]) -> tuple[Any, list[Any]]:
    structure, arrays = pack(content)
    return {"configure": structure}, arrays


def _without_metrics(problem: Problem) -> Problem:
    """Metrics are the server's business, and may be lambdas."""
    return Problem(
        problem.upper, problem.lower, problem.x0, problem.y0, None, problem.constraint, problem.structure
    )


def _environment() -> dict[str, str]:
    """Clients find the modules that the server finds, and share the machine's cores."""
    own = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    if "XLA_FLAGS" not in os.environ:
        own["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    return dict(os.environ) | own | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def _main_script() -> list[str]:
    """The user's script, if there is one: functions that it defines are named `__main__:...`."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    return [path] if path and getattr(main, "__spec__", None) is None else []
