"""Messages to sites that may be slow, dead or back again: in order, each done exactly once.

Every site has a line of its own. A message carries a number; a site that gets the same number again answers
as it did, without doing the work twice, so a call that seems lost is simply repeated. Who does not answer in
time is left behind: others do not wait for it a second time. What it is sent meanwhile waits in its line, and
when it answers again it works that off and takes part in the next exchange.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from typing import NamedTuple, TypeAlias

from fedbilevel.engine.hurry import too_late

Call: TypeAlias = Callable[[str, int, bytes, float], bytes]
"""`call(site, number, message, timeout)` is what a site answers, or raises (`TimeoutError`, if too late)."""

_PAUSE = 1.0
"""Seconds before a site that cannot be reached is called again."""
_TIMES = 10_000
"""How many times of answers wait to be asked for."""
_MOST_WAITING = 256 << 20
"""Bytes that may wait for a site that does not answer; beyond it the site is given up."""


class LineError(RuntimeError):
    """Why there is no answer; its text goes on from "client 3: ..."."""


class Message(NamedTuple):
    """A message under way: its content, how long a call may take, its exchange, and the answer to come."""

    content: bytes
    timeout: float
    exchange: int
    answer: Future[bytes]


class Line:
    """The messages to one site.

    Args:
        site: its name.
        call: reaches it.
        retries: how often a message is repeated before the site is given up.

    Attributes:
        begun: when the message that the site is busy with was sent; infinity if there is none.
        times: of answers that nobody has asked for yet: the exchange, and the seconds that it took.
    """

    def __init__(self, site: str, call: Call, retries: int) -> None:
        self.site, self.call, self.retries = site, call, retries
        self.number, self.waiting, self.given_up = 0, 0, ""
        self.begun, self.times = math.inf, deque[tuple[int, float]](maxlen=_TIMES)
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._open: set[Future[bytes]] = set()
        self._left = False
        threading.Thread(target=self._work, name=f"line to {site}", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether an earlier message is not answered yet."""
        return any(not answer.done() for answer in self._open)

    @property
    def is_behind(self) -> bool:
        """Whether nobody waits for it any more, until it is done with all that it was sent."""
        return self._left and self.is_busy

    @property
    def busy_for(self) -> float:
        """For how many seconds it has been busy with its message; minus infinity if it is not."""
        return time.monotonic() - self.begun

    def leave(self) -> None:
        """Wait no longer."""
        self._left = True

    def submit(self, message: bytes, timeout: float, exchange: int = 0) -> Future[bytes]:
        """The answer to come."""
        answer: Future[bytes] = Future()
        if self.given_up:
            answer.set_exception(LineError(self.given_up))
            return answer
        self._left = self.is_behind
        self._open = {earlier for earlier in self._open if not earlier.done()} | {answer}
        self.waiting += len(message)
        if self.waiting > _MOST_WAITING:
            self.give_up(f"it was given up: {self.waiting >> 20} MB wait for it, and it does not answer")
        self._messages.put(Message(message, timeout, exchange, answer))
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
        while (message := self._messages.get()) is not None:
            self.number += 1
            self.begun = time.monotonic()
            try:
                reply = self._deliver(message.content, message.timeout)
                self.times.append((message.exchange, time.monotonic() - self.begun))
                message.answer.set_result(reply)
            except Exception as error:  # told to whoever waits for the answer
                message.answer.set_exception(error)
            self.begun = math.inf
            self.waiting -= len(message.content)

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

    def exchange(
        self, messages: Mapping[str, bytes], timeout: float, deadline: float | None = None, number: int = 0
    ) -> dict[str, bytes | Exception]:
        """Send each site its message and wait for the answers of those that are not behind.

        Who has not answered within `timeout` is behind. Who has only missed a deadline is not: it is waited
        for in the next exchange, too, as in a simulation.

        Args:
            messages: by site.
            timeout: seconds that a call may take.
            deadline: seconds to wait, if these are fewer.
            number: of the exchange, for `times`.
        """
        lines = {site: self.lines[site] for site in messages}
        patience = timeout if deadline is None else min(timeout, deadline)
        behind = {site for site, line in lines.items() if line.is_behind}
        answers = {site: lines[site].submit(message, timeout, number) for site, message in messages.items()}
        wait([answer for site, answer in answers.items() if site not in behind], patience)
        for site, answer in answers.items():
            if not answer.done() and (patience == timeout or lines[site].busy_for >= timeout):
                lines[site].leave()
        reason = f"it did not answer within {timeout:g} s" if patience == timeout else too_late(patience)
        return {site: _outcome(answer, site in behind, reason) for site, answer in answers.items()}

    def times(self) -> list[tuple[int, str, float]]:
        """Of the answers since the last call: the exchange, the site, and the seconds that it took."""
        found = []
        for site, line in self.lines.items():
            while line.times:
                exchange, seconds = line.times.popleft()
                found.append((exchange, site, seconds))
        return found

    def renew(self) -> None:
        """Give every site another chance."""
        for line in self.lines.values():
            line.renew()

    def close(self) -> None:
        """End all lines."""
        for line in self.lines.values():
            line.close()


def _outcome(answer: Future[bytes], behind: bool, reason: str) -> bytes | Exception:
    if answer.done():
        return answer.exception() or answer.result()  # type: ignore[return-value]
    if behind:
        return LineError("it is still busy with an earlier message")
    return LineError(reason)
