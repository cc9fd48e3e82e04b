"""What is done to samples around a partition: long tails, splits into levels, wrong labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedbilevel.data.dataset import Table
from fedbilevel.data.error import DataError
from fedbilevel.data.partition import Number, Rows, column, groups


@dataclasses.dataclass(frozen=True)
class LongTail:
    """A long-tailed choice of samples: classes get exponentially rarer.

    Class c of the C that occur keeps `most · factor^(c/(C−1))` samples, rounded up, or all it has if these
    are fewer. With `most=6000` and `factor=0.01`, MNIST keeps 6,000 (it has 5,923), 3,597, 2,157, ..., 60.

    Args:
        factor: the last class's share of the first, above 0 and at most 1.
        most: samples of the first class; None: as many as the largest class has.
        shuffle: keep random samples of a class; default: its first ones, as they are stored.

    Reference: Cui et al., Class-balanced loss based on effective number of samples, CVPR 2019; the
    numbers for MNIST are those of Tarzanagh et al., FedNest, ICML 2022.
    """

    factor: Number = 0.01
    most: int | None = None
    shuffle: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.factor <= 1:
            raise DataError(f"LongTail: factor is {self.factor!r}; it must be above 0 and at most 1")
        if self.most is not None and self.most < 1:
            raise DataError(f"LongTail: most is {self.most!r}; it must be at least 1, or None")

    def __call__(self, samples: Table, rng: np.random.Generator) -> Rows:
        """The rows kept, ascending."""
        classes = groups(column(self, samples, "labels"))
        if not classes:
            raise DataError(f"{self} needs samples; there are none")
        if self.shuffle:
            classes = [rng.permutation(rows) for rows in classes]
        sizes = self.sizes([len(rows) for rows in classes])
        return np.sort(np.concatenate([rows[:size] for rows, size in zip(classes, sizes, strict=True)]))

    def sizes(self, available: Sequence[int]) -> list[int]:
        """How many samples each class keeps of those available."""
        most = max(available) if self.most is None else self.most
        wanted = most * self.factor ** np.linspace(0, 1, len(available))
        # A rounding error must not make 61 of 60: whole numbers are taken as such, the rest is rounded up.
        return np.minimum(available, np.ceil(wanted * (1 - 1e-12)).astype(int)).tolist()


@dataclasses.dataclass(frozen=True)
class Split:
    """A client's samples in three parts: training (what remains), validation and test.

    Sizes are rounded; a part that should have samples but rounds to none takes one from the largest part.

    Args:
        validation, test: shares of a client's samples, from 0 on, together below 1.
        shuffle: random parts; False: in order, training samples first, test samples last.
        gap: samples left out between two parts that are in order, where neighbours overlap: windows of 81
            characters, each 10 after the last, have none in common with `gap=8`. Shares are of what is left.
    """

    validation: Number = 0.2
    test: Number = 0.0
    shuffle: bool = True
    gap: int = 0

    def __post_init__(self) -> None:
        if not (self.validation >= 0 and self.test >= 0 and self.validation + self.test < 1):
            raise DataError(
                f"{self}: validation and test are shares from 0 on, together below 1, so that samples "
                "remain for training"
            )
        if self.gap < 0 or (self.gap and self.shuffle):
            raise DataError(f"{self}: gap is at least 0, and only parts in order (shuffle = False) have one")

    def __call__(self, rows: Rows, rng: np.random.Generator) -> tuple[Rows, Rows, Rows]:
        """Training, validation and test rows of one client, each ascending if `rows` are."""
        order = rng.permutation(len(rows)) if self.shuffle else np.arange(len(rows))
        sizes = self._sizes(len(rows))
        gaps = self.gap * (np.cumsum(sizes > 0) - 1)
        ends = np.cumsum(sizes) + gaps
        train, validation, test = (
            rows[np.sort(order[end - size : end])] for end, size in zip(ends, sizes, strict=True)
        )
        return train, validation, test

    def _sizes(self, samples: int) -> Rows:
        shares = np.array([1 - self.validation - self.test, self.validation, self.test])
        total = samples - self.gap * (np.count_nonzero(shares) - 1)
        if total < np.count_nonzero(shares):
            raise DataError(
                f"{samples} samples cannot be split into {np.count_nonzero(shares)} parts by {self}; give "
                "every client more samples (`at_least`, or fewer clients), or leave a part out"
            )
        sizes = np.diff(np.rint(np.cumsum(shares) * total).astype(int), prepend=0)
        for part in np.flatnonzero((shares > 0) & (sizes == 0)):
            sizes[sizes.argmax()] -= 1
            sizes[part] = 1
        return sizes


@dataclasses.dataclass(frozen=True)
class LabelNoise:
    """Wrong labels: of every client, exactly `round(rate · size)` samples get another class, uniformly.

    Args:
        rate: share of wrong labels, between 0 and 1: one number for all clients, or one for each.
        until: the last client's rate. The rates then go from `rate`, the first client's, to `until` in
            equal steps. None: they do not.
    """

    rate: Number | tuple[Number, ...] = 0.0
    until: Number | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rate, tuple) and self.until is not None:
            raise DataError("LabelNoise: give one rate for each client, or a first one and `until`; not both")
        given = self.rate if isinstance(self.rate, tuple) else (self.rate,)
        if not all(0 <= rate <= 1 for rate in (*given, 0 if self.until is None else self.until)):
            raise DataError(f"{self}: rates must lie between 0 and 1")

    def rates(self, clients: int) -> npt.NDArray[np.float64]:
        """The rate of each client."""
        if not isinstance(self.rate, tuple):
            return np.linspace(self.rate, self.rate if self.until is None else self.until, clients)
        if len(self.rate) != clients:
            raise DataError(
                f"LabelNoise has {len(self.rate)} rates for {clients} clients; give one for each, or one "
                "number for all"
            )
        return np.array(self.rate, float)

    def __call__(
        self,
        labels: npt.NDArray[Any],
        rows_of_clients: Sequence[Rows],
        classes: int,
        rng: np.random.Generator,
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """New labels, and which of them are wrong.

        Args:
            labels: `(samples,)`, whole numbers from 0 to `classes − 1`.
            rows_of_clients: the rows of each client; a row belongs to at most one.
            classes: how many there are.
            rng: source of the draws. Each client draws from a stream of its own, so that its wrong
                labels do not depend on the other clients' rates.
        """
        _check_labels(self, labels, classes)
        noisy, corrupted = labels.copy(), np.zeros(len(labels), bool)
        streams = rng.spawn(len(rows_of_clients))
        for rate, rows, stream in zip(self.rates(len(streams)), rows_of_clients, streams, strict=True):
            wrong = stream.permutation(rows)[: round(rate * len(rows))]
            shift = stream.integers(1, classes, len(wrong))
            noisy[wrong] = (labels[wrong].astype(np.int64) + shift) % classes
            corrupted[wrong] = True
        return noisy, corrupted


def _check_labels(noise: LabelNoise, labels: npt.NDArray[Any], classes: int) -> None:
    if classes < 2:
        raise DataError(f"{noise} needs at least two classes to choose a wrong one; there are {classes}")
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"{noise} needs labels that are whole numbers, one a sample; they have the type {labels.dtype} "
            f"and the shape {labels.shape}"
        )
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise DataError(
            f"{noise} needs labels from 0 to {classes - 1}; they lie in {labels.min()}..{labels.max()}"
        )
