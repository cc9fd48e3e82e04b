"""Links: who hears whom, and with which weight, when clients talk to each other."""

from __future__ import annotations

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key


class Links(eqx.Module):
    """The network of one exchange: weights `W`, `W[i, j]` what client i takes of client j's value."""

    @abc.abstractmethod
    def weights(self, key: Key[Array, ""], n: int) -> Float[Array, "{n} {n}"]:
        """The `(n, n)` weights of one exchange; a random network draws them from `key`."""


class Complete(Links):
    """Everybody hears everybody, with weight 1/n: `push` is the mean, at every client."""

    def weights(self, key: Key[Array, ""], n: int) -> Float[Array, "{n} {n}"]:
        return jnp.full((n, n), 1.0 / n)


class Given(Links):
    """A fixed weight matrix.

    Args:
        matrix: `(n, n)`; entry `[i, j]` is the weight of client j's value at client i. A zero is no
            link, and costs nothing.
    """

    matrix: Float[Array, "clients clients"]

    def __init__(self, matrix: Any) -> None:
        self.matrix = jnp.asarray(matrix)
        if self.matrix.ndim != 2 or self.matrix.shape[0] != self.matrix.shape[1]:
            raise ValueError(
                f"links need a square matrix, one row and column a client; got shape {self.matrix.shape}"
            )
        computed = isinstance(self.matrix, jax.core.Tracer)  # inside a step: known at run time only
        if not computed and not np.all(np.isfinite(np.asarray(self.matrix))):
            raise ValueError("links need finite weights; the matrix holds a NaN or an infinity")

    def weights(self, key: Key[Array, ""], n: int) -> Float[Array, "{n} {n}"]:
        if self.matrix.shape != (n, n):
            raise ValueError(
                f"the links are for {self.matrix.shape[0]} clients, but {n} take part in this push"
            )
        return self.matrix


def edges(weights: Float[Array, "clients clients"]) -> Int[Array, ""]:
    """How many messages an exchange takes: the non-zero weights off the diagonal."""
    n = weights.shape[0]
    return jnp.sum((weights != 0) & ~jnp.eye(n, dtype=bool)).astype(jnp.int32)
