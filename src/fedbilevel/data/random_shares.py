"""Partitions by shares that are drawn from Dirichlet distributions: of classes, of sizes, of superclasses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbilevel.data.dataset import Table
from fedbilevel.data.error import DataError
from fedbilevel.data.partition import Number, Rows, ascending, at_least_one, column, enough, groups


@dataclasses.dataclass(frozen=True)
class Dirichlet:
    """Class by class: the shares of the clients in a class are drawn from a Dirichlet distribution.

    Args:
        clients: how many.
        concentration: of the symmetric Dirichlet; towards 0, each class belongs to one client; towards
            infinity, all clients are alike.
        at_least: samples of every client. A client with fewer takes some, one by one and at random, from
            whichever client then has most.

    Reference: Marfoq et al., Federated multi-task learning under a mixture of distributions, NeurIPS 2021.
    """

    clients: int
    concentration: Number
    at_least: int = 1

    def __post_init__(self) -> None:
        at_least_one(self, "clients", "at_least")
        _positive(self, "concentration")

    def __call__(self, samples: Table, rng: np.random.Generator) -> list[Rows]:
        enough(self, samples, needed=self.clients * self.at_least)
        classes = groups(column(self, samples, "labels"))
        return _by_shares(self, classes, rng)


@dataclasses.dataclass(frozen=True)
class QuantitySkew:
    """Clients alike in their labels but not in size: their sizes are drawn from a Dirichlet distribution.

    Args:
        clients: how many.
        concentration: of the symmetric Dirichlet; towards infinity, all sizes are equal.
        at_least: samples of every client, as for `Dirichlet`.
    """

    clients: int
    concentration: Number
    at_least: int = 1

    def __post_init__(self) -> None:
        at_least_one(self, "clients", "at_least")
        _positive(self, "concentration")

    def __call__(self, samples: Table, rng: np.random.Generator) -> list[Rows]:
        total = enough(self, samples, needed=self.clients * self.at_least)
        return _by_shares(self, [np.arange(total)], rng)


@dataclasses.dataclass(frozen=True)
class Pachinko:
    """Pachinko allocation: each sample falls through superclasses, then classes, to a client.

    Every client has as many samples, up to one. It draws its own shares of the superclasses from a
    Dirichlet distribution, and of the classes within each, then its samples by these, without
    replacement. A class that runs dry is left out and the shares of the others are renormalised, so the
    last clients get what the first ones left. Needs the column `coarse`.

    Args:
        clients: how many.
        coarse_concentration, fine_concentration: of the Dirichlets over superclasses and over classes;
            the reference has 0.1 and 10.

    Reference: Reddi et al., Adaptive federated optimization, ICLR 2021, appendix F.
    """

    clients: int
    coarse_concentration: Number = 0.1
    fine_concentration: Number = 10.0

    def __post_init__(self) -> None:
        at_least_one(self, "clients")
        _positive(self, "coarse_concentration", "fine_concentration")

    def __call__(self, samples: Table, rng: np.random.Generator) -> list[Rows]:
        total = enough(self, samples, needed=self.clients)
        labels = column(self, samples, "labels")
        pools = [
            [rng.permutation(rows[group]).tolist() for group in groups(labels[rows])]
            for rows in groups(column(self, samples, "coarse"))
        ]
        sizes = [len(part) for part in np.array_split(np.arange(total), self.clients)]
        return ascending([self._pick(size, pools, rng) for size in sizes])

    def _pick(self, size: int, pools: list[list[list[int]]], rng: np.random.Generator) -> Rows:
        """One client's rows, taken out of the pools (one a class, in a list for each superclass)."""
        left = np.array([sum(map(len, classes)) for classes in pools])
        rows = []
        counts = _fall(size, self.coarse_concentration, left, rng)
        for count, classes in zip(counts, pools, strict=True):
            within = _fall(
                int(count), self.fine_concentration, np.array([len(pool) for pool in classes]), rng
            )
            rows += [pool.pop() for times, pool in zip(within, classes, strict=True) for _ in range(times)]
        return np.array(rows)


def _by_shares(how: Dirichlet | QuantitySkew, pools: Sequence[Rows], rng: np.random.Generator) -> list[Rows]:
    """Each pool, in random order, cut by shares of its own; then no client has too few."""
    parts: list[list[Rows]] = [[] for _ in range(how.clients)]
    for rows in pools:
        share = rng.dirichlet(np.full(how.clients, float(how.concentration)))
        cuts = np.rint(np.cumsum(share)[:-1] * len(rows)).astype(int)
        for part, piece in zip(parts, np.split(rng.permutation(rows), cuts), strict=True):
            part.append(piece)
    return ascending(_filled_up([np.concatenate(part) for part in parts], how.at_least, rng))


def _filled_up(parts: list[Rows], least: int, rng: np.random.Generator) -> list[Rows]:
    """Parts of at least `least` rows: the smallest takes a random one from the largest, until it is so."""
    sizes = np.array([len(part) for part in parts])
    if sizes.min() >= least:
        return parts
    pools = [rng.permutation(part).tolist() for part in parts]
    while sizes.min() < least:
        poor, rich = sizes.argmin(), sizes.argmax()
        pools[poor].append(pools[rich].pop())
        sizes[poor], sizes[rich] = sizes[poor] + 1, sizes[rich] - 1
    return [np.array(pool) for pool in pools]


def _fall(times: int, concentration: Number, left: Rows, rng: np.random.Generator) -> Rows:
    """How many of so many draws without replacement fall on each place, of which `left` are left.

    What falls on a place that ran dry falls again on the others. This is the law of drawing one by one
    and renormalising, because draws that are refused change nothing.
    """
    share = rng.dirichlet(np.full(len(left), float(concentration)))
    counts = np.zeros_like(left)
    while (missing := times - counts.sum()) > 0:
        room = counts < left
        # Shares of a small concentration may all be 0.0 where there is room: there, every place is alike.
        weight = np.where(room, share, 0.0) if share[room].any() else room.astype(float)
        counts = np.minimum(counts + rng.multinomial(missing, weight / weight.sum()), left)
    return counts


def _positive(settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, float | int | np.number) or not 0 < value < math.inf:
            raise DataError(
                f"{type(settings).__name__}: {name} is {value!r}; it must be a positive, finite number"
            )
