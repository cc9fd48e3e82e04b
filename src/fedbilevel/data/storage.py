"""Samples as they are stored: one flat array a leaf, the clients one behind the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from fedbilevel.data.batches import Samples
from fedbilevel.data.error import DataError
from fedbilevel.tree import PyTree


def collect(source: PyTree, batch_size: int | None, level: str) -> Samples:
    """Flat storage of a list of clients or of a stacked pytree."""
    if isinstance(source, Samples):
        return source if batch_size is None else batched(source, batch_size)
    if isinstance(source, Iterator):
        source = list(source)
    if isinstance(source, list):
        return _from_list(source, batch_size, level)
    if any(isinstance(node, list) for node in jax.tree.leaves(source, is_leaf=_is_list)):
        raise DataError(
            f"the {level}-level data hold a list inside another structure. A list means one entry a client "
            "and must be outermost: [client 0's tree, client 1's tree, ...]; stacked data are arrays "
            "of shape (clients, samples, ...)."
        )
    shapes = {jnp.shape(leaf)[:2] for leaf in jax.tree.leaves(source)}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise DataError(
            f"stacked {level}-level data need leaves of one leading shape (clients, samples, ...); "
            f"found leading shapes {sorted(shapes)}. For clients of unequal size pass a list."
        )
    n, size = next(iter(shapes))
    flat = jax.tree.map(lambda leaf: jnp.asarray(leaf).reshape(n * size, *jnp.shape(leaf)[2:]), source)
    return _samples(flat, np.full(n, size), batch_size, level)


def stored(leaf: Any) -> jax.Array:
    """A leaf as a JAX array of its own, with no second copy on the way, as `jnp.asarray` makes one."""
    if not isinstance(leaf, np.ndarray):
        return jnp.asarray(leaf)
    # JAX takes over memory that begins at a multiple of 64 bytes as it is; this is nobody else's.
    memory = np.empty(leaf.nbytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    own = memory[begin : begin + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
    own[...] = leaf
    return jax.device_put(own)


def _is_list(node: Any) -> bool:
    return isinstance(node, list)


def _from_list(trees: list[PyTree], batch_size: int | None, level: str) -> Samples:
    if not trees:
        return _samples((), np.zeros(0, int), batch_size, level)
    first: Any = jax.tree.structure(trees[0])
    for client, tree in enumerate(trees):
        if jax.tree.structure(tree) != first:
            raise DataError(
                f"client {client}'s {level}-level data have the structure {jax.tree.structure(tree)}, "
                f"client 0's {first}; they must be alike"
            )
    sizes = np.array([_length(tree, f"client {client}'s", level) for client, tree in enumerate(trees)])
    try:
        flat = jax.tree.map(lambda *leaves: jnp.asarray(np.concatenate(leaves)), *trees)
    except ValueError as error:
        raise DataError(f"the clients' {level}-level samples differ in shape: {error}") from None
    return _samples(flat, sizes, batch_size, level)


def _length(tree: PyTree, whose: str, level: str) -> int:
    lengths = {jnp.shape(leaf)[0] if jnp.ndim(leaf) else None for leaf in jax.tree.leaves(tree)}
    if len(lengths) != 1 or None in lengths:
        raise DataError(
            f"the leaves of {whose} {level}-level data must share a leading axis of samples; "
            f"their lengths are {sorted(map(str, lengths))}"
        )
    return int(lengths.pop() or 0)


def _samples(
    flat: PyTree, sizes: npt.NDArray[Any], batch_size: int | None, level: str, rows: Any = None
) -> Samples:
    _check_batch_size(batch_size)
    if not len(sizes):
        raise DataError(f"the list of {level}-level data is empty; there must be at least one client")
    if not np.all(sizes > 0):
        empty = np.flatnonzero(sizes == 0).tolist()
        raise DataError(f"clients {empty} have no {level}-level samples; leave them out or give them some")
    start = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    return Samples(
        flat,
        jnp.asarray(start, jnp.int32),
        jnp.asarray(sizes, jnp.int32),
        rows,
        batch_size,
        int(sizes.max()),
        int(sizes.min()),
    )


def indexed(flat: PyTree, lists: Sequence[Any], batch_size: int | None) -> Samples:
    """Clients that share one stored copy; each list holds the row numbers of one."""
    total = _length(flat, "the shared", "indexed")
    rows = np.concatenate([np.zeros(0, np.int32), *(np.asarray(r, np.int32) for r in lists)])
    if rows.size and (rows.min() < 0 or rows.max() >= total):
        raise DataError(f"row numbers must lie in 0..{total - 1}; found {rows.min()}..{rows.max()}")
    return _samples(flat, np.array([len(r) for r in lists]), batch_size, "indexed", jnp.asarray(rows))


def nothing(clients: int) -> Samples:
    """A level at which nobody has a sample."""
    none = jnp.zeros(clients, jnp.int32)
    return Samples((), none, none, None, None, 0, 0)


def check_alike(validation: Samples, test: Samples) -> None:
    """The same metrics read both."""
    seen = [
        (jax.tree.structure(samples.flat), [leaf.shape[1:] for leaf in jax.tree.leaves(samples.flat)])
        for samples in (validation, test)
    ]
    if seen[0] != seen[1]:
        raise DataError(
            f"the validation samples have the structure and shapes {seen[0]}, the test samples (by default "
            f"those of the upper level) {seen[1]}; the same metrics read both, so they must be alike"
        )


def _check_batch_size(batch_size: Any) -> None:
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise DataError(
            f"batch_size is {batch_size!r}; it must be a whole number of at least 1, or None for full batches"
        )


def batched(s: Samples, batch_size: int | None) -> Samples:
    """The same samples with minibatches of another size; None: all of a client's."""
    _check_batch_size(batch_size)
    return Samples(s.flat, s.start, s.size, s.rows, batch_size, s.longest, s.smallest)


def only(samples: Samples, client: int) -> Samples:
    """One client's samples, with the draws it makes among all of them."""
    begin, size = int(samples.start[client]), int(samples.size[client])
    places = np.arange(begin, begin + size)
    rows = places if samples.rows is None else np.asarray(samples.rows)[places]
    flat = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[rows]), samples.flat)
    start, length = jnp.zeros(1, jnp.int32), jnp.full(1, size, jnp.int32)
    return Samples(flat, start, length, None, samples.batch_size, samples.longest, samples.smallest)


def pooled(s: Samples) -> Samples:
    """All samples as one client's: clients lie one behind the other, so nothing has to move."""
    total = int(np.sum(np.asarray(s.size)))
    start, size = jnp.zeros(1, jnp.int32), jnp.full(1, total, jnp.int32)
    return Samples(s.flat, start, size, s.rows, s.batch_size, total, total)
