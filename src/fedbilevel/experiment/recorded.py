"""Runs read back from their folders, and their curves of a metric against its cost.

A run folder holds `manifest.json` (what was run) and `history.jsonl` (one evaluation a line, with the
cumulative cost). Runs that differ in their seed alone form a *variant*.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedbilevel.experiment.best import Row
from fedbilevel.experiment.jsonl import parsed
from fedbilevel.experiment.record import History
from fedbilevel.fed.ledger import SIMULATED_SECONDS, Ledger
from fedbilevel.name import nearest

Path: TypeAlias = str | os.PathLike[str]
Numbers: TypeAlias = npt.NDArray[np.float64]

FORMAT = "fedbilevel run 1"

_COLUMNS = tuple(Ledger().columns())
_LATER = ("calls_g_x",)
"""Columns that histories of before do not have: nothing of the kind was spent."""

COSTS: dict[str, tuple[str, ...]] = {
    "rounds": ("rounds",),
    "bytes": tuple(name for name in _COLUMNS if name.startswith("bytes_")),
    "calls": tuple(name for name in _COLUMNS if name.startswith("calls_")),
}
"""The three costs at which all runs are compared, and the columns of the history that add up to each."""

TIME: dict[str, tuple[str, ...]] = {"time": (SIMULATED_SECONDS,)}
"""The cost that only runs under simulated conditions have."""

_NOT_METRICS = {"step", "seconds", SIMULATED_SECONDS, *_COLUMNS}


class RunError(ValueError):
    """A folder is not a run, or runs cannot be compared."""


# ----------------------------------------------------------------- reading


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """One run, read from its folder.

    Attributes:
        path: the folder.
        name: of the experiment.
        variant: what distinguishes it from other runs of the experiment, but for the seed.
        seed: of the run.
        status: "running", "done", "stopped" early, "diverged", "interrupted" or "failed".
        rows: its evaluations.
        clients: how many there are in its federation.
    """

    path: pathlib.Path
    name: str
    variant: str
    seed: int
    status: str
    rows: History
    clients: int = 1

    @property
    def diverged(self) -> bool:
        """Whether a NaN or overflow ended it."""
        return self.status == "diverged"


def read_run(path: Path) -> RecordedRun:
    """Read a run folder. A last line of the history that was cut off (a killed run) is left out."""
    folder = pathlib.Path(path)
    try:
        manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    except FileNotFoundError:
        raise RunError(f"{folder} has no manifest.json: it is not a run folder") from None
    except ValueError as error:
        raise RunError(f"{folder / 'manifest.json'} is not JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        seen = manifest.get("format") if isinstance(manifest, dict) else manifest
        raise RunError(f"{folder / 'manifest.json'} has the format {seen!r}, not {FORMAT!r}")
    fields = {"name": str, "variant": str, "seed": int, "status": str}
    wrong = [field for field, kind in fields.items() if not isinstance(manifest.get(field), kind)]
    if wrong:
        raise RunError(f"{folder / 'manifest.json'} lacks {', '.join(wrong)}, or has another type there")
    values = {field: manifest[field] for field in fields}
    rows, clients = _read_history(folder / "history.jsonl"), int(manifest.get("clients", 1))
    return RecordedRun(path=folder, rows=rows, clients=clients, **values)


def _read_history(file: pathlib.Path) -> History:
    """The rows of a history; none if the run was not yet evaluated."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = parsed(line.decode("utf-8"))
        except ValueError as error:
            if number == len(lines):
                break
            raise RunError(f"{file}, line {number} is damaged: {error}. Only the last may be.") from None
        rows.append(_checked(row, f"{file}, line {number}"))
    return History(tuple(rows))


def _checked(row: Any, where: str) -> Row:
    if not isinstance(row, dict) or not all(isinstance(value, int | float) for value in row.values()):
        raise RunError(f"{where} is not an object of numbers")
    row = dict.fromkeys(_LATER, 0) | row
    missing = [name for name in ("step", *_COLUMNS) if name not in row]
    if missing:
        raise RunError(f"{where} has no {', '.join(missing)}; every evaluation states its step and its cost")
    return row


def find_runs(paths: Path | Iterable[Path]) -> list[RecordedRun]:
    """All runs at or below some folders, in the order of their paths; each once."""
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    folders: dict[pathlib.Path, pathlib.Path] = {}
    for path in map(pathlib.Path, given):
        found = [path] if (path / "manifest.json").is_file() else _below(path)
        folders |= {folder.resolve(): folder for folder in found}
    if not folders:
        raise RunError("no folder was given; name a run folder, or a folder above several")
    return [read_run(folder) for folder in folders.values()]


def _below(path: pathlib.Path) -> list[pathlib.Path]:
    found = sorted(file.parent for file in path.rglob("manifest.json"))
    if not found:
        what = "there is no run at or below" if path.is_dir() else "there is no folder"
        raise RunError(
            f"{what} {path}. A run folder is what an experiment writes: config.toml, manifest.json "
            "and history.jsonl. Name one, or a folder above several."
        )
    return found


# ------------------------------------- curves, for comparisons and figures


def group(runs: Iterable[RecordedRun]) -> dict[str, list[RecordedRun]]:
    """The runs of each variant; its name has the experiment's in front where several are compared."""
    runs = list(runs)
    several = len({run.name for run in runs}) > 1
    groups: dict[str, list[RecordedRun]] = {}
    for run in runs:
        groups.setdefault(f"{run.name}: {run.variant}" if several else run.variant, []).append(run)
    return groups


def choose_metric(runs: Iterable[RecordedRun], metric: str | None = None) -> str:
    """The given metric, if all runs have it; by default an accuracy, else an error or a loss.

    Among several of a kind a balanced one or one of the test data goes first, then the order of the history
    counts.
    """
    names = _common([run.rows for run in runs if len(run.rows)])
    if metric is None:
        return min(names, key=_rank)
    if metric not in names:
        listed = ", ".join(names)
        raise RunError(f"not all runs have a metric {metric!r}; all have {listed}{nearest(metric, names)}")
    return metric


def _common(histories: Sequence[History]) -> list[str]:
    """Names of the numbers that all histories have, in the order of the first."""
    columns = [{name: None for row in rows for name in row if name not in _NOT_METRICS} for rows in histories]
    names = [name for name in columns[0] if all(name in other for other in columns)] if columns else []
    if not names:
        raise RunError("the runs have no metric in common" if columns else "no run has been evaluated yet")
    return names


def _rank(name: str) -> tuple[int, bool]:
    kinds = ("accuracy", "error", "loss")
    kind = next((place for place, kind in enumerate(kinds) if kind in name), len(kinds))
    return kind, "test" not in name and "balanced" not in name


def costs_of(runs: Iterable[RecordedRun]) -> tuple[str, ...]:
    """The costs at which some runs can be compared: with the simulated time, if all of them have it."""
    timed = all(SIMULATED_SECONDS in row for run in runs for row in run.rows)
    return (*COSTS, *TIME) if timed else tuple(COSTS)


def curve(run: RecordedRun, metric: str, cost: str) -> tuple[Numbers, Numbers]:
    """What a run had spent at each evaluation of a metric, and the metric there."""
    rows = [row for row in run.rows if metric in row]
    spent = [sum(row[column] for column in (COSTS | TIME)[cost]) for row in rows]
    return np.array(spent, float), np.array([row[metric] for row in rows], float)


def at(curve: tuple[Numbers, Numbers], amounts: npt.ArrayLike) -> Numbers:
    """A curve at some amounts, step-wise: its last value at or before each; NaN before its first."""
    spent, values = curve
    place = np.searchsorted(spent, amounts, side="right")
    return np.concatenate([[np.nan], values])[place]


def counted(runs: Iterable[RecordedRun], metric: str) -> list[RecordedRun]:
    """The runs whose numbers count: those that did not diverge and have evaluations of the metric."""
    return [run for run in runs if not run.diverged and any(metric in row for row in run.rows)]
