"""Data that stay with their owner: the driver knows shapes and sizes, and no sample.

A site names a function or a folder. The driver asks what it has (`survey`), and plans with clients that look
like the real ones (`SiteClients`) but whose samples are all zero; each site then takes its own samples.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.data.batches import Samples
from fedbilevel.data.clients import LEVELS, Clients
from fedbilevel.data.error import DataError
from fedbilevel.portable import Array, Json, PortableError, pack, unpack
from fedbilevel.tree import PyTree

Levels: TypeAlias = Mapping[str, PyTree]
"""For each level that there is a tree of arrays with a leading axis of samples; "lower" is always there."""


@dataclasses.dataclass(frozen=True)
class OwnData:
    """Stands in a client's configuration for the samples that it has itself.

    Attributes:
        batch_size: samples in a minibatch at the lower and the upper level.
        extremes: for each level the largest and the smallest size in the whole federation.
    """

    batch_size: int | None
    extremes: dict[str, tuple[int, int]]


class SiteClients(Clients):
    """Clients whose samples stay at their sites: sizes and shapes are right, all samples are zero."""

    def __init__(self, *levels: Any, **settings: Any) -> None:
        super().__init__(*levels, **settings)

    @property
    def own(self) -> OwnData:
        """What a site needs to know to take its own samples in their place."""
        levels = {level: getattr(self, level) for level in LEVELS}
        extremes = {name: (samples.longest, samples.smallest) for name, samples in levels.items()}
        return OwnData(self.lower.batch_size, extremes)


def own_levels(source: str, site: str = "") -> Levels:
    """A site's own samples, from where the site says.

    Args:
        source: "module:function", which returns `Levels` (or one tree, which is then the lower level); or a
            folder with `lower.npz` and perhaps `upper.npz`, `test.npz` and `validation.npz`, each of named
            arrays with one row a sample.
        site: its name, for a function that takes one.
    """
    folder = pathlib.Path(source)
    if folder.is_dir():
        found: Any = {level: _arrays(folder / f"{level}.npz") for level in LEVELS}
        found = {level: arrays for level, arrays in found.items() if arrays is not None}
    elif ":" in source:
        module, _, name = source.partition(":")
        function = getattr(importlib.import_module(module), name)
        found = function(site) if inspect.signature(function).parameters else function()
    else:
        raise DataError(f"{source!r} is neither a folder nor module:function")
    levels = found if isinstance(found, dict) and set(found) <= set(LEVELS) else {"lower": found}
    if "lower" not in levels:
        raise DataError(f"{source} has no lower-level samples (lower.npz); there are {sorted(levels)}")
    return {level: jax.tree.map(np.asarray, tree) for level, tree in levels.items()}


def _arrays(file: pathlib.Path) -> dict[str, Array] | None:
    if not file.exists():
        return None
    with np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def report(levels: Levels) -> tuple[Json, list[Array]]:
    """What a site tells about its samples: how many there are, and what one looks like (all zeros)."""
    arrays: list[Array] = []
    body = {}
    for level, tree in levels.items():
        like = jax.tree.map(lambda leaf: np.zeros(leaf.shape[1:], leaf.dtype), tree)
        body[level] = [len(jax.tree.leaves(tree)[0]), pack(like, arrays)[0]]
    return body, arrays


def surveyed(
    reports: Sequence[tuple[str, Json, list[Array]]], batch_size: int | None, weights: Any
) -> SiteClients:
    """Clients as the sites report them.

    Args:
        reports: for each client its name, and the body and arrays of its `report`.
        batch_size, weights: as for `Clients`.
    """
    told = [(name, _read(name, body, arrays)) for name, body, arrays in reports]
    first_name, first = told[0]
    for name, levels in told:
        if _looks(levels) != _looks(first):
            raise DataError(
                f"{name} has samples like {_looks(levels)}, and {first_name} like {_looks(first)}; "
                "all sites need the same levels, names, shapes and dtypes"
            )
    sizes = {level: np.array([levels[level][0] for _, levels in told]) for level in first}
    parts = {level: _zeros(first[level][1], sizes[level], batch_size) for level in first}
    return SiteClients(
        parts["lower"],
        parts.get("upper"),
        test=parts.get("test"),
        validation=parts.get("validation"),
        weights=weights,
    )


def assembled(levels: Levels, own: OwnData) -> Clients:
    """A site's own samples as one client of the federation."""
    parts = {level: _mine(tree, level, own) for level, tree in levels.items()}
    return Clients(
        parts["lower"], parts.get("upper"), test=parts.get("test"), validation=parts.get("validation")
    )


def _mine(tree: PyTree, level: str, own: OwnData) -> Samples:
    flat, size = jax.tree.map(jnp.asarray, tree), len(jax.tree.leaves(tree)[0])
    longest, smallest = own.extremes[level]
    return Samples(
        flat, jnp.zeros(1, jnp.int32), jnp.full(1, size, jnp.int32), None, own.batch_size, longest, smallest
    )


def _read(name: str, body: Json, arrays: list[Array]) -> dict[str, tuple[int, PyTree]]:
    try:
        return {level: (int(size), unpack(like, arrays, _nothing)) for level, (size, like) in body.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(f"{name} says about its data what cannot be read: {error}") from None


def _nothing(name: str) -> Any:
    raise PortableError(f"{name}: only dicts, lists, tuples and arrays are expected here")


def _looks(levels: dict[str, tuple[int, PyTree]]) -> Any:
    trees = {level: tree for level, (_, tree) in levels.items()}
    return jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", trees)


def _zeros(like: PyTree, sizes: Array, batch_size: int | None) -> Samples:
    """Samples of these sizes that are all the same row of zeros: it is stored once."""
    flat = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], like)
    before = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    start, size, rows = (jnp.asarray(values, jnp.int32) for values in (before, sizes, np.zeros(sizes.sum())))
    return Samples(flat, start, size, rows, batch_size, int(sizes.max()), int(sizes.min()))
