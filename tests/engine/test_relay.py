"""Lines to sites: in order, exactly once, and nobody waits twice for the dead."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from fedbilevel.engine.nvflare.relay import LineError, Relay

TIMEOUT = 0.5


class Sites:
    """Sites that note what they did; `slow` ones answer when they are let go, `dead` ones never."""

    def __init__(self) -> None:
        self.done: dict[str, list[bytes]] = {"a": [], "b": []}
        self.last: dict[str, tuple[int, bytes]] = {}
        self.slow: dict[str, threading.Event] = {}
        self.dead: set[str] = set()
        self.calls = itertools.count()

    def call(self, site: str, number: int, message: bytes, timeout: float) -> bytes:
        next(self.calls)
        if site in self.dead:
            time.sleep(timeout)
            raise TimeoutError(f"it did not answer within {timeout:g} s")
        if message == b"bad":
            raise LineError("ValueError: bad")
        if site in self.slow and not self.slow[site].wait(timeout):
            raise TimeoutError("too late")
        if self.last.get(site, (0, b""))[0] != number:  # as a site does: the same number is done once
            self.done[site].append(message)
            self.last[site] = number, message.upper()
        return self.last[site][1]


@pytest.fixture
def sites() -> Sites:
    return Sites()


@pytest.fixture
def relay(sites: Sites) -> Iterator[Relay]:
    relay = Relay(("a", "b"), sites.call, retries=2)
    yield relay
    relay.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_everybody_answers(relay: Relay) -> None:
    assert relay.exchange({"a": b"x", "b": b"y"}, TIMEOUT) == {"a": b"X", "b": b"Y"}


def test_slow_site_is_left_out_then_does_everything_in_order_and_is_back(relay: Relay, sites: Sites) -> None:
    sites.slow["b"] = threading.Event()
    first = relay.exchange({"a": b"1", "b": b"1"}, TIMEOUT)
    assert first["a"] == b"1"
    assert "did not answer within 0.5 s" in str(first["b"])
    second = relay.exchange({"a": b"2", "b": b"2"}, TIMEOUT)
    assert "still busy with an earlier message" in str(second["b"])
    sites.slow["b"].set()
    until(lambda: not relay.lines["b"].is_behind)
    assert relay.exchange({"a": b"3", "b": b"3"}, TIMEOUT) == {"a": b"3", "b": b"3"}
    assert sites.done == {"a": [b"1", b"2", b"3"], "b": [b"1", b"2", b"3"]}


def test_one_that_misses_a_deadline_is_waited_for_again_and_timed(relay: Relay, sites: Sites) -> None:
    """Until it has been busy for a whole timeout: then it is behind, and nobody waits."""
    sites.slow["b"] = threading.Event()
    begin = time.monotonic()
    for number in (1, 2):
        replies = relay.exchange({"a": b"x", "b": b"x"}, 5.0, 0.2, number)
        assert replies["a"] == b"X"
        assert str(replies["b"]) == "it did not answer within the deadline of 0.2 s"
    assert 0.4 <= time.monotonic() - begin < 5.0
    relay.exchange({"a": b"x", "b": b"x"}, 0.3, 0.2, 3)
    replies = relay.exchange({"a": b"x", "b": b"x"}, 0.3, 0.2, 4)
    assert "still busy with an earlier message" in str(replies["b"])
    assert {(number, site) for number, site, _ in relay.times()} == {(number, "a") for number in (1, 2, 3, 4)}
    sites.slow["b"].set()
    until(lambda: not relay.lines["b"].is_busy)
    times = {number: seconds for number, site, seconds in relay.times() if site == "b"}
    assert times.keys() == {1, 2, 3, 4}
    assert times[1] >= 0.4, "from when it was sent"
    assert times[2] < times[1], "it was sent when the one before was done"
    assert relay.times() == []


def test_a_dead_site_costs_one_timeout_and_is_given_up(relay: Relay, sites: Sites) -> None:
    sites.dead.add("b")
    begin = time.monotonic()
    for _ in range(50):
        assert relay.exchange({"a": b"x", "b": b"x"}, TIMEOUT)["a"] == b"X"
    assert time.monotonic() - begin < 5 * TIMEOUT, "50 exchanges took fewer than 5 timeouts"
    until(lambda: relay.alive == {"a"})
    assert "given up after 3 calls" in str(relay.exchange({"b": b"x"}, TIMEOUT)["b"])


def test_a_site_that_was_given_up_can_be_renewed(relay: Relay, sites: Sites) -> None:
    sites.dead.add("b")
    relay.exchange({"b": b"x"}, TIMEOUT)
    until(lambda: relay.alive == {"a"})
    sites.dead.clear()
    relay.renew()
    assert relay.exchange({"b": b"y"}, TIMEOUT) == {"b": b"Y"}


def test_a_site_that_raises_is_not_asked_again_and_lives(relay: Relay, sites: Sites) -> None:
    replies = relay.exchange({"a": b"x", "b": b"bad"}, TIMEOUT)
    assert str(replies["b"]) == "ValueError: bad"
    assert next(sites.calls) == 2, "one call each: what has failed is not repeated"
    assert relay.exchange({"b": b"y"}, TIMEOUT) == {"b": b"Y"}


def test_a_lost_answer_does_not_do_the_work_twice(
    relay: Relay, sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site has done it, and the answer gets lost: the second call brings the first one's answer."""
    monkeypatch.setattr("fedbilevel.engine.nvflare.relay._PAUSE", 0.01)
    honest, lost = sites.call, []

    def losing(site: str, number: int, message: bytes, timeout: float) -> bytes:
        answer = honest(site, number, message, timeout)
        if not lost:
            lost.append(answer)
            raise ConnectionError("the answer was lost")
        return answer

    relay.lines["a"].call = losing
    assert relay.exchange({"a": b"x"}, 20.0) == {"a": b"X"}
    assert lost == [b"X"]
    assert sites.done["a"] == [b"x"]


def test_too_much_waiting_gives_a_site_up(
    relay: Relay, sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedbilevel.engine.nvflare.relay._MOST_WAITING", 100)
    sites.slow["b"] = threading.Event()
    for _ in range(3):
        relay.exchange({"b": bytes(60)}, TIMEOUT)
    assert relay.alive == {"a"}
