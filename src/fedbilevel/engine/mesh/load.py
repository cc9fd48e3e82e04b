"""Clients of whom each process loads its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils

from fedbilevel.data.batches import Samples
from fedbilevel.data.clients import LEVELS, Clients
from fedbilevel.engine.mesh.join import several, watching
from fedbilevel.engine.mesh.layout import Layout, device_mesh
from fedbilevel.tree import PyTree


def load_clients(
    layout: Layout, load: Callable[[int], Mapping[str, PyTree]], batch_size: int | None, weights: Any
) -> Clients:
    """The clients of a layout; `load` is called for those of this process only (see `Mesh.clients`).

    In each process the samples of the others' clients are missing; how many they are is known.
    """
    own = np.concatenate([layout.of(device) for device in layout.own])
    # A process without clients must know, all the same, what samples look like.
    ids = own if len(own) else np.zeros(1, int)
    trees = [load(int(client)) for client in ids]
    _check(trees[0])
    data = {level: [tree[level] for tree in trees] for level in LEVELS if level in trees[0]}
    places = Places(layout.n, ids, bool(len(own)))
    return _among(Clients(**data, batch_size=batch_size), places, weights)


def indexed_clients(
    columns: Mapping[str, npt.NDArray[Any]],
    lower: Sequence[Any],
    upper: Sequence[Any] | None = None,
    *,
    test: Sequence[Any] | None = None,
    validation: Sequence[Any] | None = None,
    batch_size: int | None = None,
    weights: Any = "uniform",
) -> Clients:
    """As `Clients.indexed`, but a process copies only the rows of the clients that its devices will hold."""
    given = {"lower": lower, "upper": upper, "test": test, "validation": validation}
    levels = {level: rows for level, rows in given.items() if rows is not None}

    def load(client: int) -> dict[str, PyTree]:
        own = {level: rows[client] for level, rows in levels.items()}
        return {level: {name: c[rows] for name, c in columns.items()} for level, rows in own.items()}

    return load_clients(Layout(device_mesh(), len(lower)), load, batch_size, weights)


class Places(NamedTuple):
    """Which clients were loaded here: of n the numbers `ids`; and whether they are this process's own."""

    n: int
    ids: npt.NDArray[Any]
    own: bool


def _check(tree: Any) -> None:
    if not isinstance(tree, Mapping) or "lower" not in tree or not set(tree) <= set(LEVELS):
        seen = sorted(tree) if isinstance(tree, Mapping) else type(tree).__name__
        raise ValueError(
            "the function that loads a client must return a dict with 'lower', and perhaps "
            f"{', '.join(LEVELS[1:])}; it returned {seen}"
        )


def _among(own: Clients, places: Places, weights: Any) -> Clients:
    """The same clients with the places of all others."""
    levels = [getattr(own, level) for level in LEVELS]
    parts = {id(level.start): _placed(level, places) for level in levels}  # what levels share stays shared
    placed = [_batched(parts[id(level.start)], level) for level in levels]
    return Clients(placed[0], placed[1], test=placed[2], validation=placed[3], weights=weights)


def _placed(samples: Samples, places: Places) -> Samples:
    start, size = np.zeros(places.n, np.int32), np.zeros(places.n, np.int32)
    if places.own:
        start[places.ids], size[places.ids] = samples.start, samples.size
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
