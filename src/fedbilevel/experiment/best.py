"""Which row of a history is the best, and when to stop waiting for a better one."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tomllib
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from fedbilevel.name import nearest
from fedbilevel.tree import PyTree

Row: TypeAlias = dict[str, float]


def higher_is_better(name: str) -> bool:
    """Whether a metric of this name should grow: accuracies, scores and the like do, all else falls."""
    return _GROW.search(name.lower()) is not None


_GROW = re.compile(
    r"accuracy|score|precision|recall|reward|auc|auroc"  # anywhere in a name
    r"|(?<![a-z0-9])f1|f1(?![a-z0-9])"  # at one end of a part of it
    r"|(?<![a-z0-9])(acc|bleu|dice|iou|ndcg|r2)(?![a-z0-9])"  # a part of it
)


@dataclasses.dataclass(frozen=True)
class Best:
    """What the best point of a run is, and when to stop waiting for a better one.

    Args:
        metric: a column of the history.
        mode: "max" or "min"; default: by its name (`higher_is_better`).
        patience: stop after so many evaluations without improvement; None: never.
    """

    metric: str
    mode: Literal["max", "min"] | None = None
    patience: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in (None, "max", "min"):
            raise ValueError(f'mode is {self.mode!r}; it must be "max" or "min"')
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience is {self.patience}; it must be at least 1, or None for no early stop")

    def place(self, history: Sequence[Row]) -> int | None:
        """The number of the best row so far (the first of equals); None if no row has a finite value."""
        if history and not any(self.metric in row for row in history):
            raise ValueError(
                f"best is by {self.metric!r}, which no row has; there are {', '.join(history[-1])}"
                + nearest(self.metric, history[-1])
            )
        high = higher_is_better(self.metric) if self.mode is None else self.mode == "max"
        values = np.array([row.get(self.metric, np.nan) for row in history]) * (1 if high else -1)
        return (
            int(np.argmax(np.where(np.isfinite(values), values, -np.inf)))
            if np.isfinite(values).any()
            else None
        )

    def is_out_of_patience(self, history: Sequence[Row]) -> bool:
        """Whether the last `patience` rows brought nothing better."""
        place = self.place(history)
        return self.patience is not None and place is not None and len(history) - 1 - place >= self.patience


def recorded_best(folder: pathlib.Path) -> Best | None:
    """What a run's folder has in `[best]` of its settings; None if it has nothing there."""
    file = folder / "config.toml"
    table = tomllib.loads(file.read_text("utf-8")).get("best") if file.exists() else None
    return None if table is None else Best(**{key: value for key, value in table.items() if key != "kind"})


@dataclasses.dataclass(frozen=True)
class BestPoint:
    """Where the chosen metric was best: the step, the metric there, and the variables."""

    step: int
    value: float
    x: PyTree
    y: PyTree
