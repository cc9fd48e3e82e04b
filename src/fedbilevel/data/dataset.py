"""A data set in memory: named columns for training and for testing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy.typing as npt

from fedbilevel.data.error import DataError

Table: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""Columns of equal length: row i of every column belongs to sample i."""


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Samples to train on and samples to test with, not yet divided among clients.

    Attributes:
        name: what it is called in a report.
        train, test: columns: `inputs` (images as float32 in [0, 1], `(samples, height, width, channels)`;
            text as int32 codes), `labels` (int32), and what else the set has: `coarse` (labels of
            superclasses), `owner` (number of the natural client of a sample).
        classes: names of the labels.
        owners: names of the natural clients; empty where there are none.

    Example:
        >>> import numpy as np
        >>> columns = {"inputs": np.zeros((4, 2), np.float32), "labels": np.array([0, 1, 1, 0])}
        >>> Dataset("mine", columns, columns, ("no", "yes")).size
        4
    """

    name: str
    train: Table
    test: Table
    classes: tuple[str, ...]
    owners: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for part, columns in (("train", self.train), ("test", self.test)):
            lengths = {name: len(column) for name, column in columns.items()}
            if len(set(lengths.values())) > 1:
                raise DataError(f"the {part} columns of {self.name!r} differ in length: {lengths}")
            if not {"inputs", "labels"} <= set(columns):
                raise DataError(
                    f"{self.name!r} has the {part} columns {sorted(columns)}; it needs inputs, labels"
                )

    @property
    def size(self) -> int:
        """How many training samples there are."""
        return len(self.train["labels"])
