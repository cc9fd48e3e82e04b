"""Runs compared at equal cost.

Variants are compared at equal rounds, equal bytes and equal oracle calls: the largest amount that every
compared run reached. A run's metric there is that of its last evaluation at or before that amount, so
nothing is extrapolated. Runs that say what their best point is (`[best]`) are also compared there: with
`metric = "validation_accuracy_mean"`, the test accuracy at the step of the best validation accuracy.

A run whose steps cost nothing of a kind (no bytes where clients train alone) does not limit the others there,
and is compared at its end.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedbilevel.experiment.best import higher_is_better, recorded_best
from fedbilevel.experiment.directory import NOT_APPLICABLE, Directory
from fedbilevel.experiment.jsonl import standard
from fedbilevel.experiment.recorded import (
    Numbers,
    RecordedRun,
    RunError,
    at,
    choose_metric,
    costs_of,
    counted,
    curve,
    group,
)


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
        if math.isnan(self.mean):
            return "-"  # nothing was measured there: a run had spent more before its first row
        return f"{self.mean:.4g} ± {'-' if self.std is None else f'{self.std:.2g}'}"


@dataclasses.dataclass(frozen=True)
class Line:
    """A variant in a comparison.

    Attributes:
        variant: its name.
        seeds: how many of its runs count.
        diverged: how many more diverged; these do not count.
        scores: the metric at equal "rounds", "bytes" and "calls" (and "time"), at the "end" of each run, and
            at its "best" row where runs say what that is.
        wobble: the standard deviation of the metric over the last quarter of a run's evaluations.
    """

    variant: str
    seeds: int
    diverged: int
    scores: Mapping[str, Score]
    wobble: Score


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Variants side by side; `str()` gives plain text.

    Attributes:
        metric: what is compared.
        better: "max" or "min".
        equal: the amount of each cost ("rounds", "bytes", "calls", and "time" where all runs have a simulated
            one) at which they are compared.
        lines: one a variant.
        notes: what a reader must know of the runs, such as which diverged, one line each.
        chosen_by: the metrics by which runs choose their best row; empty if none does.
        cannot_run: the variants whose method cannot run over their links, and why: "n/a" in the table.
    """

    metric: str
    better: Literal["max", "min"]
    equal: Mapping[str, float]
    lines: tuple[Line, ...]
    notes: tuple[str, ...]
    chosen_by: tuple[str, ...] = ()
    cannot_run: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def table(self) -> Table:
        """A table to print; a star marks the best mean of a column."""
        # Names are the user's: as `Text`, their brackets are no markup.
        notes = [*(f"{variant}: n/a, {reason}" for variant, reason in self.cannot_run.items()), *self.notes]
        table = Table(title=Text(self._title), caption=Text("\n".join(notes)), box=box.SIMPLE)
        for title in ("variant", "seeds", "diverged", *self._columns()):
            table.add_column(title, justify="left" if title == "variant" else "right")
        places = (*self.equal, "end", *(["best"] if self.chosen_by else []))
        best = {place: self._best(place) for place in places}
        for line in self.lines:
            stars = {place: "* " if line.variant == best[place] else "" for place in best}
            cells = [*(f"{stars[place]}{line.scores[place]}" for place in best), f"{line.wobble.mean:.2g}"]
            if line.variant in self.cannot_run:
                cells = ["n/a"] * len(cells)
            table.add_row(Text(line.variant), str(line.seeds), str(line.diverged), *cells)
        return table

    @property
    def _title(self) -> str:
        return f"{self.metric} (best: {self.better}, marked *)"

    def _columns(self) -> tuple[str, ...]:
        rounds, megabytes, calls = self.equal["rounds"], self.equal["bytes"] / 1e6, self.equal["calls"]
        costs = [f"at {rounds:,.0f} rounds", f"at {megabytes:,.4g} MB", f"at {calls:,.0f} calls"]
        if "time" in self.equal:
            costs.append(f"at {self.equal['time']:,.4g} s")
        chosen = [f"at best {' or '.join(self.chosen_by)}"] if self.chosen_by else []
        return *costs, "at the end", *chosen, "wobble"

    def _best(self, place: str) -> str | None:
        """The variant with the best mean; none if no mean is finite, or there is nothing to compare."""
        means = {line.variant: line.scores[place].mean for line in self.lines}
        finite = {variant: mean for variant, mean in means.items() if math.isfinite(mean)}
        if len(self.lines) < 2 or not finite:
            return None
        return (max if self.better == "max" else min)(finite, key=lambda variant: finite[variant])

    def __str__(self) -> str:
        return plain(self.table())

    def to_json(self) -> str:
        """The same as JSON text; a number that is not finite is null."""
        return json.dumps(standard(dataclasses.asdict(self)), indent=2, allow_nan=False)


def plain(table: Table) -> str:
    """A table as text, with its title above and its caption below."""
    title, caption = str(table.title), str(table.caption or "")
    table.title = table.caption = None
    text = io.StringIO()
    # As wide as it needs to be: where lines are cut is the affair of the reader's terminal.
    Console(file=text, width=10_000, color_system=None).print(table)
    lines = [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]
    return "\n".join([title, *lines, *caption.splitlines()])


def compare(
    runs: Iterable[RecordedRun], metric: str | None = None, *, better: Literal["max", "min"] | None = None
) -> Comparison:
    """Compare variants by a metric, at equal rounds, bytes and oracle calls, and at their ends.

    And at equal simulated time, if all runs have one.

    Args:
        runs: of at least one variant, with one or more seeds each.
        metric: a column of all histories; default: see `choose_metric`.
        better: whether more or less of it is better; default: by its name (`higher_is_better`).

    A diverged run does not count: neither in a mean, nor in how far all runs came. The comparison says
    how many there are. Nor does one whose method cannot run over its links: it is "n/a", with the reason.
    """
    runs = list(runs)
    metric = choose_metric(runs, metric)
    if better not in (None, "max", "min"):
        raise RunError(f'better is {better!r}; it must be "max" or "min"')
    kept = counted(runs, metric)
    if not kept:
        raise RunError(f"no run that did not diverge has {metric}: there is nothing to compare")
    ends = {cost: [end for run in kept for end in _ends(run, metric, cost)] for cost in costs_of(kept)}
    equal = {cost: min(spent, default=0.0) for cost, spent in ends.items()}
    groups = group(runs)
    cannot_run = {
        variant: reason for variant, members in groups.items() for run in members if (reason := _reason(run))
    }
    chosen_by = {best.metric for run in kept if (best := recorded_best(run.path)) is not None}
    lines = [_line(variant, members, metric, equal, bool(chosen_by)) for variant, members in groups.items()]
    notes = tuple(note for variant, members in groups.items() for note in _notes(variant, members, metric))
    better = better or ("max" if higher_is_better(metric) else "min")
    return Comparison(metric, better, equal, tuple(lines), notes, tuple(sorted(chosen_by)), cannot_run)


def _reason(run: RecordedRun) -> str:
    """Why there is no such run; empty if there is."""
    return str(Directory(run.path).manifest()["reason"]) if run.status == NOT_APPLICABLE else ""


def _ends(run: RecordedRun, metric: str, cost: str) -> list[float]:
    """How much a run has spent at its last evaluation of a metric; nothing if its steps are free."""
    spent = float(curve(run, metric, cost)[0][-1])
    return [spent] if spent > 0 or run.rows[-1]["step"] == 0 else []


def _line(
    variant: str, runs: Sequence[RecordedRun], metric: str, equal: Mapping[str, float], with_best: bool
) -> Line:
    kept = counted(runs, metric)
    values = {cost: [float(at(curve(run, metric, cost), equal[cost])) for run in kept] for cost in equal}
    values["end"] = [float(curve(run, metric, "rounds")[1][-1]) for run in kept]
    if with_best:
        values["best"] = [value for run in kept if (value := _at_best(run, metric)) is not None]
    scores = {place: Score.of(numbers) for place, numbers in values.items()}
    wobble = Score.of([_wobble(curve(run, metric, "rounds")[1]) for run in kept])
    return Line(variant, len(kept), sum(run.diverged for run in runs), scores, wobble)


def _at_best(run: RecordedRun, metric: str) -> float | None:
    """The metric in the run's best row; None if the run does not say what that is, or has none."""
    best = recorded_best(run.path)
    place = None if best is None else best.place(run.rows)
    return None if place is None else run.rows[place].get(metric, math.nan)


def _wobble(values: Numbers) -> float:
    """How much the last quarter of the evaluations varies."""
    return float(np.std(values[-max(2, len(values) // 4) :]))


def _steps(run: RecordedRun) -> float:
    return run.rows[-1]["step"]


def _notes(variant: str, runs: Sequence[RecordedRun], metric: str) -> list[str]:
    kept = counted(runs, metric)
    repeated = [seed for seed, times in Counter(run.seed for run in kept).items() if times > 1]
    kinds = {
        "diverged and do not count": [run.seed for run in runs if run.diverged],
        f"have no {metric} yet and do not count": [
            run.seed for run in runs if not (run.diverged or run.status == NOT_APPLICABLE or run in kept)
        ],
        "did not run to their end and count as far as they came": [
            run.seed for run in kept if run.status != "done"
        ],
        "made other numbers of steps than the longest, and stand with these at the end": [
            run.seed for run in kept if run.status == "done" and _steps(run) != max(map(_steps, kept))
        ],
        "occur more than once, so ± says too little": repeated,
    }
    return [
        f"{variant}: of {len(runs)} runs, those of seed {', '.join(map(str, sorted(seeds)))} {what}"
        for what, seeds in kinds.items()
        if seeds
    ]
