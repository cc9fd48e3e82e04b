"""What peers send each other directly: by round and sender, each message used once or not at all.

A receiver closes a round when it has what it waited for, or its time is over. What comes later is refused, so
that both sides know that it was not used: it is then the server that passes it on, and nothing is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

Post: TypeAlias = Callable[[str, int, bytes], bool]
"""`post(peer, round, message)` says whether the peer took it."""


class Mailbox:
    """The letters that wait for one client, and the way to its peers."""

    def __init__(self) -> None:
        self._letters: dict[tuple[int, str], bytes] = {}
        self._open_from = 0
        self._changed = threading.Condition()
        self._couriers = ThreadPoolExecutor(16, thread_name_prefix="courier")

    def put(self, round: int, sender: str, message: bytes) -> bool:
        """Take a letter; False: the round is closed."""
        with self._changed:
            if round < self._open_from:
                return False
            self._letters[round, sender] = message
            self._changed.notify_all()
            return True

    def take(self, round: int, senders: Iterable[str], timeout: float) -> dict[str, bytes]:
        """Wait for the letters of a round and close it; who is missing in the result did not come in time."""
        wanted = {(round, sender): sender for sender in senders}
        with self._changed:
            self._changed.wait_for(lambda: wanted.keys() <= self._letters.keys(), timeout)
            # In the order of the senders, so that sums have the same bits whoever was first.
            found = {wanted[spot]: self._letters[spot] for spot in wanted if spot in self._letters}
            self._open_from = round + 1
            self._letters = {spot: letter for spot, letter in self._letters.items() if spot[0] > round}
        return found

    def send(self, post: Post, round: int, peers: Iterable[str], message: bytes) -> None:
        """Send a letter to each of the peers; returns at once, and the receivers say what they missed."""
        for peer in peers:
            self._couriers.submit(post, peer, round, message)

    def reset(self) -> None:
        """Forget everything: a new session numbers its rounds anew."""
        with self._changed:
            self._letters.clear()
            self._open_from = 0
