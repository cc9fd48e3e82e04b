"""Statistics of a federation: how many samples of which class each client has."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedbilevel.data.batches import Samples
from fedbilevel.data.clients import Clients
from fedbilevel.data.error import DataError

if TYPE_CHECKING:  # loaded where a picture is drawn: it takes longer than all the rest
    from matplotlib.axes import Axes

Counts: TypeAlias = npt.NDArray[np.int64]

_CLIENTS_IN_TEXT = 20
_CLIENTS_IN_PICTURE = 60
_CLASSES_NAMED_IN_PICTURE = 30
_INK, _GREY, _LOWER, _UPPER = "#222222", "#8a8a8a", "#2f6db3", "#f0a13a"


@dataclasses.dataclass(frozen=True, eq=False)
class Statistics:
    """What `describe` counted. `print` it for a table; `draw` it for a picture.

    Attributes:
        counts: `(clients, classes)`: samples of either level; a sample that both levels share counts once.
        lower, upper: the same of one level.
        test: the same of the clients' own test data, which `counts` leaves out; None: they have none apart.
        classes: names of the classes.
        width: of the text, in characters.
    """

    counts: Counts
    lower: Counts
    upper: Counts
    test: Counts | None
    classes: tuple[str, ...]
    width: int = 100

    @property
    def sizes(self) -> Counts:
        """`(clients,)`: how many samples each client has."""
        return self.counts.sum(axis=1)

    @property
    def classes_per_client(self) -> Counts:
        """`(clients,)`: how many classes each client has samples of."""
        return (self.counts > 0).sum(axis=1)

    @property
    def distances(self) -> npt.NDArray[np.float64]:
        """`(clients,)`: total variation distance of a client's labels from all: `½ Σ_c |p_ic − p_c|`."""
        overall = self.counts.sum(axis=0) / self.counts.sum()
        return np.abs(self.counts / self.sizes[:, None] - overall).sum(axis=1) / 2

    @property
    def heterogeneity(self) -> float:
        """The mean of `distances`: 0 if all clients have the same labels, towards 1 if none are shared."""
        return float(self.distances.mean())

    def __str__(self) -> str:
        return "\n".join([*_summary(self), "", *_table(self)])

    def draw(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write a picture: one bubble for each client and class, its area the count; bars for sizes."""
        from matplotlib.figure import Figure

        shown = min(len(self.counts), _CLIENTS_IN_PICTURE)
        width, height = 2.6 + 0.17 * max(shown, 24), 2.6 + 0.24 * min(len(self.classes), 32)
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
        bubbles, bars = figure.subplots(2, 1, sharex=True, height_ratios=[height - 1.6, 1.2])
        _draw_bubbles(bubbles, self.counts[:shown], self.classes)
        _draw_bars(bars, self.lower[:shown].sum(axis=1), (self.counts - self.lower)[:shown].sum(axis=1))
        figure.suptitle("\n".join(_title(self, shown)), x=0.01, ha="left", color=_INK, fontsize=10)
        figure.savefig(path, dpi=150)
        return pathlib.Path(path)


def describe(clients: Clients, classes: Sequence[str] = (), *, width: int = 100) -> Statistics:
    """Count the samples of every client and class.

    Args:
        clients: whose samples are dicts with the entry `labels`, whole numbers from 0 on. They are counted
            as the clients see them: wrong ones too.
        classes: their names, such as `dataset.classes`; default: their numbers.
        width: of the text, in characters. Classes that do not fit are summed in one column.

    Example:
        >>> clients = Clients([{"labels": np.array([0, 0, 1])}, {"labels": np.array([1])}])
        >>> describe(clients).counts.tolist()
        [[2, 1], [0, 1]]
    """
    number = _number(clients, classes)
    lower, upper, test = (_counts(level, _keys(level), number) for level in _levels(clients).values())
    together = lower + upper
    if clients.lower.flat["labels"] is clients.upper.flat["labels"]:
        together = _counts(clients.lower, _union(_keys(clients.lower), _keys(clients.upper)), number)
    names = tuple(classes) or tuple(str(label) for label in range(number))
    own_test = None if _same(clients.test, clients.upper) else test
    return Statistics(together, lower, upper, own_test, names, width)


def _levels(clients: Clients) -> dict[str, Samples]:
    return {"lower": clients.lower, "upper": clients.upper, "test": clients.test}


def _same(one: Samples, other: Samples) -> bool:
    return one.flat["labels"] is other.flat["labels"] and one.rows is other.rows


def _number(clients: Clients, classes: Sequence[str]) -> int:
    """How many classes there are: those with names, or those up to the largest label."""
    largest = max(int(_labels(samples, level).max()) for level, samples in _levels(clients).items())
    if classes and len(classes) <= largest:
        raise DataError(f"there are names for {len(classes)} classes, but the labels go up to {largest}")
    return len(classes) or largest + 1


def _labels(samples: Samples, level: str) -> npt.NDArray[Any]:
    if not isinstance(samples.flat, Mapping) or "labels" not in samples.flat:
        found = sorted(samples.flat) if isinstance(samples.flat, Mapping) else type(samples.flat).__name__
        raise DataError(
            f"the {level}-level samples must be dicts with the entry 'labels' to be counted by class; "
            f"found {found}"
        )
    labels = np.asarray(samples.flat["labels"])
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
        raise DataError(
            f"the {level}-level labels must be whole numbers from 0 on, one a sample; they have the type "
            f"{labels.dtype} and the shape {labels.shape}"
        )
    return labels


def _keys(samples: Samples) -> Counts:
    """`(total, 2)`: client and row of every sample of a level."""
    sizes = np.asarray(samples.size)
    rows = np.arange(sizes.sum()) if samples.rows is None else np.asarray(samples.rows)
    return np.stack([np.repeat(np.arange(len(sizes)), sizes), rows], axis=1).astype(np.int64)


def _counts(samples: Samples, keys: Counts, classes: int) -> Counts:
    """`(clients, classes)`: how many keys there are of each client and label."""
    clients, (owner, rows) = len(samples.size), keys.T
    cells = owner * classes + np.asarray(samples.flat["labels"]).astype(np.int64)[rows]
    return np.bincount(cells, minlength=clients * classes).reshape(clients, classes)


def _union(lower: Counts, upper: Counts) -> Counts:
    """Every key as often as it occurs in one level, in whichever it occurs more often."""
    keys, places = np.unique(np.concatenate([lower, upper]), axis=0, return_inverse=True)
    parts = np.split(places.reshape(-1), [len(lower)])
    return np.repeat(keys, np.max([np.bincount(part, minlength=len(keys)) for part in parts], axis=0), axis=0)


def _summary(statistics: Statistics) -> list[str]:
    lower, upper, total = (c.sum() for c in (statistics.lower, statistics.upper, statistics.counts))
    test = "" if statistics.test is None else f"; besides, {statistics.test.sum():,} to test"
    return [
        f"{len(statistics.counts):,} clients, {total:,} samples, {len(statistics.classes)} classes "
        f"(lower level {lower:,}, upper level {upper:,}{test})",
        f"samples a client: {_range(statistics.sizes)}",
        f"classes a client: {_range(statistics.classes_per_client)}",
        f"heterogeneity {statistics.heterogeneity:.3f} (mean total variation distance from all labels)",
    ]


def _range(values: Counts) -> str:
    return f"min {values.min():,}, median {np.median(values):,.6g}, max {values.max():,}"


def _table(statistics: Statistics) -> list[str]:
    """A row for each of the first clients, one for the others together, and one for all."""
    counts, names = _fitting(statistics)
    cut = _CLIENTS_IN_TEXT if len(counts) > _CLIENTS_IN_TEXT else len(counts)
    rows = [(str(client), counts[client]) for client in range(cut)]
    if others := len(counts) - cut:
        rows.append((f"{others:,} more client{'s' * (others > 1)}", counts[cut:].sum(axis=0)))
    rows.append(("all", counts.sum(axis=0)))
    cells = [["client", *names, "all"]]
    cells += [[name, *(f"{n:,}" if n else "·" for n in row), f"{row.sum():,}"] for name, row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def _fitting(statistics: Statistics) -> tuple[Counts, list[str]]:
    """The columns that fit the width; classes that do not are summed in a last one."""
    names = [name if len(name) <= 10 else name[:9] + "…" for name in statistics.classes]
    totals = [f"{total:,}" for total in statistics.counts.sum(axis=0)]
    needed = np.cumsum([2 + max(map(len, pair)) for pair in zip(names, totals, strict=True)])
    margin = len("1,000 more clients") + 2 + len(f"{statistics.counts.sum():,}")
    if margin + needed[-1] <= statistics.width:
        return statistics.counts, names
    rest = 2 + max(len(f"{len(names)} more"), len(f"{statistics.counts.sum():,}"))
    kept = int(np.searchsorted(needed, statistics.width - margin - rest, side="right"))
    more = statistics.counts[:, kept:].sum(axis=1, keepdims=True)
    return np.hstack([statistics.counts[:, :kept], more]), [*names[:kept], f"{len(names) - kept} more"]


def _title(statistics: Statistics, shown: int) -> list[str]:
    clients = len(statistics.counts)
    part = f" (the first {shown} are shown)" if shown < clients else ""
    return [
        f"{clients:,} clients{part}, {statistics.counts.sum():,} samples; "
        f"largest bubble: {statistics.counts[:shown].max():,}",
        f"heterogeneity {statistics.heterogeneity:.3f} (mean total variation distance from all labels)",
    ]


def _draw_bubbles(axes: Axes, counts: Counts, classes: tuple[str, ...]) -> None:
    client, label = np.nonzero(counts)
    area = 130 * counts[client, label] / counts.max()
    axes.scatter(client, label, s=area, color=_LOWER, linewidths=0, zorder=2)
    step = -(-len(classes) // _CLASSES_NAMED_IN_PICTURE)
    axes.set_yticks(range(0, len(classes), step), classes[::step])
    axes.set_ylim(len(classes) - 0.4, -0.6)
    axes.set_ylabel("class")
    axes.grid(color="#eeeeee", zorder=0)
    _plain(axes)


def _draw_bars(axes: Axes, lower: Counts, upper: Counts) -> None:
    label = "lower level" if upper.any() else "both levels share them"
    axes.bar(range(len(lower)), lower, 0.7, color=_LOWER, label=label, zorder=2)
    if upper.any():
        axes.bar(range(len(lower)), upper, 0.7, lower, color=_UPPER, label="upper level only", zorder=2)
    axes.set_xlim(-0.8, len(lower) - 0.2)
    axes.locator_params(axis="x", integer=True)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("client")
    axes.set_ylabel("samples")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=8, borderpad=0)
    _plain(axes)


def _plain(axes: Axes) -> None:
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, labelsize=8, labelcolor=_INK)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(_GREY)
