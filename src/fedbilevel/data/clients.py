"""The clients' data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from fedbilevel.data.batches import Samples
from fedbilevel.tree import PyTree


class DataError(ValueError):
    """The clients' data do not fit together."""


class Clients(eqx.Module):
    """The data of all clients, at both levels.

    Args:
        lower: what `g` sees (training data): a list (or an iterator) with one pytree a client, whose
            leaves have a leading axis of samples and may differ in length between clients; or one pytree
            (a dict, a tuple, an array) stacked as `(clients, samples, ...)`.
        upper: what `f` sees (validation data), in the same form; default: the same as `lower`.
        test: what the problem's `client_metrics` see, in the same form; default: the same as `upper`.
        validation: what only metrics see, beside the test data, to choose among the points of a run without a
            look at these; in the same form. It is no level: neither f nor g sees it. Default: there is none.
        batch_size: samples in a minibatch; None: every oracle call sees all of a client's samples.
        weights: `"uniform"` (as in the papers), `"size"` (by number of lower samples) or a vector:
            one weight vector for every average over clients.

    >>> clients = Clients(lower=[np.ones((3, 2)), np.ones((5, 2))], batch_size=2)
    >>> clients.n
    2
    """

    lower: Samples
    upper: Samples
    test: Samples
    validation: Samples
    weights: Any

    def __init__(
        self,
        lower: PyTree,
        upper: PyTree = None,
        *,
        test: PyTree = None,
        validation: PyTree = None,
        batch_size: int | None = None,
        weights: Literal["uniform", "size"] | Any = "uniform",
    ) -> None:
        self.lower = _collect(lower, batch_size, "lower")
        self.upper = self.lower if upper is None else _collect(upper, batch_size, "upper")
        # Metrics are of all samples: minibatches are for training.
        self.test = _batched(self.upper if test is None else _collect(test, None, "test"), None)
        held_out = _nothing(self.n) if validation is None else _collect(validation, None, "validation")
        self.validation = _batched(held_out, None)
        if self.has_validation:
            _check_alike(self.validation, self.test)
        for level, samples in (("upper", self.upper), ("test", self.test), ("validation", self.validation)):
            if samples.size.shape != self.lower.size.shape:
                raise DataError(
                    f"there are {len(self.lower.size)} clients with lower-level data and "
                    f"{len(samples.size)} with {level}-level data; every client needs both"
                )
        self.weights = _weights(weights, self.lower.size)

    @property
    def n(self) -> int:
        """How many clients there are."""
        return len(self.lower.size)

    @property
    def has_validation(self) -> bool:
        """Whether there are data that only metrics see, beside the test data."""
        return self.validation.longest > 0

    @property
    def has_weightless(self) -> bool:
        """Whether some client weighs nothing in a mean."""
        return self.weights is not None and not np.all(np.asarray(self.weights) > 0)

    @classmethod
    def indexed(
        cls,
        data: PyTree,
        lower: Sequence[Any],
        upper: Sequence[Any] | None = None,
        *,
        test: Sequence[Any] | None = None,
        validation: Sequence[Any] | None = None,
        batch_size: int | None = None,
        weights: Literal["uniform", "size"] | Any = "uniform",
    ) -> Clients:
        """Clients that share one stored copy of `data`; each list holds a client's row numbers."""
        flat = jax.tree.map(_stored, data)
        parts = [None if rows is None else _indexed(flat, rows, batch_size) for rows in (lower, upper)]
        unseen = [None if rows is None else _indexed(flat, rows, None) for rows in (test, validation)]
        return cls(*parts, test=unseen[0], validation=unseen[1], weights=weights)

    def whole(self) -> Clients:
        """The same clients with full batches."""
        return self.batched(None)

    def batched(self, batch_size: int | None) -> Clients:
        """The same clients with minibatches of another size; None: all of a client's samples."""
        parts = [_batched(samples, batch_size) for samples in (self.lower, self.upper)]
        return eqx.tree_at(lambda clients: (clients.lower, clients.upper), self, parts)

    def only(self, client: int) -> Clients:
        """One client's own data, with the draws it makes in the whole federation."""
        levels = (self.lower, self.upper, self.test, self.validation)
        own = {id(level.start): _only(level, client) for level in levels}  # what levels share is copied once
        lower, upper, test, rest = (_batched(own[id(level.start)], level.batch_size) for level in levels)
        return Clients(lower, upper, test=test, validation=rest)

    def pooled(self) -> Clients:
        """One client that has all samples: what a method for one machine runs on.

        Its f and g are means over all samples. These are the federation's own only where every client weighs
        as much as its share of the samples, at both levels; anything else is another problem, and refused.

        >>> Clients(lower=[np.ones((3, 2)), np.ones((5, 2))], weights="size").pooled().lower.size.tolist()
        [8]
        """
        for level in ("lower", "upper"):
            _check_shares(self.weights, getattr(self, level).size, level)
        levels = (self.lower, self.upper, self.test, self.validation)
        lower, upper, test, validation = map(_pooled, levels)
        return Clients(lower, upper, test=test, validation=validation)


def _collect(source: PyTree, batch_size: int | None, level: str) -> Samples:
    """Flat storage of a list of clients or of a stacked pytree."""
    if isinstance(source, Samples):
        return source if batch_size is None else _batched(source, batch_size)
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


def _stored(leaf: Any) -> jax.Array:
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


def _indexed(flat: PyTree, lists: Sequence[Any], batch_size: int | None) -> Samples:
    total = _length(flat, "the shared", "indexed")
    rows = np.concatenate([np.zeros(0, np.int32), *(np.asarray(r, np.int32) for r in lists)])
    if rows.size and (rows.min() < 0 or rows.max() >= total):
        raise DataError(f"row numbers must lie in 0..{total - 1}; found {rows.min()}..{rows.max()}")
    return _samples(flat, np.array([len(r) for r in lists]), batch_size, "indexed", jnp.asarray(rows))


def _nothing(clients: int) -> Samples:
    """A level at which nobody has a sample."""
    none = jnp.zeros(clients, jnp.int32)
    return Samples((), none, none, None, None, 0, 0)


def _check_alike(validation: Samples, test: Samples) -> None:
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


def _batched(s: Samples, batch_size: int | None) -> Samples:
    _check_batch_size(batch_size)
    return Samples(s.flat, s.start, s.size, s.rows, batch_size, s.longest, s.smallest)


def _only(samples: Samples, client: int) -> Samples:
    begin, size = int(samples.start[client]), int(samples.size[client])
    places = np.arange(begin, begin + size)
    rows = places if samples.rows is None else np.asarray(samples.rows)[places]
    flat = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[rows]), samples.flat)
    start, length = jnp.zeros(1, jnp.int32), jnp.full(1, size, jnp.int32)
    return Samples(flat, start, length, None, samples.batch_size, samples.longest, samples.smallest)


def _pooled(s: Samples) -> Samples:
    """All samples as one client's: clients lie one behind the other, so nothing has to move."""
    total = int(np.sum(np.asarray(s.size)))
    start, size = jnp.zeros(1, jnp.int32), jnp.full(1, total, jnp.int32)
    return Samples(s.flat, start, size, s.rows, s.batch_size, total, total)


def _check_shares(weights: Any, sizes: jax.Array, level: str) -> None:
    """Raise an error that explains unless the mean over clients is the mean over all of their samples."""
    own = np.ones(len(sizes)) if weights is None else np.asarray(weights, float)
    weight, share = own / own.sum(), np.asarray(sizes, float) / np.sum(np.asarray(sizes))
    client = int(np.argmax(np.abs(weight - share)))
    if not np.isclose(weight[client], share[client], rtol=1e-5, atol=0):
        raise DataError(
            f"pooled data weigh every sample alike, but client {client} has {share[client]:.3g} of the "
            f"{level}-level samples and {weight[client]:.3g} of the weight: another problem. Give all "
            'clients equally many samples, or weights="size" and the same split.'
        )


def _weights(weights: Any, sizes: jax.Array) -> Any:
    if isinstance(weights, str):
        options: Mapping[str, Any] = {"uniform": None, "size": sizes / jnp.mean(sizes, dtype=float)}
        if weights not in options:
            raise DataError(f'weights is "{weights}"; it must be "uniform", "size" or a vector')
        return options[weights]
    vector = np.asarray(weights, float)
    if (
        vector.shape != sizes.shape
        or not np.all(np.isfinite(vector))
        or np.any(vector < 0)
        or not vector.any()
    ):
        raise DataError(
            f"weights must be one finite non-negative number for each of the {len(sizes)} clients, "
            f"not all zero; got shape {vector.shape}"
        )
    return jnp.asarray(vector)
