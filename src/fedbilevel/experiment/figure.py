"""Curves of a metric against what it cost: rounds, megabytes, oracle calls and simulated seconds."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedbilevel.experiment.best import higher_is_better
from fedbilevel.experiment.recorded import (
    Numbers,
    Path,
    RecordedRun,
    at,
    choose_metric,
    costs_of,
    counted,
    curve,
    group,
)

_LABELS = {
    "rounds": "communication rounds",
    "bytes": "communicated megabytes",
    "calls": "oracle calls",
    "time": "simulated seconds",
}
_UNITS = {"rounds": 1.0, "bytes": 1e6, "calls": 1.0, "time": 1.0}

# Colours of Okabe and Ito, which people with any kind of colour blindness can tell apart. Four line styles
# and seven colours have no common factor, so 28 variants differ, and neighbours differ in both.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))

_STYLE: Any = {
    "font.family": "serif",
    "font.serif": ["STIXGeneral", "DejaVu Serif"],  # both come with matplotlib
    "mathtext.fontset": "stix",
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.4,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "axes.formatter.limits": (-3, 4),
    "axes.formatter.use_mathtext": True,
    "svg.hashsalt": "fedbilevel",  # the same figure is the same file
}

_DECADES = 100.0
"""An error whose largest value is so many times its smallest is drawn on a logarithmic axis."""


class Band(NamedTuple):
    """A variant's curve: the mean over seeds at some amounts, and the mean ± one standard deviation."""

    spent: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers


def draw_curves(
    runs: Iterable[RecordedRun], metric: str | None, folder: Path, stem: str = "comparison"
) -> list[pathlib.Path]:
    """Draw a metric against rounds, megabytes and oracle calls, as PNG and SVG files.

    And against the simulated time, where all runs have one.

    Each variant is a line, the mean over its seeds, in a band of ± one sample standard deviation. Diverged
    runs are no part of the mean: each is a thin line that ends in a cross, and the legend counts them.

    Args:
        runs: of one or more variants, with one or more seeds each.
        metric: a column of all histories; None: see `choose_metric`.
        folder: where to write; made if it does not exist.
        stem: `<stem>.png` has all panels, `<stem>-rounds.png`, `<stem>-bytes.png`, `<stem>-calls.png` and
            `<stem>-time.png` one each.

    Returns:
        The files written.
    """
    runs = list(runs)
    metric = choose_metric(runs, metric)
    target = pathlib.Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    costs = costs_of(runs)
    panels = {stem: costs} | {f"{stem}-{cost}": (cost,) for cost in costs}
    # matplotlib reads its style from a global table only; it is as before when this is done.
    with matplotlib.rc_context(_STYLE):
        return [
            file
            for name, shown in panels.items()
            for file in _save(_figure(group(runs), metric, shown), target / name)
        ]


def _save(figure: Figure, path: pathlib.Path) -> list[pathlib.Path]:
    """Write a figure in both formats, without the date, which would make equal figures differ."""
    png, svg = path.with_name(f"{path.name}.png"), path.with_name(f"{path.name}.svg")
    figure.savefig(png, dpi=300, metadata={"Software": None})
    figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return [png, svg]


def _figure(groups: Mapping[str, Sequence[RecordedRun]], metric: str, costs: Sequence[str]) -> Figure:
    """One row of panels that share the vertical axis, with one legend above them."""
    lines = -(-len(groups) // (3 if len(costs) > 1 else 1))
    size = (2.35 * len(costs) + 0.35 * (len(costs) == 1), 2.1 + 0.2 * lines)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
    for panel, cost in zip(panels, costs, strict=True):
        _panel(panel, groups, metric, cost)
    panels[0].set_ylabel(metric.replace("_", " "))
    if _spans_decades(itertools.chain(*groups.values()), metric):
        panels[0].set_yscale("log")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=-(-len(groups) // lines))
    return figure


def _panel(panel: Axes, groups: Mapping[str, Sequence[RecordedRun]], metric: str, cost: str) -> None:
    looks = zip(itertools.cycle(_COLOURS), itertools.cycle(_LINES), strict=False)
    for (variant, runs), (colour, style) in zip(groups.items(), looks, strict=False):
        diverged = [run for run in runs if run.diverged]
        label = f"{variant} ({len(diverged)} of {len(runs)} diverged)" if diverged else variant
        band = _band([curve(run, metric, cost) for run in counted(runs, metric)])
        spent = band.spent / _UNITS[cost]
        panel.fill_between(spent, band.low, band.high, color=colour, alpha=0.18, linewidth=0)
        panel.plot(spent, band.mean, color=colour, linestyle=style, label=label)
        for run in diverged:
            _draw_diverged(panel, run, metric, cost, color=colour, linestyle=style)
    panel.set_xlabel(_LABELS[cost])
    panel.set_axisbelow(True)


def _draw_diverged(panel: Axes, run: RecordedRun, metric: str, cost: str, **look: Any) -> None:
    """A thin line that ends in a cross. It leaves the panel where it blows up: it sets no limits."""
    spent, values = curve(run, metric, cost)
    last = [len(spent) - 1]
    panel.add_artist(
        Line2D(spent / _UNITS[cost], values, linewidth=0.6, marker="x", markersize=4, markevery=last, **look)
    )


def _band(curves: Sequence[tuple[Numbers, Numbers]]) -> Band:
    """Mean and deviation over seeds, step-wise, where all seeds have values.

    The lower edge is not below the smallest seed: an error's band would leave a logarithmic axis.
    """
    if not curves:
        return Band(*(np.zeros(0) for _ in range(4)))
    grid = _grid([spent for spent, _ in curves])
    values = np.array([at(one, grid) for one in curves])
    mean = values.mean(0)
    spread = values.std(0, ddof=1) if len(values) > 1 else np.zeros_like(mean)
    return Band(grid, mean, np.maximum(mean - spread, values.min(0)), mean + spread)


def _grid(amounts: Sequence[Numbers]) -> Numbers:
    """Amounts at which to draw: as many as one run has evaluations, between where all begin and one ends.

    Of the amounts of all n runs together every n-th is taken, from the end. Where the runs were evaluated
    at equal amounts these are the grid, and elsewhere no run is drawn much finer than it was evaluated.
    """
    first, last = max(spent[0] for spent in amounts), min(spent[-1] for spent in amounts)
    together = np.sort(np.concatenate([*amounts, np.full(len(amounts), first)]))
    return np.unique(together[(first <= together) & (together <= last)][:: -len(amounts)])


def _spans_decades(runs: Iterable[RecordedRun], metric: str) -> bool:
    """Whether an error (a metric that should fall) is positive and varies by decades."""
    values = np.array([row[metric] for run in runs for row in run.rows if metric in row])
    values = values[np.isfinite(values)]
    if higher_is_better(metric) or not values.size or values.min() <= 0:
        return False
    return bool(values.max() >= _DECADES * values.min())
