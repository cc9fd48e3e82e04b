"""An algorithm over a wire: the server runs eagerly, the clients their compiled programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fedbilevel.engine.base import Block, Session, Stepper, TooFewClientsError, check_step
from fedbilevel.engine.programs import names
from fedbilevel.engine.reply import body_of
from fedbilevel.engine.wire import WireError
from fedbilevel.fed.ledger import Counts, metering
from fedbilevel.fed.place import map_kept
from fedbilevel.tree import PyTree, all_finite

if TYPE_CHECKING:
    from fedbilevel.engine.remote import RemoteFederation


class RemoteSession(Session):
    """Steps of an algorithm on a remote federation."""

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
            step = functools.partial(self.stepper.at(time).step, self.federation, state, own)
            returned, counts = self._metered(step)
            check_step(self.stepper, state, returned)
            new, info = returned
            records.append((info, counts))
            if not bool(all_finite(map_kept(lambda _: (), new))):
                return _block(state, len(records) - 1, False, records)._replace(broken=new)
            state = new
        return _block(state, len(records), True, records)

    def ask(self, probe: Stepper, state: PyTree, key: jax.Array) -> dict[str, Any]:
        with self.federation.on_all_data():
            (_, info), _ = self._metered(lambda: probe.step(self.federation, state, key))
        return info

    def _metered(self, work: Callable[[], PyTree]) -> tuple[PyTree, Counts]:
        with metering() as meter:
            out = work()
            self.federation.finish()
        return out, meter.counts


def agree(federation: RemoteFederation, configure: Callable[[int], bytes]) -> None:
    """Configure every client and compare what it will run with what the server will ask for.

    A client that cannot be set up is reported and left out of the session.
    """
    messages = {i: configure(i) for i in sorted(federation.channel.alive)}
    expected = names(federation.programs)
    for client, message in federation.channel.exchange(messages, 1 << 24).items():
        try:
            _check_agreement(body_of(message)[0], expected)
        except WireError as error:
            federation.report(client, f"could not be set up: {error}")
            federation.channel.drop(client)
    ready = len(federation.channel.alive)
    if ready < federation.min_clients:
        raise TooFewClientsError(
            f"{ready} of {federation.n} clients could be set up, and min_clients is "
            f"{federation.min_clients}. Last reports: {'; '.join(federation.failures[-3:])}"
        )


def _check_agreement(body: Any, expected: list[str]) -> None:
    found = body.get("programs") if isinstance(body, dict) else None
    if isinstance(body, dict) and "error" in body:
        raise WireError(str(body["error"]))
    if found != expected:
        raise WireError(
            f"it has other programs than the server, {found} against {expected}; "
            "both need the same version of the algorithm"
        )


def _block(state: PyTree, done: int, finite: bool, records: list[tuple[Any, Counts]]) -> Block:
    reported = records[0][0] if records else ()
    info = {name: np.array([np.asarray(i[name]) for i, _ in records]) for name in reported}
    entries = {entry for _, counts in records for entry in counts}
    counts = {e: np.array([int(c.get(e, 0)) for _, c in records], np.int64) for e in sorted(entries)}
    return Block(state, done, finite, info, counts)
