"""Where the driver's requests arrive in the server's process.

A driver on the same machine (simulated sites) speaks through a socket that only its user can open; any other
one through NVFlare's own administration channel, as commands to the running job.
"""

from __future__ import annotations

import base64
import binascii
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError as NotYetError
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from fedbilevel.engine.nvflare.relay import Relay
from fedbilevel.engine.wire import decode, encode
from fedbilevel.portable import Json

SOCKET = "FEDBILEVEL_DRIVER"
"""The environment variable that names the socket of a driver on the same machine."""
TOPIC = "fedbilevel"
"""The topic of commands to the job."""
_GLANCE = 2.0
"""Seconds that a command waits for what it asks for, before it says: not yet."""


class Desk:
    """Requests of the driver, as messages of our protocol: `answer(request) -> reply`."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.closed = threading.Event()

    def answer(self, request: bytes) -> bytes:
        """Do what a request says: "exchange" messages, "drop" or "renew" sites, "close", or just tell."""
        body, arrays = decode(request)
        replies: dict[str, bytes | Exception] = {}
        if body["do"] == "exchange":
            messages = {site: array.tobytes() for site, array in zip(body["sites"], arrays, strict=True)}
            replies = self.relay.exchange(
                messages, body["timeout"], body.get("deadline"), body.get("number", 0)
            )
        elif body["do"] == "drop":
            self.relay.lines[body["site"]].give_up("it was given up")
        elif body["do"] == "renew":
            self.relay.renew()
        elif body["do"] == "close":
            self.closed.set()
        return self._reply(replies, body.get("limit", 0))

    def _reply(self, replies: dict[str, bytes | Exception], limit: int) -> bytes:
        errors = {site: str(r) for site, r in replies.items() if isinstance(r, Exception)}
        answers = {site: r for site, r in replies.items() if isinstance(r, bytes)}
        for site in [site for site, reply in answers.items() if len(reply) > limit]:
            errors[site] = f"it sent {len(answers.pop(site))} bytes, and at most {limit} are expected"
        lines = self.relay.lines
        behind = [site for site, line in lines.items() if line.is_busy]
        body: Json = {
            "sites": sorted(lines),
            "alive": sorted(self.relay.alive),
            "behind": behind,
            "errors": errors,
        }
        body |= {"answers": list(answers), "times": self.relay.times()}
        return encode(body, [bytes_array(reply) for reply in answers.values()])


def bytes_array(message: bytes) -> Any:
    """A message inside another one."""
    return np.frombuffer(message, np.uint8)


def serve(desk: Desk, engine: Any, aborted: Callable[[], bool], patience: float) -> None:
    """Answer the driver until it is done, the job is aborted, or nothing was heard for `patience` seconds."""
    address = os.environ.get(SOCKET)
    if address:
        serve_socket(desk, address)
        return
    window = Window(desk)
    engine.register_app_command(TOPIC, window.command)
    while not desk.closed.wait(0.5) and not aborted() and time.monotonic() - window.heard < patience:
        pass


def serve_socket(desk: Desk, address: str) -> None:
    """Answer a driver on this machine until it hangs up."""
    with socket.socket(socket.AF_UNIX) as plain:
        plain.connect(address)
        descriptor = plain.detach()
    with Connection(descriptor) as driver:
        try:
            while not desk.closed.is_set():
                driver.send_bytes(desk.answer(driver.recv_bytes()))
        except (EOFError, ConnectionError):
            return


class Window:
    """Requests as commands of an administrator: posted, then collected, so that no command takes long."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.heard = desk, time.monotonic()
        self.pending: tuple[int, Future[bytes]] = (0, Future())
        self._thread = ThreadPoolExecutor(1)

    def command(self, topic: str, data: Json, *_: Any) -> Json:
        """`{"number", "request"}` posts (again: does nothing), `{"number"}` collects."""
        self.heard = time.monotonic()
        number = int(data["number"])
        if "request" in data and number != self.pending[0]:
            self.pending = number, self._thread.submit(self.desk.answer, unwrapped(data["request"]))
        if number != self.pending[0]:
            return {"error": f"there is no request {number}; the last one was {self.pending[0]}"}
        try:
            return {"reply": wrapped(self.pending[1].result(_GLANCE))}
        except NotYetError:
            return {}


def wrapped(message: bytes) -> str:
    """A message as text."""
    return base64.b64encode(message).decode()


def unwrapped(text: str) -> bytes:
    """The message again."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError) as error:
        raise ValueError(f"not a message as text: {error}") from None
