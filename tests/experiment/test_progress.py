"""The progress bar: what it says, and when it says nothing."""

import io
import sys
from typing import Any

import jax
import pytest

from fedbilevel import FedAvgS, Saddle, solve
from fedbilevel.experiment.progress import news, progress_bar
from fedbilevel.fed.ledger import Ledger

ROW = {"step": 4.0, "error": 0.12345678, "loss": 2.0, "a": 1.0, "b": 1.0} | Ledger().columns()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: Any, stream: io.StringIO, asked: bool | None) -> str:
    """What a bar of ten steps writes to standard error."""
    monkeypatch.setattr(sys, "stderr", stream)
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "150")
    with progress_bar(asked, 10, "my steps") as tick:
        tick(3, ROW | {"bytes_down": 1_500_000, "bytes_up": 250_000, "bytes_edge": 250_000})
        tick(7, ROW | {"bytes_down": 3_000_000})
    return stream.getvalue()


def test_the_news_are_metrics_megabytes_and_speed() -> None:
    spent = {"bytes_down": 1_500_000, "bytes_up": 250_000, "bytes_edge": 250_000}
    assert news(ROW | spent, 12.345) == "error 0.1235, loss 2, a 1, 2.0 MB, 12.3 steps/s"
    assert news({"step": 0}, None) == "0.0 MB"


def test_a_terminal_shows_steps_metrics_megabytes_and_the_time_left(monkeypatch: Any) -> None:
    text = shown(monkeypatch, Terminal(), None)
    for part in ("my steps", "10/10", "error 0.1235", "3.0 MB", "0:00:00"):
        assert part in text


@pytest.mark.parametrize(("stream", "asked"), [(io.StringIO(), None), (Terminal(), False)])
def test_it_is_quiet_where_nobody_looks_or_wants_it(monkeypatch: Any, stream: Any, asked: Any) -> None:
    assert shown(monkeypatch, stream, asked) == ""


def test_it_can_be_asked_for(monkeypatch: Any) -> None:
    assert "10/10" in shown(monkeypatch, io.StringIO(), True)


def test_a_run_ticks_to_its_last_step_also_if_it_goes_on(monkeypatch: Any) -> None:
    known = Saddle.random(jax.random.key(0), 3, 2)
    problem, clients, method = known.problem(), known.clients(), FedAvgS(0.05, 0.1)
    half = solve(problem, clients, method, 2, every=2)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "150")
    solve(problem, clients, method, 5, every=2, start=half)
    text = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "7/7" in text
    assert "error" in text


def test_the_bar_is_there_while_a_run_begins(monkeypatch: Any) -> None:
    known, terminal = Saddle.random(jax.random.key(0), 3, 2), Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "150")
    seen: list[str] = []
    first = {"callback": lambda now: seen.append(terminal.getvalue())}
    solve(known.problem(), known.clients(), FedAvgS(0.05, 0.1), 2, every=2, **first)
    assert "0/2" in seen[0], "the first evaluation is of the start"
