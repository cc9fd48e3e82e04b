"""The NVFlare engine: real sites, over certificates, or simulated ones."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Self

from fedbilevel.data.clients import Clients
from fedbilevel.data.error import DataError
from fedbilevel.engine.base import Engine, Session, Stepper, check_dropout
from fedbilevel.engine.configuration import configuration, refuse_inside_client
from fedbilevel.engine.hurry import REMEMBERED, Exchanges, check_deadline
from fedbilevel.engine.nvflare.job import Job, JobLostError, SimulatedJob
from fedbilevel.engine.nvflare.premises import Premises
from fedbilevel.engine.nvflare.sites import Sites
from fedbilevel.engine.nvflare.submitted import SubmittedJob
from fedbilevel.engine.own_data import SiteClients, surveyed
from fedbilevel.engine.remote import RemoteFederation
from fedbilevel.engine.reply import body_of
from fedbilevel.engine.session import agree
from fedbilevel.engine.wire import WireError, encode
from fedbilevel.portable import Array, Json
from fedbilevel.problem.base import Problem


class NVFlare(Engine):
    """Runs clients at the sites of an NVFlare federation: the same algorithms, unchanged.

    This process is the driver: it runs the algorithm, and a job of the NVFlare server passes its messages on
    to the sites. As a context manager it keeps its job for several runs; else each run starts its own, which
    takes tens of seconds.

        with fb.NVFlare("sim") as engine:
            fb.solve(problem, clients, algorithm, steps=20, engine=engine)

    Args:
        env: where the sites are. "sim": processes of this machine, made by NVFlare's simulator. "poc": a
            server and sites on this machine that are provisioned and speak as real ones do, over mutual TLS.
            Else the folder of an administrator's startup kit, for sites anywhere.
        sites: names of the sites, in the order of the clients; default: all that are connected, by name, or
            site-1, site-2, ... if they are started here.
        own_data: whether the sites have the samples. The clients that `solve` is given then say how many
            there are, what samples look like, the minibatch and whether they are weighed by size.
        data: where sites that are started here ("sim", "poc") find their own samples; a real site says that
            itself.
        min_clients: fewer answers than this in an exchange are an error.
        timeout: seconds to wait for an answer. Who is late is left out of that mean and takes part again
            when it has caught up; nobody waits for it a second time meanwhile.
        retries: how often a message is repeated, each time for `timeout` seconds and while the others go on,
            before the site is given up for the session.
        deadline: seconds after which an exchange goes on without those who have not answered (as in
            `Simulator`). They finish what they were asked, and are waited for as long in the next one. In
            its first exchange a site compiles its programs, which takes time too.
        dropout: probability that a client does not answer after a local computation (as in `Simulator`).
        factory: an importable function that makes the problem; default: the problem's own functions
            are sent by name, so they must be importable themselves.
        start_timeout: seconds that the sites have to connect, and a job to start.
        rejoin: whether to end a job with `JobLostError` when a site that it has lost is back: NVFlare takes
            nobody into a running job. A new session looks for such sites in any case.

    A job that ends by itself (its server or a site's worker was killed) raises `JobLostError`. A run with
    checkpoints then goes on where it was: `fedbilevel federate` does that by itself.

    Attributes:
        exchanges: for each of the last exchanges how many seconds each site took, as the NVFlare server sees
            it, `{client: seconds}`; of one that is late, once it is done. `Link.measured` makes a simulated
            link of them.
    """

    def __init__(
        self,
        env: str | os.PathLike[str] = "sim",
        *,
        sites: Sequence[str] = (),
        own_data: bool = False,
        data: str | None = None,
        min_clients: int = 1,
        timeout: float = 600.0,
        retries: int = 2,
        deadline: float | None = None,
        dropout: float = 0.0,
        factory: Callable[[], Problem] | None = None,
        start_timeout: float = 300.0,
        rejoin: bool = False,
    ) -> None:
        check_dropout(dropout)
        check_deadline(deadline)
        if min_clients < 1 or timeout <= 0 or retries < 0:
            raise ValueError(
                f"min_clients is {min_clients}, timeout {timeout} and retries {retries}; "
                "they must be at least 1, above 0 and at least 0"
            )
        self.env, self.names = env, tuple(sites)
        self.own_data, self.data = own_data, data
        self.min_clients, self.timeout, self.retries = min_clients, timeout, retries
        self.deadline, self.dropout, self.factory = deadline, dropout, factory
        self.exchanges: Exchanges = deque(maxlen=REMEMBERED)
        self.start_timeout, self.rejoin = start_timeout, rejoin
        self._stays, self._before = False, (0, 0)
        self._reports: dict[str, tuple[Json, list[Array]]] = {}
        self._premises: Premises | None = None
        self._sites: Sites | None = None

    def __enter__(self) -> Self:
        self._stays = True
        return self

    def __exit__(self, *_: object) -> None:
        self._stays = False
        self.close()

    def close(self) -> None:
        """End the job, and a system that was started for it."""
        self._end_job()
        premises, self._premises = self._premises, None
        if premises is not None:
            premises.close()

    def _end_job(self) -> None:
        sites, self._sites = self._sites, None
        if sites is not None:
            self._before = self._before[0] + sites.down, self._before[1] + sites.up
            sites.job.close()

    @property
    def wire(self) -> tuple[int, int]:
        """Bytes of all messages so far, down and up: the ledger's payload and its wrapping."""
        now = (0, 0) if self._sites is None else (self._sites.down, self._sites.up)
        return self._before[0] + now[0], self._before[1] + now[1]

    @contextlib.contextmanager
    def connect(
        self, problem: Problem, clients: Clients, stepper: Stepper, probes: Sequence[Stepper] = ()
    ) -> Iterator[Session]:
        refuse_inside_client()
        configure = configuration(problem, clients, stepper, probes, self.factory)
        try:
            sites = self._ready(clients.n)
            if self.own_data and not isinstance(clients, SiteClients):
                clients = self.clients(
                    clients.lower.batch_size, "uniform" if clients.weights is None else "size"
                )
                configure = configuration(problem, clients, stepper, probes, self.factory)
            federation = RemoteFederation(
                sites, problem, clients, stepper, probes, min_clients=self.min_clients, dropout=self.dropout
            )
            for client in sorted(set(range(clients.n)) - sites.alive):
                federation.report(client, "it was not connected when the job began")
            agree(federation, configure)
            # An evaluation is of all clients, however late.
            with sites.hurried(lambda: None if federation.whole else self.deadline, self.exchanges):
                yield federation.compile(stepper)
        except JobLostError:
            self._end_job()  # the next session begins a new one
            raise
        finally:
            if not self._stays:
                self.close()

    def clients(
        self, batch_size: int | None = None, weights: Literal["uniform", "size"] | Any = "uniform"
    ) -> SiteClients:
        """The sites' own data as clients for `solve`: sizes and shapes are asked for, and no sample is sent.

        Inside a `with` block of this engine; the arguments are those of `Clients`. A site that is not there
        now has what it had when it was asked before.
        """
        sites = self._ready(len(self.names))
        replies = sites.exchange(dict.fromkeys(sorted(sites.alive), encode({"survey": {}}, [])), 1 << 24)
        for client, reply in replies.items():
            self._reports[sites.names[client]] = _report(sites.label(client), reply)
        if missing := [name for name in sites.names if name not in self._reports]:
            raise DataError(f"{', '.join(missing)} must be connected, at first, to say what data there are")
        return surveyed([(name, *self._reports[name]) for name in sites.names], batch_size, weights)

    def _ready(self, n: int) -> Sites:
        """The sites of a running job; `n` of them, if that is not 0."""
        _check_number(n, self.names or range(n))
        if self._sites is not None and n not in (0, len(self._sites.names)):
            self.close()
        if self._sites is not None and self._sites.returned():
            self._end_job()
        if self._sites is None:
            self._sites = Sites(self._job(n), self.timeout, self.names, rejoin=self.rejoin)
            self._remember()
        _check_number(n, self._sites.names)
        self._sites.renew()
        return self._sites

    def _remember(self) -> None:
        """Sites that are not started here stay the same clients in later jobs, whoever is connected then."""
        if self._sites is not None and self.env not in ("sim", "poc"):
            self.names = tuple(self._sites.names)

    def _job(self, n: int) -> Job:
        if importlib.util.find_spec("nvflare") is None:
            raise RuntimeError("NVFlare is not installed: `pip install 'fedbilevel[nvflare]'` does that")
        job: dict[str, Any] = {"min_clients": self.min_clients, "retries": self.retries}
        if self.env == "sim":
            return SimulatedJob(self._started_here(n), self.data, self.start_timeout, **job)
        if self.env == "poc" and self._premises is None:
            self._premises = Premises(self._started_here(n), self.data)
            self._premises.start()
        kit = pathlib.Path(self.env) if self._premises is None else self._premises.admin
        return SubmittedJob(kit, n or self.min_clients, self.start_timeout, **job)

    def _started_here(self, n: int) -> list[str]:
        """The names of sites that are not there yet."""
        if not (n or self.names):
            raise ValueError(f"the sites of {self.env!r} are started here: say which, sites=['site-1', ...]")
        return list(self.names) or [f"site-{number}" for number in range(1, n + 1)]


def _check_number(n: int, names: Sequence[Any]) -> None:
    if n not in (0, len(names)):
        raise ValueError(
            f"there are data for {n} clients, and {len(names)} sites: {', '.join(names)}. If some are not "
            "connected, name all of them: sites=[...]"
        )


def _report(name: str, reply: bytes | Exception) -> tuple[Json, list[Array]]:
    """What a site told about its data; without it there is no client."""
    try:
        body, arrays = body_of(reply)
        if "levels" in body:
            return body["levels"], arrays
        reason = str(body.get("error", "it did not say what data it has"))
    except WireError as error:
        reason = str(error)
    raise DataError(f"{name}: {reason}")
