"""What it cost to reach a certain level of a metric: rounds, bytes, oracle calls a client, and time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from fedbilevel.experiment.best import Row, higher_is_better
from fedbilevel.experiment.recorded import RecordedRun, choose_metric, costs_of, group
from fedbilevel.experiment.report import Score, plain
from fedbilevel.fed.ledger import SIMULATED_SECONDS

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "rounds": ("rounds",),
    "MB": ("bytes_down", "bytes_up", "bytes_edge"),
    "∇f": ("calls_f_x", "calls_f_y"),
    "∇g": ("calls_g_x", "calls_g_y"),
    "Jv": ("calls_g_xy",),
    "Hv": ("calls_g_yy",),
    "samples": ("samples",),
}
"""What is counted, and the columns of a history that add up to it; all but rounds a client's, on average."""

WITH_TIME: Mapping[str, tuple[str, ...]] = {**COLUMNS, "seconds": (SIMULATED_SECONDS,)}
"""The same with the simulated time, which is everybody's."""

COMMUNICATION = ("rounds", "MB")
"""What a client that is alone does not spend: it has nobody to talk to."""


@dataclasses.dataclass(frozen=True)
class Reached:
    """A variant's way to the level.

    Attributes:
        variant: its name.
        runs: how many there are.
        reached: how many of them got there.
        costs: what a client of these had spent at their first evaluation there, by the names of `COLUMNS`, or
            `WITH_TIME` where all runs have a simulated time; NaN for none, and for the communication of a
            client that is alone.
    """

    variant: str
    runs: int
    reached: int
    costs: Mapping[str, Score]


@dataclasses.dataclass(frozen=True)
class Levels:
    """All variants' ways to a level of a metric; `str()` gives plain text."""

    metric: str
    level: float
    lines: tuple[Reached, ...]

    def table(self) -> Table:
        """A table to print."""
        sign = "≥" if higher_is_better(self.metric) else "≤"
        table = Table(
            title=Text(f"spent by a client until {self.metric} {sign} {self.level:g}"), box=box.SIMPLE
        )
        for title in ("variant", "reached", *self.lines[0].costs):
            table.add_column(title, justify="left" if title == "variant" else "right")
        for line in self.lines:
            cells = ["-" if math.isnan(score.mean) else str(score) for score in line.costs.values()]
            table.add_row(Text(line.variant), f"{line.reached}/{line.runs}", *cells)
        return table

    def __str__(self) -> str:
        return plain(self.table())


def reach(runs: Iterable[RecordedRun], level: float, metric: str | None = None) -> Levels:
    """What every variant spent until a metric first reached a level, mean ± std over the runs that did.

    Args:
        runs: of one or more variants.
        level: at least so much of an accuracy or score, at most so much of anything else.
        metric: a column of all histories; default: see `choose_metric`.
    """
    runs = list(runs)
    metric = choose_metric(runs, metric)
    columns = WITH_TIME if "time" in costs_of(runs) else COLUMNS
    lines = [_line(variant, members, metric, level, columns) for variant, members in group(runs).items()]
    return Levels(metric, level, tuple(lines))


def _line(
    variant: str,
    runs: Sequence[RecordedRun],
    metric: str,
    level: float,
    columns: Mapping[str, tuple[str, ...]],
) -> Reached:
    spent = [_spent(row, run, columns) for run in runs if (row := _first(run, metric, level)) is not None]
    costs = {name: Score.of([each[name] for each in spent]) for name in columns}
    return Reached(variant, len(runs), len(spent), costs)


def _first(run: RecordedRun, metric: str, level: float) -> Row | None:
    """The first row in which the metric is as good as the level."""
    sign = 1 if higher_is_better(metric) else -1
    return next((row for row in run.rows if metric in row and sign * row[metric] >= sign * level), None)


def _spent(row: Row, run: RecordedRun, columns: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    amounts = {name: float(sum(row[column] for column in parts)) for name, parts in columns.items()}
    share = {"rounds": 1.0, "MB": 1e6 * run.clients, "seconds": 1.0}
    alone = COMMUNICATION if run.clients == 1 else ()
    return {
        name: math.nan if name in alone else amount / share.get(name, run.clients)
        for name, amount in amounts.items()
    }
