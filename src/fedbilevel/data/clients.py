"""The clients' data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.data.batches import Samples
from fedbilevel.data.error import DataError
from fedbilevel.data.storage import batched, check_alike, collect, indexed, nothing, only, pooled, stored
from fedbilevel.tree import PyTree

LEVELS = ("lower", "upper", "test", "validation")
"""What a client may have samples for."""


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
        self.lower = collect(lower, batch_size, "lower")
        self.upper = self.lower if upper is None else collect(upper, batch_size, "upper")
        # Metrics are of all samples: minibatches are for training.
        self.test = batched(self.upper if test is None else collect(test, None, "test"), None)
        held_out = nothing(self.n) if validation is None else collect(validation, None, "validation")
        self.validation = batched(held_out, None)
        if self.has_validation:
            check_alike(self.validation, self.test)
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
        flat = jax.tree.map(stored, data)
        parts = [None if rows is None else indexed(flat, rows, batch_size) for rows in (lower, upper)]
        unseen = [None if rows is None else indexed(flat, rows, None) for rows in (test, validation)]
        return cls(*parts, test=unseen[0], validation=unseen[1], weights=weights)

    def input_shape(self, level: str) -> tuple[int, ...] | None:
        """The shape of one sample in the column `inputs` of a level; None: there is none.

        >>> Clients(lower={"inputs": np.ones((2, 5, 28, 28))}).input_shape("lower")
        (28, 28)
        """
        flat = getattr(self, level).flat
        return tuple(flat["inputs"].shape[1:]) if isinstance(flat, Mapping) and "inputs" in flat else None

    def whole(self) -> Clients:
        """The same clients with full batches."""
        return self.batched(None)

    def batched(self, batch_size: int | None) -> Clients:
        """The same clients with minibatches of another size; None: all of a client's samples."""
        parts = [batched(samples, batch_size) for samples in (self.lower, self.upper)]
        return eqx.tree_at(lambda clients: (clients.lower, clients.upper), self, parts)

    def only(self, client: int) -> Clients:
        """One client's own data, with the draws it makes in the whole federation."""
        levels = (self.lower, self.upper, self.test, self.validation)
        own = {id(level.start): only(level, client) for level in levels}  # what levels share is copied once
        lower, upper, test, rest = (batched(own[id(level.start)], level.batch_size) for level in levels)
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
        lower, upper, test, validation = map(pooled, levels)
        return Clients(lower, upper, test=test, validation=validation)


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
