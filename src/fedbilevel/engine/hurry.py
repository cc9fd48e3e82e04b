"""Deadlines of exchanges, and how long exchanges take: what the network engines share."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

Exchanges: TypeAlias = deque[dict[int, float]]
"""For each of the last exchanges how many seconds each client took, `{client: seconds}`."""

REMEMBERED = 10_000
"""How many exchanges are remembered with the times they took."""


def check_deadline(deadline: float | None) -> None:
    """Raise an error that explains unless `deadline` is a number of seconds, or None."""
    if deadline is not None and not deadline > 0:
        raise ValueError(f"deadline is {deadline}; it must be a number of seconds above 0")


def too_late(deadline: float) -> str:
    """Why there is no answer; goes on from "client 3: ..."."""
    return f"it did not answer within the deadline of {deadline:g} s"


class Hurried:
    """A channel whose exchanges may have a deadline; the times they take are noted.

    Attributes:
        timeout: seconds to wait for an answer where there is no deadline.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._deadline: Callable[[], float | None] = lambda: None
        self._exchanges: Exchanges = deque(maxlen=1)

    @property
    def patience(self) -> float:
        """Seconds that an exchange waits for answers."""
        return min(self.timeout, self._deadline() or math.inf)

    @contextlib.contextmanager
    def hurried(self, deadline: Callable[[], float | None], exchanges: Exchanges) -> Iterator[None]:
        """Inside, exchanges have a deadline, which may change, and the times they take are noted."""
        before = self._deadline, self._exchanges
        self._deadline, self._exchanges = deadline, exchanges
        try:
            yield
        finally:
            self._deadline, self._exchanges = before
