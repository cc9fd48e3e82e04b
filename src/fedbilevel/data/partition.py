"""Partitions: which samples each client gets.

A partition is called as `partition(samples, rng)`: `samples` is a table of columns, and the answer has one
array of row numbers a client, ascending, so that samples that come in an order (of text, of time) keep it.
Unless its docstring says otherwise, every sample goes to exactly one client. No client stays empty: what
cannot be dealt out is refused. Any function of this form can be used where a partition is asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedbilevel.data.dataset import Table
from fedbilevel.data.error import DataError

Rows: TypeAlias = npt.NDArray[np.int64]
"""Row numbers of a table."""

Number: TypeAlias = float | int
"""A real setting. Said in full, because a check at run time does not take a 1 for a float."""

Partition: TypeAlias = Callable[[Table, np.random.Generator], list[Rows]]
"""What deals samples out to clients: a class of this module or of `random_shares`, or your own function."""


@dataclasses.dataclass(frozen=True)
class Iid:
    """Samples at random, as many for every client, up to one.

    Args:
        clients: how many.

    Example:
        >>> [len(rows) for rows in Iid(clients=3)({"labels": np.zeros(8)}, np.random.default_rng(0))]
        [3, 3, 2]
    """

    clients: int

    def __post_init__(self) -> None:
        at_least_one(self, "clients")

    def __call__(self, samples: Table, rng: np.random.Generator) -> list[Rows]:
        total = enough(self, samples, needed=self.clients)
        return ascending(np.array_split(rng.permutation(total), self.clients))


@dataclasses.dataclass(frozen=True)
class Shards:
    """Samples sorted by label and cut into equal shards; every client gets `each` of them, at random.

    With 60,000 samples, 100 clients and 2 shards each, a shard has 300 samples and most clients see two
    classes. What does not divide evenly makes some shards one sample longer.

    Args:
        clients: how many.
        each: shards of a client.

    Reference: McMahan et al., Communication-efficient learning of deep networks from decentralized data,
    AISTATS 2017.
    """

    clients: int
    each: int = 2

    def __post_init__(self) -> None:
        at_least_one(self, "clients", "each")

    def __call__(self, samples: Table, rng: np.random.Generator) -> list[Rows]:
        enough(self, samples, needed=self.clients * self.each)
        order = np.concatenate(groups(column(self, samples, "labels")))
        shards = np.array_split(order, self.clients * self.each)
        hands = rng.permutation(len(shards)).reshape(self.clients, self.each)
        return ascending([np.concatenate([shards[shard] for shard in hand]) for hand in hands])


@dataclasses.dataclass(frozen=True)
class ClassesPerClient:
    """Every client has `each` classes, at random; a class is shared equally by the clients that have it.

    Classes are spread evenly: the numbers of clients that have them differ by at most one. A class with
    fewer samples than clients that should have it goes to as many of them as it has samples.

    Args:
        clients: how many.
        each: classes of a client.
    """

    clients: int
    each: int = 2

    def __post_init__(self) -> None:
        at_least_one(self, "clients", "each")

    def __call__(self, samples: Table, rng: np.random.Generator) -> list[Rows]:
        classes = groups(column(self, samples, "labels"))
        chosen = self._choice(len(classes), rng)
        parts: list[list[Rows]] = [[] for _ in range(self.clients)]
        for number, rows in enumerate(classes):
            owners = rng.permutation(np.flatnonzero((chosen == number).any(axis=1)))
            for owner, part in zip(owners, np.array_split(rng.permutation(rows), len(owners)), strict=True):
                parts[owner].append(part)
        return _none_empty(self, ascending([np.concatenate(part) for part in parts]))

    def _choice(self, classes: int, rng: np.random.Generator) -> Rows:
        """The classes of each client, `(clients, each)`: always the least used ones, ties at random."""
        if self.each > classes:
            raise DataError(f"{self} cannot deal out {classes} classes: give `each` of at most {classes}")
        if classes > self.each * self.clients:
            raise DataError(
                f"{self} cannot deal out {classes} classes: {self.clients} clients together take at most "
                f"{self.clients * self.each}, so that the others would be lost; change `each` or `clients`"
            )
        used, chosen = np.zeros(classes, int), []
        for _ in range(self.clients):
            order = rng.permutation(classes)
            chosen.append(order[np.argsort(used[order], kind="stable")[: self.each]])
            used[chosen[-1]] += 1
        return np.stack(chosen)


@dataclasses.dataclass(frozen=True)
class Natural:
    """One client for each owner of samples (a writer, a role), in the order of the owners' numbers.

    Leaves samples out: those of owners who are too small or too many. Needs the column `owner`.

    Args:
        clients: how many owners; None: all.
        at_least: owners with fewer samples are left out.
        random: owners at random; default: the largest ones (of equal ones, those with the lower numbers).
    """

    clients: int | None = None
    at_least: int = 1
    random: bool = False

    def __post_init__(self) -> None:
        at_least_one(self, *(["clients"] if self.clients is not None else []), "at_least")

    def __call__(self, samples: Table, rng: np.random.Generator) -> list[Rows]:
        owned = [rows for rows in groups(column(self, samples, "owner")) if len(rows) >= self.at_least]
        wanted = len(owned) if self.clients is None else self.clients
        if len(owned) < max(wanted, 1):
            raise DataError(
                f"{self} finds {len(owned)} owners with at least {self.at_least} samples; it needs "
                f"{max(wanted, 1)}: lower `clients` or `at_least`"
            )
        by_size = np.argsort([-len(rows) for rows in owned], kind="stable")
        chosen = (rng.permutation(len(owned)) if self.random else by_size)[:wanted]
        return [owned[place] for place in sorted(chosen)]


def column(asker: Any, samples: Table, name: str) -> npt.NDArray[Any]:
    """A column of one value a sample; its absence is an error that names who needs it."""
    if name not in samples:
        raise DataError(f"{asker} needs the column {name!r}; the samples have {sorted(samples)}")
    values = np.asarray(samples[name])
    if values.ndim != 1:
        raise DataError(
            f"{asker} needs one value a sample in the column {name!r}; its shape is {values.shape}"
        )
    return values


def groups(values: npt.NDArray[Any]) -> list[Rows]:
    """The places of each value, ascending; one array for each value that occurs, in order of the values."""
    order = np.argsort(values, kind="stable")
    _, starts = np.unique(values[order], return_index=True)
    return np.split(order, starts[1:]) if len(values) else []


def ascending(parts: Sequence[Rows]) -> list[Rows]:
    """Every client's rows in their order."""
    return [np.sort(part).astype(np.int64) for part in parts]


def _none_empty(partition: Any, parts: list[Rows]) -> list[Rows]:
    if empty := [client for client, rows in enumerate(parts) if not len(rows)]:
        raise DataError(f"{partition} leaves the clients {empty} without samples; ask for fewer clients")
    return parts


def enough(partition: Any, samples: Table, needed: int) -> int:
    """How many samples there are; too few are an error."""
    total = len(next(iter(samples.values()), ()))
    if total < needed:
        raise DataError(
            f"{partition} needs at least {needed} samples; there are {total}: ask for fewer clients"
        )
    return total


def at_least_one(settings: Any, *names: str) -> None:
    """Raise an error that explains unless these settings are whole numbers of at least 1."""
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise DataError(
                f"{type(settings).__name__}: {name} is {value!r}; it must be a whole number of at least 1"
            )
