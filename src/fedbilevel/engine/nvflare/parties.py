"""The two parties of a job on NVFlare's Collab API: a server that passes messages on, and a site that works.

Both are generic: what is computed is agreed between the driver, which runs the algorithm, and the sites.
NVFlare makes these objects from the job's configuration; no code travels with a job.
"""

from __future__ import annotations

import threading
from typing import Any

from nvflare.collab import CollabCallError, collab

from fedbilevel.engine.mailbox import Post
from fedbilevel.engine.nvflare.desk import Desk, serve
from fedbilevel.engine.nvflare.relay import LineError, Relay
from fedbilevel.engine.nvflare.settings import make_worker
from fedbilevel.engine.worker import Worker

_ACKNOWLEDGE, _RETRIES = 30.0, 2
"""Seconds to wait for a peer's acknowledgement, and how often a letter is repeated."""


class Server:
    """Passes the driver's messages on to the sites, and their answers back.

    Args:
        retries: how often a message is repeated before a site is given up.
        patience: seconds without a word from the driver after which the job ends.
    """

    def __init__(self, retries: int = 2, patience: float = 1800.0) -> None:
        self.retries, self.patience = retries, patience

    @collab.main  # type: ignore[untyped-decorator]
    def run(self) -> None:
        """The job: serve the driver until it says goodbye or is gone."""
        sites = {proxy.name: proxy for proxy in collab.clients}

        def call(site: str, number: int, message: bytes, timeout: float) -> bytes:
            try:
                return bytes(sites[site](timeout=timeout).answer(number, message))
            except CollabCallError as error:
                raise _told(error, timeout) from None

        relay, context = Relay(sites, call, self.retries), collab.context
        try:
            serve(Desk(relay), collab.fl_ctx.get_engine(), context.is_aborted, self.patience)
        finally:
            relay.close()


class Site:
    """One client: holds its own data and runs the programs that were agreed."""

    def __init__(self) -> None:
        self._turn = threading.Lock()  # calls come in threads; a worker does one thing at a time
        self._worker: Worker | None = None
        self._number, self._reply = 0, b""

    @collab.publish  # type: ignore[untyped-decorator]
    def answer(self, number: int, message: bytes) -> bytes:
        """What the worker answers; the same number again gets the same answer, without doing it twice."""
        if collab.caller != "server":
            raise PermissionError(f"{collab.caller} may not tell this site what to do; only the server may")
        site, local = collab.site_name, collab.workspace.get_site_config_dir()
        with self._turn:
            self._worker = self._worker or make_worker(site, local)
            self._worker.post = _courier({proxy.name: proxy for proxy in collab.clients})
            if number != self._number:
                self._number, self._reply = number, b""
                self._reply = self._worker.answer(message)
            return self._reply

    @collab.publish  # type: ignore[untyped-decorator]
    def deliver(self, round: int, message: bytes) -> bool:
        """Take a peer's letter; False: that round is over here."""
        if not isinstance(message, bytes):
            raise TypeError(f"a letter is bytes, and not {type(message).__name__}")
        worker = self._worker
        return worker is not None and worker.mailbox.put(round, collab.caller, message)


def _courier(peers: dict[str, Any]) -> Post:
    """The way to other sites: a letter is repeated until it is acknowledged or refused."""

    def post(peer: str, round: int, message: bytes) -> bool:
        for _ in range(1 + _RETRIES):
            try:
                return bool(peers[peer](timeout=_ACKNOWLEDGE).deliver(round, message))
            except CollabCallError:  # it may have come through: the same letter again changes nothing
                continue
        return False

    return post


def _told(error: Any, timeout: float) -> Exception:
    """A failed call as the relay knows it: worth repeating, or not."""
    if isinstance(error.cause, TimeoutError):
        return TimeoutError(f"it did not answer within {timeout:g} s")
    if error.remote_traceback is None:  # it never reached the site's function
        return ConnectionError(f"it cannot be reached: {error.cause}")
    return LineError(f"{error.cause_type}: {error.cause}")
