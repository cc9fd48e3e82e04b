"""Clients that send each other directly: the same result, also when messages are really lost."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from conform.cases import CASES
from fedbilevel.algorithm.base import TwoVariables, Variables
from fedbilevel.engine import Engine
from fedbilevel.engine.base import Session
from fedbilevel.engine.configuration import configuration
from fedbilevel.engine.mailbox import Mailbox
from fedbilevel.engine.remote import RemoteFederation
from fedbilevel.engine.session import agree
from fedbilevel.engine.wire import encode
from fedbilevel.engine.worker import Worker
from fedbilevel.fed import Federation, Given, Program
from fedbilevel.portable import PortableError, pack

STEPS = 5


class Neighbours:
    """Workers in this process, each with a thread of its own: a channel, and the way to each other.

    Args:
        n: how many.
        loses: whether a letter is lost, by receiver, round and sender.
    """

    timeout = 2.0

    def __init__(self, n: int, loses: Callable[[str, int, str], bool]) -> None:
        self.workers = {str(client): Worker() for client in range(n)}
        self.letters, self.loses = 0, loses
        self._lock = threading.Lock()
        for name, worker in self.workers.items():
            worker.post = self._post(name)

    def _post(self, sender: str) -> Callable[[str, int, bytes], bool]:
        def post(peer: str, round: int, message: bytes) -> bool:
            with self._lock:
                self.letters += 1
            return not self.loses(peer, round, sender) and self.workers[peer].mailbox.put(
                round, sender, message
            )

        return post

    @property
    def alive(self) -> set[int]:
        return set(range(len(self.workers)))

    def exchange(self, messages: dict[int, bytes], limit: int) -> dict[int, bytes | Exception]:
        with ThreadPoolExecutor(len(messages) or 1) as threads:
            replies = threads.map(lambda pair: self.workers[str(pair[0])].answer(pair[1]), messages.items())
            found: dict[int, bytes | Exception] = dict(zip(messages, replies, strict=True))
        return found

    @property
    def behind(self) -> set[int]:
        return set()

    def drop(self, client: int) -> None:
        raise AssertionError("nobody is dropped here")

    def label(self, client: int) -> str:
        return f"client {client}"

    def peer(self, client: int) -> str:
        return str(client)


class Local(Engine):
    """An engine on `Neighbours`."""

    def __init__(self, loses: Callable[[str, int, str], bool] = lambda *_: False) -> None:
        self.loses = loses

    @contextlib.contextmanager
    def connect(
        self, problem: Any, clients: Any, stepper: Any, probes: Sequence[Any] = ()
    ) -> Iterator[Session]:
        self.channel = Neighbours(clients.n, self.loses)
        federation = RemoteFederation(self.channel, problem, clients, stepper, probes)
        agree(federation, configuration(problem, clients, stepper, probes))
        yield federation.compile(stepper)


def run(name: str, engine: Any) -> fb.Result:
    problem, clients = CASES[name].make()
    return fb.solve(problem, clients, CASES[name].algorithm(), STEPS, engine=engine, every=STEPS, seed=7)


def close(a: fb.Result, b: fb.Result) -> None:
    for p, q in zip(jax.tree.leaves((a.x, a.y)), jax.tree.leaves((b.x, b.y)), strict=True):
        np.testing.assert_allclose(p, q, rtol=1e-5, atol=1e-5 * float(np.abs(q).max(initial=0)))


@pytest.mark.parametrize("name", ["every-verb", "SGP"])
def test_directly_is_the_same_as_simulated(name: str) -> None:
    engine = Local()
    direct, simulated = run(name, engine), run(name, "simulator")
    close(direct, simulated)
    assert direct.ledger == simulated.ledger
    assert engine.channel.letters > 0
    assert not direct.failures


def test_lost_letters_lose_no_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third letter vanishes: the server passes it on, and the result is the same."""
    lost = []

    def loses(receiver: str, round: int, sender: str) -> bool:
        gone = (int(receiver) + round + int(sender)) % 3 == 0
        lost.extend([receiver] * gone)
        return gone

    monkeypatch.setattr(Neighbours, "timeout", 0.2)
    direct = run("every-verb", Local(loses))
    close(direct, run("every-verb", "simulator"))
    assert lost
    assert len(direct.failures) >= len(lost), "one that came too late is passed on, too"
    assert "got lost, and the server passes it on" in direct.failures[0]


def test_without_the_server_s_help_mass_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test before."""
    monkeypatch.setattr("fedbilevel.engine.peers._relay", lambda *_: None)
    monkeypatch.setattr(Neighbours, "timeout", 0.2)
    direct = run("every-verb", Local(lambda receiver, *_: receiver == "1"))
    with pytest.raises(AssertionError):
        close(direct, run("every-verb", "simulator"))


def test_who_has_nothing_to_send_says_so_and_nobody_waits() -> None:
    """As over the server: its column of W is as good as zero, and it is reported."""
    problem, clients = CASES["every-verb"].make()
    algorithm, began = Stumble(), time.monotonic()
    direct = fb.solve(problem, clients, algorithm, 2, engine=Local(), every=2)
    assert time.monotonic() - began < 60
    one_step = ((1 + 3) / 2 + 1 / 2 + 3 / 2) / 3  # at 0 from 0 and 2, at 1 from 0 alone, at 2 from 2 alone
    np.testing.assert_allclose(direct.x - problem.x0, 2 * one_step, rtol=1e-5)
    assert len(direct.failures) == 2
    assert all("client 1: Unplugged raised" in line for line in direct.failures)


class Unplugged(Program):
    """`id + 1`; client 1 raises."""

    def __call__(self, me: Any, *values: Any) -> Any:
        fine = jax.pure_callback(_raise_at_one, jax.ShapeDtypeStruct((), jnp.bool_), me.id)
        return jnp.where(fine, jnp.zeros_like(values[0]) + me.id + 1.0, 0)


def _raise_at_one(id: Any) -> Any:
    if int(id) == 1:
        raise ValueError("the sensor is unplugged")
    return np.asarray(True)


class Stumble(TwoVariables):
    """`x ← x + mean` of what comes over a ring: half of the own and half of the one's before."""

    def step(self, fed: Federation, state: Variables, key: jax.Array) -> tuple[Variables, Any]:
        everyone = fed.everyone
        own = everyone.run(Unplugged(), everyone.send(state.x, "x"), key=key)
        ring = Given((jnp.eye(3) + jnp.roll(jnp.eye(3), 1, axis=0)) / 2)
        return Variables(state.x + everyone.mean(everyone.push(own, ring, "v"), "v"), state.y), {}


def test_a_letter_that_comes_too_late_is_refused() -> None:
    mailbox = Mailbox()
    assert mailbox.put(0, "a", b"1")
    assert mailbox.take(0, ["a", "b"], 0.01) == {"a": b"1"}
    assert not mailbox.put(0, "b", b"2"), "round 0 is closed: it must not be counted twice"
    assert mailbox.put(1, "b", b"3")
    assert mailbox.take(1, ["b"], 0.01) == {"b": b"3"}


def test_a_letter_is_checked_like_any_message() -> None:
    read = Worker()._letter
    np.testing.assert_array_equal(read(encode(*pack({"a": np.arange(3)})))["a"], [0, 1, 2])
    with pytest.raises(ValueError, match="does not begin as a message"):
        read(b"garbage")
    with pytest.raises(PortableError, match="import that module first"):
        read(encode({"object": ["module_that_nobody_imported:Thing", {}]}, []))
