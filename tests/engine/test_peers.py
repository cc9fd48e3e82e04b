"""Clients that send each other directly: the same result, also when messages are really lost."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
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
from fedbilevel.engine.reply import Reply
from fedbilevel.engine.session import agree
from fedbilevel.engine.wire import decode, encode
from fedbilevel.engine.worker import Worker
from fedbilevel.experiment import DivergenceWarning
from fedbilevel.fed import Federation, Given, Program

STEPS = 5


class Neighbours:
    """Workers in this process, each with a thread of its own: a channel, and the way to each other.

    Args:
        n: how many.
        loses: whether a letter is lost, by receiver, round and sender.
        spoils: what becomes of a letter, by receiver, round and letter.
    """

    patience = 2.0

    def __init__(
        self, n: int, loses: Callable[[str, int, str], bool], spoils: Callable[[str, int, bytes], bytes]
    ) -> None:
        self.workers = {str(client): Worker() for client in range(n)}
        self.letters, self.loses, self.spoils = 0, loses, spoils
        self._lock = threading.Lock()
        for name, worker in self.workers.items():
            worker.post = self._post(name)

    def _post(self, sender: str) -> Callable[[str, int, bytes], bool]:
        def post(peer: str, round: int, message: bytes) -> bool:
            with self._lock:
                self.letters += 1
            return not self.loses(peer, round, sender) and self.workers[peer].mailbox.put(
                round, sender, self.spoils(peer, round, message)
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

    def __init__(
        self,
        loses: Callable[[str, int, str], bool] = lambda *_: False,
        spoils: Callable[[str, int, bytes], bytes] = lambda receiver, round, letter: letter,
    ) -> None:
        self.loses, self.spoils = loses, spoils

    @contextlib.contextmanager
    def connect(
        self, problem: Any, clients: Any, stepper: Any, probes: Sequence[Any] = ()
    ) -> Iterator[Session]:
        self.channel = Neighbours(clients.n, self.loses, self.spoils)
        federation = RemoteFederation(self.channel, problem, clients, stepper, probes)
        agree(federation, configuration(problem, clients, stepper, probes))
        yield federation.compile(stepper)


def run(engine: Any, steps: int = STEPS) -> fb.Result:
    problem, clients = CASES["every-verb"].make()
    return fb.solve(problem, clients, CASES["every-verb"].algorithm(), steps, engine=engine, every=7, seed=7)


def close(a: fb.Result, b: fb.Result) -> None:
    for p, q in zip(jax.tree.leaves((a.x, a.y)), jax.tree.leaves((b.x, b.y)), strict=True):
        np.testing.assert_allclose(p, q, rtol=1e-5, atol=1e-5 * float(np.abs(q).max(initial=0)))


def test_directly_is_the_same_as_simulated() -> None:
    """Over a ring; over random links the NVFlare engine's tests see it, with PDBO."""
    engine = Local()
    direct, simulated = run(engine), run("simulator")
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

    monkeypatch.setattr(Neighbours, "patience", 0.2)
    direct = run(Local(loses))
    close(direct, run("simulator"))
    assert lost
    assert len(direct.failures) >= len(lost), "one that came too late is passed on, too"
    assert "got lost, and the server passes it on" in direct.failures[0]


def test_without_the_server_s_help_mass_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test before."""
    monkeypatch.setattr("fedbilevel.engine.peers._relay", lambda *_: None)
    monkeypatch.setattr(Neighbours, "patience", 0.2)
    direct = run(Local(lambda receiver, *_: receiver == "1"))
    with pytest.raises(AssertionError):
        close(direct, run("simulator"))


def changed(change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    """A letter whose arrays are changed."""

    def spoil(letter: bytes) -> bytes:
        body, arrays = decode(letter)
        return encode(body, [change(array) for array in arrays])

    return spoil


DAMAGE = {
    "NaN or an infinity": changed(lambda array: array * np.nan),
    r"arrays of float32\[1\] where float32\[4\] is expected": changed(lambda array: array[:1]),
    r"arrays of float16\[4\] where float32\[4\] is expected": changed(lambda array: array.astype(np.float16)),
    "does not begin as a message": lambda letter: b"garbage",
    "it ends before its array": lambda letter: letter[:-1],
    "its answer is incomplete": lambda letter: encode({"leaves": [7]}, []),
    "incomplete: KeyError": lambda letter: encode({"object": ["os:system", {}]}, []),
}


def test_letters_that_cannot_be_right_are_refused_and_lose_no_mass() -> None:
    """Letters are damaged, in every round in another way: the server passes on what was sent."""
    kinds = list(DAMAGE.values())
    engine = Local(spoils=lambda receiver, round, letter: kinds[round](letter) if receiver != "2" else letter)
    direct, simulated = (run(where, len(kinds)) for where in (engine, "simulator"))
    close(direct, simulated)
    assert direct.ledger == simulated.ledger
    refused = r"client \d: client [01] refused its message, and the server passes it on: "
    assert all(re.match(refused, line) for line in direct.failures)
    for reason in DAMAGE:
        assert any(re.search(reason, line) for line in direct.failures), reason


def test_without_the_check_a_damaged_letter_would_spoil_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test before."""

    def trusting(read: Any) -> Any:
        return {sender: value() for sender, value in read.items()}, {}

    monkeypatch.setattr("fedbilevel.engine.worker.accepted", trusting)
    spoiled = DAMAGE["NaN or an infinity"]
    with pytest.warns(DivergenceWarning):
        direct = run(Local(spoils=lambda receiver, round, letter: spoiled(letter)))
    assert direct.diverged


def test_a_client_is_given_nothing_that_was_not_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says it misses everybody's letters gets those of whom it hears."""
    given = []

    def missed(reply: Reply) -> Any:
        return ["0", "1", "2"], {}, ""

    def report(cohort: Any, client: int, source: int, *_: Any) -> None:
        given.append((client, source))

    monkeypatch.setattr(Reply, "missed", missed)
    monkeypatch.setattr("fedbilevel.engine.peers._report", report)
    problem, clients = CASES["every-verb"].make()
    fb.solve(problem, clients, Stumble(), 1, engine=Local())
    assert set(given) == {(0, 2), (2, 1), (1, 0)}, "over a ring everybody hears one other"


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


def test_who_has_a_value_that_is_not_finite_is_left_out_and_the_loss_is_said() -> None:
    """As one that has none; but only its receivers can know, and the server hears it from them."""
    problem, clients = CASES["every-verb"].make()
    direct = fb.solve(problem, clients, Stumble(False), 1, engine=Local())
    one_step = ((1 + 3) / 2 + 1 / 2 + 3 / 2) / 3
    np.testing.assert_allclose(direct.x - problem.x0, one_step, rtol=1e-5)
    reason = "what it sent holds a NaN or an infinity"
    assert direct.failures == (
        f"client 1: {reason} (asked for what its peers sent)",
        f"client 1: client 2 refused its message, and its share is lost: {reason}",
    )


class Unplugged(Program):
    """`id + 1`; client 1 raises, or has a NaN."""

    raises: bool = eqx.field(static=True, default=True)

    def __call__(self, me: Any, *values: Any) -> Any:
        if not self.raises:
            return jnp.where(me.id == 1, jnp.nan, jnp.zeros_like(values[0]) + me.id + 1.0)
        fine = jax.pure_callback(_raise_at_one, jax.ShapeDtypeStruct((), jnp.bool_), me.id)
        return jnp.where(fine, jnp.zeros_like(values[0]) + me.id + 1.0, 0)


def _raise_at_one(id: Any) -> Any:
    if int(id) == 1:
        raise ValueError("the sensor is unplugged")
    return np.asarray(True)


class Stumble(TwoVariables):
    """`x ← x + mean` of what comes over a ring: half of the own and half of the one's before."""

    raises: bool = eqx.field(static=True, default=True)

    def step(self, fed: Federation, state: Variables, key: jax.Array) -> tuple[Variables, Any]:
        everyone = fed.everyone
        own = everyone.run(Unplugged(self.raises), everyone.send(state.x, "x"), key=key)
        ring = Given((jnp.eye(3) + jnp.roll(jnp.eye(3), 1, axis=0)) / 2)
        return Variables(state.x + everyone.mean(everyone.push(own, ring, "v"), "v"), state.y), {}


def test_a_letter_that_comes_too_late_is_refused() -> None:
    mailbox = Mailbox()
    assert mailbox.put(0, "a", b"1")
    assert mailbox.take(0, ["a", "b"], 0.01) == {"a": b"1"}
    assert not mailbox.put(0, "b", b"2"), "round 0 is closed: it must not be counted twice"
    assert mailbox.put(1, "b", b"3")
    assert mailbox.take(1, ["b"], 0.01) == {"b": b"3"}
