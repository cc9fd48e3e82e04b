"""From a data set to clients: share, long tail, partition, split and label noise, in this order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fedbilevel.data.clients import Clients
from fedbilevel.data.dataset import Dataset, Table
from fedbilevel.data.error import DataError
from fedbilevel.data.partition import Number, Partition, Rows
from fedbilevel.name import check_choice

# Annotations say what is called, not which class: a function of one's own will do at every stage.
Thinning: TypeAlias = Callable[[Table, np.random.Generator], Rows]
Splitting: TypeAlias = Callable[[Rows, np.random.Generator], tuple[Rows, Rows, Rows]]
Corruption: TypeAlias = Callable[..., tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]]


def federate(
    dataset: Dataset,
    partition: Partition,
    *,
    with_test: bool = False,
    share: Number = 1.0,
    long_tail: Thinning | None = None,
    split: Splitting | None = None,
    upper: str = "validation",
    noise: Corruption | None = None,
    places: str | None = None,
    numbered: bool = False,
    batch_size: int | None = None,
    weights: Literal["uniform", "size"] | Any = "uniform",
    seed: int = 0,
    collect: Callable[..., Clients] | None = None,
) -> Clients:
    """Clients with the training samples of a data set.

    What clients see is a dict of `inputs`, `labels` (whole numbers as int32), with noise `corrupted` (bool),
    and where asked for `place` and `client` (int32). All clients share one copy, which holds only samples
    that are used. Each stage draws from a stream of its own: another split or noise leaves the partition as
    it is.

    Args:
        dataset: a loaded one, or your own arrays: `Dataset("mine", train, test, classes)`.
        partition: which samples each client gets, such as `Iid(100)`.
        with_test: deal out the data set's test samples too, behind its training samples. Test then on the
            clients' own test samples alone: `dataset.test` has become part of what clients train on.
        share: of the samples, drawn at random before all else; the others are left out.
        long_tail: which samples there are at all, such as `LongTail(0.01)`; None: all of them.
        split: `Split(0.2)`: training samples are the lower level's, validation samples the upper level's,
            test samples the clients' own test data. Without a split, or where it leaves no validation
            samples, both levels share the training samples.
        upper: "validation": as said; "training": both levels share the training samples, and the validation
            samples are `Clients.validation`, which only metrics see: to choose the step that is reported.
        noise: wrong labels among the training samples, such as `LabelNoise(0.4)`. Without a split, the upper
            level sees them too.
        places: adds the column `place`, for variables with one entry a training sample. "own": the position
            among its client's training samples, from 0; "all": among those of all clients, one client after
            another. Other samples have 0, which means nothing.
        numbered: adds the column `client`, the number of the client that a sample belongs to.
        batch_size, weights: as in `Clients`.
        seed: of all draws.
        collect: makes clients of all columns and the row numbers of every client at each level,
            `collect(columns, lower, upper, test=, validation=, batch_size=, weights=)`; default: `shared`.

    Example:
        >>> from fedbilevel.data.partition import Iid
        >>> columns = {"inputs": np.zeros((6, 2), np.float32), "labels": np.array([0, 1, 1, 0, 1, 0])}
        >>> federate(Dataset("mine", columns, columns, ("no", "yes")), Iid(clients=3)).n
        3
    """
    stages = {"partition": partition, "long_tail": long_tail, "split": split, "noise": noise}
    for name, stage in stages.items():
        _check_stage(name, stage, optional=name != "partition")
    _check_upper(upper)
    tail_rng, partition_rng, split_rng, noise_rng, share_rng = _streams(seed, 5)
    dataset = _chosen(dataset, with_test, share, share_rng)
    kept = np.arange(dataset.size) if long_tail is None else long_tail(dataset.train, tail_rng)
    own = _dealt(dataset, partition, kept, partition_rng)
    train, validation, test = _levels(own, split, split_rng)
    labels, extra = _noisy(dataset, noise, train, noise_rng)
    if places is not None:
        extra["place"] = _placed(dataset.size, train, places)
    if numbered:
        extra["client"] = _numbered(dataset.size, own)
    for rows, level in ((train, "training"), (validation, "validation"), (test, "test")):
        _check_everybody_has_some(rows or (), level)
    return (collect or shared)(
        {"inputs": dataset.train["inputs"], "labels": labels, **extra},
        train,
        validation if upper == "validation" else None,
        test=test,
        validation=validation if upper == "training" else None,
        batch_size=batch_size,
        weights=weights,
    )


def shared(
    columns: Table,
    lower: Sequence[Rows],
    upper: Sequence[Rows] | None = None,
    *,
    test: Sequence[Rows] | None = None,
    validation: Sequence[Rows] | None = None,
    **settings: Any,
) -> Clients:
    """Clients that share one copy of the columns, which holds only samples that are used.

    Args:
        columns: of a whole data set.
        lower, upper, test, validation: row numbers of every client at each level.
        settings: as for `Clients.indexed`.
    """
    parts = [rows for level in (lower, upper, test, validation) for rows in level or ()]
    used = np.unique(np.concatenate([np.zeros(0, np.int64), *parts]))

    def renumbered(level: Sequence[Rows]) -> list[Rows]:
        return [np.searchsorted(used, rows) for rows in level]

    return Clients.indexed(
        {name: column[used] for name, column in columns.items()},
        renumbered(lower),
        upper and renumbered(upper),
        test=test and renumbered(test),
        validation=validation and renumbered(validation),
        **settings,
    )


def _streams(seed: int, count: int) -> list[np.random.Generator]:
    return [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(count)]


def _check_stage(name: str, stage: Any, *, optional: bool) -> None:
    """Refuse the slips that would otherwise end in an error somewhere inside."""
    if isinstance(stage, type):
        raise DataError(f"{name} is the class {stage.__name__} itself; make one: {stage.__name__}(...)")
    if not (callable(stage) or (optional and stage is None)):
        raise DataError(f"{name} is {stage!r}; it must be a callable object, see `fedbilevel.data`")


def _check_upper(upper: Any) -> None:
    check_choice("upper", upper, ("validation", "training"), DataError)


def _chosen(dataset: Dataset, with_test: bool, share: Number, rng: np.random.Generator) -> Dataset:
    """The data set with those training samples alone that may be dealt out, in their order."""
    if not 0 < share <= 1:
        raise DataError(f"share is {share!r}; it must be above 0 and at most 1")
    if share == 1 and not with_test:
        return dataset
    tables = [dataset.train, dataset.test] if with_test else [dataset.train]
    sizes = [len(table["labels"]) for table in tables]
    kept = np.sort(rng.permutation(sum(sizes))[: max(round(share * sum(sizes)), 1)])
    rows = [kept[kept < sizes[0]], kept[kept >= sizes[0]] - sizes[0]][: len(tables)]
    names = [name for name in dataset.train if all(name in table for table in tables)]
    parts = {name: [table[name][own] for table, own in zip(tables, rows, strict=True)] for name in names}
    return dataclasses.replace(dataset, train={name: np.concatenate(part) for name, part in parts.items()})


def _dealt(dataset: Dataset, partition: Partition, kept: Rows, rng: np.random.Generator) -> list[Rows]:
    """The rows of each client in the whole data set; a partition sees only those kept."""
    whole = len(kept) == dataset.size
    table = dataset.train if whole else {name: column[kept] for name, column in dataset.train.items()}
    parts = [np.asarray(rows, np.int64) for rows in partition(table, rng)]
    places = np.concatenate([np.zeros(0, np.int64), *parts])
    if len(places) and not 0 <= places.min() <= places.max() < len(kept):
        raise DataError(
            f"{partition} gave rows from {places.min()} to {places.max()}; there are {len(kept)} samples, "
            "counted from 0"
        )
    if len(np.unique(places)) < len(places):
        raise DataError(
            f"{partition} gave some samples twice, so that wrong labels and validation samples would be "
            "shared by accident; for clients that share samples use `Clients.indexed`"
        )
    return [kept[part] for part in parts]


def _levels(
    own: list[Rows], split: Splitting | None, rng: np.random.Generator
) -> tuple[list[Rows], list[Rows] | None, list[Rows] | None]:
    """Training, validation and test rows of each client; None for a part that nobody has."""
    if split is None:
        return own, None, None
    parts = []
    for client, (rows, stream) in enumerate(zip(own, rng.spawn(len(own)), strict=True)):
        try:
            parts.append(split(rows, stream))
        except DataError as error:
            raise DataError(f"client {client}: {error}") from None
    train, validation, test = ([part[level] for part in parts] for level in range(3))
    return train, validation if any(map(len, validation)) else None, test if any(map(len, test)) else None


def _noisy(
    dataset: Dataset, noise: Corruption | None, train: Sequence[Rows], rng: np.random.Generator
) -> tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
    """The labels as int32, with noise if asked for; and the column that tells which are wrong."""
    labels = np.asarray(dataset.train["labels"])
    if np.issubdtype(labels.dtype, np.integer) or labels.dtype == bool:  # targets of a regression stay
        labels = labels.astype(np.int32)
    if noise is None:
        return labels, {}
    classes = len(dataset.classes) or int(labels.max()) + 1
    labels, corrupted = noise(labels, train, classes, rng)
    return labels, {"corrupted": corrupted}


def _placed(size: int, train: Sequence[Rows], places: str) -> npt.NDArray[np.int32]:
    """The position of every training sample in the block of its client, or in all blocks joined."""
    if places not in ("own", "all"):
        raise DataError(f'places is {places!r}; it must be "own", "all" or None')
    column, first = np.zeros(size, np.int32), 0
    for rows in train:
        column[rows] = first + np.arange(len(rows))
        first += len(rows) if places == "all" else 0
    return column


def _numbered(size: int, own: Sequence[Rows]) -> npt.NDArray[np.int32]:
    """The number of the client that a sample belongs to; 0 for samples of nobody, which are not stored."""
    column = np.zeros(size, np.int32)
    for client, rows in enumerate(own):
        column[rows] = client
    return column


def _check_everybody_has_some(parts: Sequence[Rows], level: str) -> None:
    if empty := [client for client, rows in enumerate(parts) if not len(rows)]:
        raise DataError(f"the clients {empty} have no {level} samples, others have; give every client some")
