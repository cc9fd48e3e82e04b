"""What tests need that kill processes in the middle of a run."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import psutil


def rows(run: pathlib.Path) -> list[dict[str, Any]]:
    """The complete rows of the history in a run's folder."""
    file = run / "history.jsonl"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def until(condition: Callable[[], Any], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it takes longer than {seconds} seconds"
        time.sleep(0.01)


def offspring(process: int) -> list[psutil.Process]:
    """All processes that one has started, and that these have started."""
    return list(psutil.Process(process).children(recursive=True))


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
