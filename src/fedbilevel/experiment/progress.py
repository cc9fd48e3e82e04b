"""The progress bar of a run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedbilevel.fed.ledger import Ledger

Tick: TypeAlias = Callable[[int, Mapping[str, float]], None]
"""Called with the number of steps done since the last call, and the newest row."""

_COSTS = {*Ledger(seconds=0.0).columns(), "step"}


@contextlib.contextmanager
def progress_bar(shown: bool | None, steps: int, title: str = "steps", done: int = 0) -> Iterator[Tick]:
    """Steps, metrics, megabytes sent, steps a second, the time so far and the time left; on standard error.

    The time goes on while a start or a step, which may take hours, has not ended.

    Args:
        shown: whether; None: when standard error is a terminal.
        steps: how many steps there are in all.
        title: stands before the bar.
        done: how many of them were done before.
    """
    columns = (
        *(TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn()),
        *(TextColumn("{task.fields[news]}"), TimeElapsedColumn(), TextColumn("/"), TimeRemainingColumn()),
    )
    hidden = not (sys.stderr.isatty() if shown is None else shown)
    with Progress(*columns, console=Console(stderr=True), disable=hidden) as bar:
        task = bar.add_task(title, total=steps, completed=done, news="")

        def tick(now: int, row: Mapping[str, float]) -> None:
            bar.advance(task, now)
            speed = bar.tasks[task].speed
            bar.update(task, news=news(row, speed))

        yield tick


def news(row: Mapping[str, float], speed: float | None) -> str:
    """Up to three metrics of a row, the megabytes sent, and the speed, in a few words."""
    metrics = [f"{name} {value:.4g}" for name, value in row.items() if name not in _COSTS][:3]
    sent = sum(row.get(f"bytes_{way}", 0) for way in ("down", "up", "edge")) / 1e6
    pace = [] if speed is None else [f"{speed:.3g} steps/s"]
    return ", ".join([*metrics, f"{sent:,.1f} MB", *pace])
