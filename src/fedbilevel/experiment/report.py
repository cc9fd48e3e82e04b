"""Finished runs read back from their folders, and compared at equal cost.

A run folder holds `manifest.json` (what was run) and `history.jsonl` (one evaluation a line, with the
cumulative cost). Runs that differ in their seed alone form a *variant*. Variants are compared at equal
rounds, equal bytes and equal oracle calls: the largest amount that every compared run reached. A run's
metric there is that of its last evaluation at or before that amount, so nothing is extrapolated.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import json
import math
import os
import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedbilevel.experiment.best import Row, higher_is_better
from fedbilevel.experiment.record import History
from fedbilevel.fed.ledger import Ledger

Path: TypeAlias = str | os.PathLike[str]
Numbers: TypeAlias = npt.NDArray[np.float64]

FORMAT = "fedbilevel run 1"

_COLUMNS = tuple(Ledger().columns())
COSTS: Mapping[str, tuple[str, ...]] = {
    "rounds": ("rounds",),
    "bytes": tuple(name for name in _COLUMNS if name.startswith("bytes_")),
    "calls": tuple(name for name in _COLUMNS if name.startswith("calls_")),
}
"""The three costs at which runs are compared, and the columns of the history that add up to each."""

_NOT_METRICS = {"step", "seconds", *_COLUMNS}


class RunError(ValueError):
    """A folder is not a run, or runs cannot be compared."""


# ----------------------------------------------------------------- reading


@dataclasses.dataclass(frozen=True)
class Run:
    """One run, read from its folder.

    Attributes:
        path: the folder.
        name: of the experiment.
        variant: what distinguishes it from other runs of the experiment, but for the seed.
        seed: of the run.
        status: "running", "done", "stopped" or "diverged".
        rows: its evaluations.
    """

    path: pathlib.Path
    name: str
    variant: str
    seed: int
    status: str
    rows: History

    @property
    def diverged(self) -> bool:
        """Whether a NaN or overflow ended it."""
        return self.status == "diverged"


def read_run(path: Path) -> Run:
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
    return Run(path=folder, rows=_read_history(folder / "history.jsonl"), **values)


def _read_history(file: pathlib.Path) -> History:
    """The rows of a history; none if the run was not yet evaluated."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line.decode("utf-8"))
        except ValueError as error:
            if number == len(lines):
                break
            raise RunError(f"{file}, line {number} is damaged: {error}. Only the last may be.") from None
        rows.append(_checked(row, f"{file}, line {number}"))
    return History(tuple(rows))


def _checked(row: Any, where: str) -> Row:
    if not isinstance(row, dict) or not all(isinstance(value, int | float) for value in row.values()):
        raise RunError(f"{where} is not an object of numbers")
    missing = [name for name in ("step", *_COLUMNS) if name not in row]
    if missing:
        raise RunError(f"{where} has no {', '.join(missing)}; every evaluation states its step and its cost")
    return row


def find_runs(paths: Path | Iterable[Path]) -> list[Run]:
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


# ------------------------------------------------- curves, shared with figures


def group(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs of each variant; its name has the experiment's in front where several are compared."""
    runs = list(runs)
    several = len({run.name for run in runs}) > 1
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(f"{run.name}: {run.variant}" if several else run.variant, []).append(run)
    return groups


def choose_metric(runs: Iterable[Run], metric: str | None = None) -> str:
    """The given metric, if all runs have it; by default an accuracy, else an error or a loss.

    Among several of a kind a balanced one or one of the test data goes first, then the order of the history
    counts.
    """
    names = _common([run.rows for run in runs if len(run.rows)])
    if metric is None:
        return min(names, key=_rank)
    if metric not in names:
        near = difflib.get_close_matches(metric, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RunError(f"not all runs have a metric {metric!r}; all have {', '.join(names)}{hint}")
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


def curve(run: Run, metric: str, cost: str) -> tuple[Numbers, Numbers]:
    """What a run had spent at each evaluation of a metric, and the metric there."""
    rows = [row for row in run.rows if metric in row]
    spent = [sum(row[column] for column in COSTS[cost]) for row in rows]
    return np.array(spent, float), np.array([row[metric] for row in rows], float)


def at(curve: tuple[Numbers, Numbers], amounts: npt.ArrayLike) -> Numbers:
    """A curve at some amounts, step-wise: its last value at or before each; NaN before its first."""
    spent, values = curve
    place = np.searchsorted(spent, amounts, side="right")
    return np.concatenate([[np.nan], values])[place]


def counted(runs: Iterable[Run], metric: str) -> list[Run]:
    """The runs whose numbers count: those that did not diverge and have evaluations of the metric."""
    return [run for run in runs if not run.diverged and any(metric in row for row in run.rows)]


# --------------------------------------------------------------- comparing


@dataclasses.dataclass(frozen=True)
class Score:
    """Mean and sample standard deviation of a metric over seeds; `std` is None for a single seed."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Score:
        """The score of one value a seed; of no value the mean is NaN."""
        if not values:
            return cls(math.nan, None)
        return cls(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)

    def __str__(self) -> str:
        if math.isnan(self.mean) and self.std is None:
            return "nan"
        return f"{self.mean:.4g} ± {'-' if self.std is None else f'{self.std:.2g}'}"


@dataclasses.dataclass(frozen=True)
class Line:
    """A variant in a comparison.

    Attributes:
        variant: its name.
        seeds: how many of its runs count.
        diverged: how many more diverged; these do not count.
        scores: the metric at equal "rounds", "bytes" and "calls", and at the "end" of each run.
    """

    variant: str
    seeds: int
    diverged: int
    scores: Mapping[str, Score]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Variants side by side; `str()` gives plain text.

    Attributes:
        metric: what is compared.
        better: "max" or "min".
        equal: the amount of each cost ("rounds", "bytes", "calls") at which they are compared.
        lines: one a variant.
        notes: what a reader must know of the runs, such as which diverged, one line each.
    """

    metric: str
    better: Literal["max", "min"]
    equal: Mapping[str, float]
    lines: tuple[Line, ...]
    notes: tuple[str, ...]

    def table(self) -> Table:
        """A table to print; a star marks the best mean of a column."""
        # Names are the user's: as `Text`, their brackets are no markup.
        table = Table(title=Text(self._title), caption=Text("\n".join(self.notes)), box=box.SIMPLE)
        for title in ("variant", "seeds", "diverged", *self._columns()):
            table.add_column(title, justify="left" if title == "variant" else "right")
        best = {place: self._best(place) for place in (*COSTS, "end")}
        for line in self.lines:
            stars = {place: "* " if line.variant == best[place] else "" for place in best}
            cells = [f"{stars[place]}{line.scores[place]}" for place in best]
            table.add_row(Text(line.variant), str(line.seeds), str(line.diverged), *cells)
        return table

    @property
    def _title(self) -> str:
        return f"{self.metric} (best: {self.better}, marked *)"

    def _columns(self) -> tuple[str, ...]:
        rounds, megabytes, calls = self.equal["rounds"], self.equal["bytes"] / 1e6, self.equal["calls"]
        return f"at {rounds:,.0f} rounds", f"at {megabytes:,.4g} MB", f"at {calls:,.0f} calls", "at the end"

    def _best(self, place: str) -> str | None:
        """The variant with the best mean; none if no mean is finite, or there is nothing to compare."""
        means = {line.variant: line.scores[place].mean for line in self.lines}
        finite = {variant: mean for variant, mean in means.items() if math.isfinite(mean)}
        if len(self.lines) < 2 or not finite:
            return None
        return (max if self.better == "max" else min)(finite, key=lambda variant: finite[variant])

    def __str__(self) -> str:
        table = self.table()
        table.title = table.caption = None
        text = io.StringIO()
        # As wide as it needs to be: where lines are cut is the affair of the reader's terminal.
        Console(file=text, width=10_000, color_system=None).print(table)
        lines = [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]
        return "\n".join([self._title, *lines, *self.notes])

    def to_json(self) -> str:
        """The same as JSON text; a number that is not finite is null."""
        return json.dumps(_finite(dataclasses.asdict(self)), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    """A tree of plain values with None for every NaN and infinity, which JSON cannot express."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compare(
    runs: Iterable[Run], metric: str | None = None, *, better: Literal["max", "min"] | None = None
) -> Comparison:
    """Compare variants by a metric, at equal rounds, bytes and oracle calls, and at their ends.

    Args:
        runs: of at least one variant, with one or more seeds each.
        metric: a column of all histories; default: see `choose_metric`.
        better: whether more or less of it is better; default: by its name (`higher_is_better`).

    A diverged run does not count: neither in a mean, nor in how far all runs came. The comparison says
    how many there are.
    """
    runs = list(runs)
    metric = choose_metric(runs, metric)
    if better not in (None, "max", "min"):
        raise RunError(f'better is {better!r}; it must be "max" or "min"')
    kept = counted(runs, metric)
    if not kept:
        raise RunError(f"no run that did not diverge has {metric}: there is nothing to compare")
    equal = {cost: min(float(curve(run, metric, cost)[0][-1]) for run in kept) for cost in COSTS}
    groups = group(runs)
    lines = tuple(_line(variant, members, metric, equal) for variant, members in groups.items())
    notes = tuple(note for variant, members in groups.items() for note in _notes(variant, members, metric))
    return Comparison(metric, better or ("max" if higher_is_better(metric) else "min"), equal, lines, notes)


def _line(variant: str, runs: Sequence[Run], metric: str, equal: Mapping[str, float]) -> Line:
    kept = counted(runs, metric)
    values = {cost: [float(at(curve(run, metric, cost), equal[cost])) for run in kept] for cost in COSTS}
    values["end"] = [float(curve(run, metric, "rounds")[1][-1]) for run in kept]
    scores = {place: Score.of(numbers) for place, numbers in values.items()}
    return Line(variant, len(kept), sum(run.diverged for run in runs), scores)


def _notes(variant: str, runs: Sequence[Run], metric: str) -> list[str]:
    kept = counted(runs, metric)
    repeated = [seed for seed, times in Counter(run.seed for run in kept).items() if times > 1]
    kinds = {
        "diverged and do not count": [run.seed for run in runs if run.diverged],
        f"have no {metric} yet and do not count": [
            run.seed for run in runs if not run.diverged and run not in kept
        ],
        "did not run to their end and count as far as they came": [
            run.seed for run in kept if run.status != "done"
        ],
        "occur more than once, so ± says too little": repeated,
    }
    return [
        f"{variant}: of {len(runs)} runs, those of seed {', '.join(map(str, sorted(seeds)))} {what}"
        for what, seeds in kinds.items()
        if seeds
    ]
