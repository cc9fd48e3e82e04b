"""Clients of whom each process loads its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils

from fedbilevel.data.batches import Samples
from fedbilevel.data.clients import Clients
from fedbilevel.engine.mesh.join import MeshError, several, watching
from fedbilevel.engine.mesh.layout import Layout
from fedbilevel.tree import PyTree

LEVELS = ("lower", "upper", "test", "validation")


def load_clients(
    layout: Layout, load: Callable[[int], Mapping[str, PyTree]], batch_size: int | None, weights: Any
) -> Clients:
    """The clients of a layout; `load` is called for those of this process only (see `Mesh.clients`).

    In each process the samples of the others' clients are missing; how many they are is known.
    """
    ids = np.concatenate([layout.of(device) for device in layout.own])
    if not len(ids):
        raise MeshError(f"{layout.n} clients are too few: a process would have none")
    trees = [load(int(client)) for client in ids]
    _check(trees[0])
    data = {level: [tree[level] for tree in trees] for level in LEVELS if level in trees[0]}
    return _among(Clients(**data, batch_size=batch_size), ids, layout.n, weights)


def _check(tree: Any) -> None:
    if not isinstance(tree, Mapping) or "lower" not in tree or not set(tree) <= set(LEVELS):
        seen = sorted(tree) if isinstance(tree, Mapping) else type(tree).__name__
        raise ValueError(
            "the function that loads a client must return a dict with 'lower', and perhaps "
            f"{', '.join(LEVELS[1:])}; it returned {seen}"
        )


def _among(own: Clients, ids: npt.NDArray[Any], n: int, weights: Any) -> Clients:
    """The same clients with the places of all others."""
    levels = [getattr(own, level) for level in LEVELS]
    parts = {id(level.start): _placed(level, ids, n) for level in levels}  # what levels share stays shared
    placed = [_batched(parts[id(level.start)], level) for level in levels]
    return Clients(placed[0], placed[1], test=placed[2], validation=placed[3], weights=weights)


def _placed(samples: Samples, ids: npt.NDArray[Any], n: int) -> Samples:
    start, size = np.zeros(n, np.int32), np.zeros(n, np.int32)
    start[ids], size[ids] = samples.start, samples.size
    size = _sum_over_processes(size)
    extremes = int(size.max()), int(size.min())
    return Samples(samples.flat, jnp.asarray(start), jnp.asarray(size), None, samples.batch_size, *extremes)


def _batched(placed: Samples, like: Samples) -> Samples:
    return Samples(
        *(placed.flat, placed.start, placed.size, None, like.batch_size, placed.longest, placed.smallest)
    )


def _sum_over_processes(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if not several():
        return array
    with watching():
        return np.asarray(multihost_utils.process_allgather(array)).sum(axis=0).astype(array.dtype)
