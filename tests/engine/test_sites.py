"""The driver's view of a job's sites, on a job that is only imagined."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from fedbilevel.engine.nvflare.desk import Desk, Window, bytes_array, unwrapped, wrapped
from fedbilevel.engine.nvflare.job import Job, JobLostError
from fedbilevel.engine.nvflare.relay import Relay
from fedbilevel.engine.nvflare.sites import Sites
from fedbilevel.engine.nvflare.submitted import SubmittedJob
from fedbilevel.engine.wire import encode


class Imagined(Job):
    """A desk in this process; its sites answer with what they got, twice."""

    def __init__(self, names: list[str]) -> None:
        self.desk = Desk(Relay(names, lambda site, number, message, timeout: 2 * message, retries=0))

    def ask(self, request: bytes) -> bytes:
        return self.desk.answer(request)

    def returned(self, gone: set[str]) -> set[str]:
        return gone & {"site-2"}

    def close(self) -> None:
        self.desk.relay.close()


@pytest.fixture
def job() -> Any:
    job = Imagined(["site-10", "site-2", "site-1"])
    yield job
    job.close()


def test_clients_are_sites_in_their_natural_order(job: Imagined) -> None:
    sites = Sites(job, 5.0)
    assert sites.names == ["site-1", "site-2", "site-10"]
    assert sites.exchange({0: b"a", 2: b"bc"}, 100) == {0: b"aa", 2: b"bcbc"}
    assert (sites.down, sites.up) == (3, 6)
    assert sites.label(2) == "client 2 (site-10)"


def test_exchanges_are_timed(job: Imagined) -> None:
    sites, exchanges = Sites(job, 5.0), deque[dict[int, float]]()
    with sites.hurried(lambda: None, exchanges):
        sites.exchange({0: b"a", 2: b"bc"}, 100)
        sites.exchange({1: b"a"}, 100)
    sites.exchange({0: b"a"}, 100)
    assert [sorted(seconds) for seconds in exchanges] == [[0, 2], [1]]
    assert all(0 <= seconds < 5 for each in exchanges for seconds in each.values())


def test_an_answer_beyond_the_limit_is_an_error(job: Imagined) -> None:
    replies = Sites(job, 5.0).exchange({0: b"a", 1: bytes(100)}, 100)
    assert replies[0] == b"aa"
    assert "it sent 200 bytes, and at most 100 are expected" in str(replies[1])


def test_a_site_that_is_not_in_the_job_is_not_alive(job: Imagined) -> None:
    assert Sites(job, 5.0, ["site-3", "site-1"]).alive == {1}


def test_a_lost_site_that_is_back_ends_the_job_if_wanted(
    job: Imagined, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedbilevel.engine.nvflare.sites._LOOK", -1.0)
    sites = Sites(job, 5.0, rejoin=True)
    sites.drop(2)
    sites.exchange({0: b"a"}, 10)  # site-10 is lost, and stays so
    sites.drop(1)
    with pytest.raises(JobLostError, match="site-2 can take part again, in a new job"):
        sites.exchange({0: b"a"}, 10)
    sites.renew()
    assert sites.alive == {0, 1, 2}


def test_a_request_is_done_once_however_often_it_is_posted() -> None:
    calls = []

    def call(site: str, number: int, message: bytes, timeout: float) -> bytes:
        calls.append(message)
        return message

    window = Window(Desk(Relay(["a"], call, retries=0)))
    request = wrapped(
        encode({"do": "exchange", "sites": ["a"], "timeout": 5.0, "limit": 9}, [bytes_array(b"x")])
    )
    replies = [window.command("", {"number": 1, "request": request}) for _ in range(2)]
    replies.append(window.command("", {"number": 1}))
    assert calls == [b"x"]
    assert replies[0] == replies[1] == replies[2]
    assert "error" in window.command("", {"number": 7})
    window.desk.relay.close()


def test_text_that_is_no_message_is_refused() -> None:
    assert unwrapped(wrapped(b"\x00\xff")) == b"\x00\xff"
    with pytest.raises(ValueError, match="not a message as text"):
        unwrapped("not base64!")


class Listed:
    """A session whose list of sites is set by the test."""

    def __init__(self, **times: float) -> None:
        self.times = times

    def get_connected_client_list(self) -> list[Any]:
        return [type("Client", (), {"name": n, "last_connect_time": t}) for n, t in self.times.items()]


def test_a_site_is_back_when_it_is_heard_after_it_was_lost() -> None:
    """A killed site is still in the server's list for a while: that is not a return."""
    job = object.__new__(SubmittedJob)
    job._lost = {}
    job.session = Listed(a=100.0, b=99.0)
    assert job.returned({"b"}) == set()
    job.session = Listed(a=120.0, b=99.0)
    assert job.returned({"b"}) == set()
    job.session = Listed(a=130.0, b=131.0)
    assert job.returned({"b"}) == {"b"}


class Cut(Listed):
    """A session whose first commands do not come through."""

    def __init__(self, lost: int, status: str = "RUNNING") -> None:
        super().__init__()
        self.lost, self.status = lost, status

    def do_app_command(self, job: str, topic: str, data: Any) -> Any:
        self.lost -= 1
        if self.lost >= 0:
            raise OSError("no route to host")
        return {"reply": wrapped(b"here")}

    def get_job_status(self, job: str) -> str:
        return self.status


@pytest.mark.parametrize(
    ("session", "comes"), [(Cut(3), True), (Cut(99), False), (Cut(1, "FINISHED:X"), False)]
)
def test_a_network_that_is_back_soon_loses_no_job(
    session: Cut, comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedbilevel.engine.nvflare.submitted._PAUSE", 0.0)
    job = object.__new__(SubmittedJob)
    job.id, job.number, job.session = "1", 0, session
    if comes:
        assert job.ask(b"there?") == b"here"
    else:
        with pytest.raises(JobLostError, match="no route to host"):
            job.ask(b"there?")
