"""Messages to sites that may be slow, dead or back again: in order, each done exactly once.

Every site has a line of its own. A message carries a number; a site that gets the same number again answers
as it did, without doing the work twice, so a call that seems lost is simply repeated. Who does not answer in
time is left behind: others do not wait for it a second time. What it is sent meanwhile waits in its line, and
when it answers again it works that off and takes part in the next exchange.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from typing import TypeAlias

Call: TypeAlias = Callable[[str, int, bytes, float], bytes]
"""`call(site, number, message, timeout)` is what a site answers, or raises (`TimeoutError`, if too late)."""

_PAUSE = 1.0
"""Seconds before a site that cannot be reached is called again."""
_MOST_WAITING = 256 << 20
"""Bytes that may wait for a site that does not answer; beyond it the site is given up."""


class LineError(RuntimeError):
    """Why there is no answer; its text goes on from "client 3: ..."."""


class Line:
    """The messages to one site.

    Args:
        site: its name.
        call: reaches it.
        retries: how often a message is repeated before the site is given up.
    """

    def __init__(self, site: str, call: Call, retries: int) -> None:
        self.site, self.call, self.retries = site, call, retries
        self.number, self.waiting, self.given_up = 0, 0, ""
        self._messages: queue.SimpleQueue[tuple[bytes, float, Future[bytes]] | None] = queue.SimpleQueue()
        self._open: set[Future[bytes]] = set()
        threading.Thread(target=self._work, name=f"line to {site}", daemon=True).start()

    @property
    def is_behind(self) -> bool:
        """Whether an earlier message is not answered yet."""
        return any(not answer.done() for answer in self._open)

    def submit(self, message: bytes, timeout: float) -> Future[bytes]:
        """The answer to come."""
        answer: Future[bytes] = Future()
        if self.given_up:
            answer.set_exception(LineError(self.given_up))
            return answer
        self._open = {earlier for earlier in self._open if not earlier.done()} | {answer}
        self.waiting += len(message)
        if self.waiting > _MOST_WAITING:
            self.give_up(f"it was given up: {self.waiting >> 20} MB wait for it, and it does not answer")
        self._messages.put((message, timeout, answer))
        return answer

    def give_up(self, reason: str) -> None:
        """Send nothing any more; whoever waits for an answer is told why."""
        self.given_up = self.given_up or reason

    def renew(self) -> None:
        """Forget that the site was given up: it may have come back."""
        self.given_up = ""

    def close(self) -> None:
        """End the line's thread."""
        self.give_up("the job has ended")
        self._messages.put(None)

    def _work(self) -> None:
        while (item := self._messages.get()) is not None:
            message, timeout, answer = item
            self.number += 1
            try:
                answer.set_result(self._deliver(message, timeout))
            except Exception as error:  # told to whoever waits for the answer
                answer.set_exception(error)
            self.waiting -= len(message)

    def _deliver(self, message: bytes, timeout: float) -> bytes:
        last = ""
        for _ in range(1 + self.retries):
            if self.given_up:
                raise LineError(self.given_up)
            try:
                return self.call(self.site, self.number, message, timeout)
            except TimeoutError as error:  # it may have come through: the same number again
                last = str(error)
            except ConnectionError as error:
                last = str(error)
                time.sleep(min(_PAUSE, timeout))  # else all tries are over before a network is back
        self.give_up(f"it was given up after {1 + self.retries} calls: {last}")
        raise LineError(self.given_up)


class Relay:
    """All lines of a job."""

    def __init__(self, sites: Iterable[str], call: Call, retries: int) -> None:
        self.lines = {site: Line(site, call, retries) for site in sites}

    @property
    def alive(self) -> set[str]:
        """The sites that are not given up; one that is merely behind is among them."""
        return {site for site, line in self.lines.items() if not line.given_up}

    def exchange(self, messages: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Exception]:
        """Send each site its message and wait for the answers of those that are not behind."""
        behind = {site for site in messages if self.lines[site].is_behind}
        answers = {site: self.lines[site].submit(message, timeout) for site, message in messages.items()}
        wait([answer for site, answer in answers.items() if site not in behind], timeout)
        return {site: _outcome(answer, site in behind, timeout) for site, answer in answers.items()}

    def renew(self) -> None:
        """Give every site another chance."""
        for line in self.lines.values():
            line.renew()

    def close(self) -> None:
        """End all lines."""
        for line in self.lines.values():
            line.close()


def _outcome(answer: Future[bytes], behind: bool, timeout: float) -> bytes | Exception:
    if answer.done():
        return answer.exception() or answer.result()  # type: ignore[return-value]
    if behind:
        return LineError("it is still busy with an earlier message")
    return LineError(f"it did not answer within {timeout:g} s")
