"""Evaluations and runs in memory, as the tests of recorded runs and of comparisons need them."""

import pathlib
from typing import Any

from fedbilevel.experiment.record import History
from fedbilevel.experiment.recorded import RecordedRun
from fedbilevel.fed.ledger import Ledger


def row(step: int, rounds: int, size: int, calls: int, **metrics: float) -> dict[str, float]:
    """An evaluation; bytes go down and up, calls to two oracles, so that a sum that forgets one is seen."""
    spent = dict.fromkeys(Ledger().columns(), 0) | {"rounds": rounds}
    spent |= {"bytes_down": size - size // 2, "bytes_up": size // 2}
    spent |= {"calls_f_x": calls - calls // 2, "calls_g_yy": calls // 2, "samples": 99 * calls}
    return {"step": step, **metrics, **spent, "seconds": 0.1 * step}


def run(
    variant: str, seed: int, values: list[float], per: tuple[int, int, int], **changes: Any
) -> RecordedRun:
    """A run in memory whose every evaluation cost `per` (rounds, bytes, calls) more than the one before."""
    metric = changes.pop("metric", "accuracy")
    rows = [row(i, *(i * unit for unit in per), **{metric: value}) for i, value in enumerate(values)]
    fields = {"name": "figure 1", "status": "done"} | changes
    return RecordedRun(pathlib.Path(variant), variant=variant, seed=seed, rows=History(tuple(rows)), **fields)
