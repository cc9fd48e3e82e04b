"""Random links by enumeration: every set of links of a small network, with its probability, in numpy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[Any]


def graphs(probability: Matrix, undirected: bool) -> Iterator[tuple[float, Matrix]]:
    """Every set of links, `[i, j]` true where i hears j (always itself), and how probable it is."""
    n = len(probability)
    pairs = [(i, j) for i in range(n) for j in range(n) if (i < j if undirected else i != j)]
    for chosen in itertools.product(*(_outcomes(probability[pair]) for pair in pairs)):
        present, chance = np.eye(n, dtype=bool), 1.0
        for (i, j), there in zip(pairs, chosen, strict=True):
            chance *= probability[i, j] if there else 1 - probability[i, j]
            present[i, j] = there
            if undirected:
                present[j, i] = there
        yield chance, present


def _outcomes(chance: float) -> tuple[bool, ...]:
    """Whether a link can be absent, and whether it can be present."""
    return (*((False,) if chance < 1 else ()), *((True,) if chance > 0 else ()))


def shares(present: Matrix) -> Matrix:
    """Every sender gives the same to all whom it reaches."""
    weights = np.zeros(present.shape)
    for i, j in np.argwhere(present):
        weights[i, j] = 1 / np.count_nonzero(present[:, j])
    return weights


def metropolis_of(present: Matrix) -> Matrix:
    """`1/(1 + max degree)` on links, the rest at home: by the definition, in loops."""
    n = len(present)
    degree = [sum(bool(present[i, j]) for j in range(n) if j != i) for i in range(n)]
    weights = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            if i != j and present[i, j]:
                weights[i, j] = 1 / (1 + max(degree[i], degree[j]))
        weights[i, i] = 1 - weights[i].sum()
    return weights
