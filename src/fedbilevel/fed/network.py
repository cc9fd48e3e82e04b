"""A network of n clients: weights, how often each link is there, and what can be done over it.

Every kind of links becomes this one form, so programs over different graphs are one compiled program.
"""

from __future__ import annotations

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from fedbilevel.fed.mixing import Matrix, expected_weights, metropolis


class Links(eqx.Module):
    """Who hears whom: a description that is made precise for a number of clients."""

    @abc.abstractmethod
    def network(self, n: int) -> Network:
        """These links among n clients."""

    def weights(
        self, key: Key[Array, ""], n: int, time: Any = 0, there: Any = None
    ) -> Float[Array, "{n} {n}"]:
        """`W[i, j]`, what client i takes of client j's value in one exchange, drawn from `key`.

        Args:
            key: draws the links.
            n: how many clients there are.
            time: the number of the exchange.
            there: `(n,)` bool, who can be reached; None: all.
        """
        weights = self.network(n).draw(key, time)
        return weights if there is None else among_those_there(weights, there)


class Network(Links):
    """Links among n clients: weights when all are present, and how often each of them is.

    An exchange draws which links are present; a client always hears itself. A sender divides what it would
    give to absent links among the present ones, in proportion, so that columns keep their sums
    (`balanced=False`); or weights are those of Metropolis and Hastings on what is present (`balanced=True`),
    symmetric and doubly stochastic where links are undirected.

    Args:
        base: `(times, n, n)`; `[t, i, j]` the weight of j's value at i when all links are present; the t-th
            matrix serves exchanges t, t + times, ...
        probability: `(times, n, n)`; `[t, i, j]` how often i hears j.
        undirected: whether i hears j exactly when j hears i.
        balanced: whether weights are Metropolis' on the links that are present.
    """

    base: Float[Array, "times clients clients"]
    probability: Float[Array, "times clients clients"]
    undirected: Bool[Array, ""]
    balanced: Bool[Array, ""]

    def __init__(self, base: Any, probability: Any, undirected: Any = False, balanced: Any = False) -> None:
        self.base = jnp.asarray(base, float)
        self.probability = jnp.asarray(probability, float)
        self.undirected, self.balanced = jnp.asarray(undirected), jnp.asarray(balanced)

    def network(self, n: int) -> Network:
        if self.base.shape[-1] != n:
            raise ValueError(
                f"the links are for {self.base.shape[-1]} clients, but {n} take part in this push"
            )
        return self

    def __check_init__(self) -> None:
        shapes = {jnp.shape(self.base), jnp.shape(self.probability)}
        if len(shapes) > 1 or self.base.ndim != 3 or self.base.shape[-2] != self.base.shape[-1]:
            raise ValueError(
                f"a network needs weights and probabilities of shape (times, n, n); got {sorted(shapes)}"
            )

    def draw(self, key: Key[Array, ""], time: Any = 0) -> Float[Array, "clients clients"]:
        """The weights of one exchange."""
        now = jnp.asarray(time) % self.base.shape[0]
        # In another process the numbers arrive as numpy's, which a traced time cannot index.
        base, probability = (jnp.asarray(numbers)[now] for numbers in (self.base, self.probability))
        chance = jax.random.uniform(key, base.shape, base.dtype)
        upper = jnp.triu(chance, 1)
        present = jnp.where(self.undirected, upper + upper.T, chance) < probability
        present = present | jnp.eye(base.shape[0], dtype=bool)
        return jnp.where(self.balanced, metropolis(present & (base != 0)), _shared_out(base, present))

    def heard(self) -> Matrix:
        """`(n, n)`: how often, in the mean over exchanges, i hears j."""
        probability, n = np.array(self.probability, float), self.base.shape[-1]
        probability[:, np.arange(n), np.arange(n)] = 1.0
        frequency: Matrix = np.mean(probability * (np.asarray(self.base) != 0), axis=0)
        return frequency

    def expected(self) -> Matrix:
        """`(n, n)`: the mean weight of j's value at i, where it has a closed form.

        That is where links are always there, or where a sender gives all of them the same.
        """
        balanced = bool(self.balanced)
        means = [
            expected_weights(np.asarray(b, float), np.asarray(p, float), balanced)
            for b, p in zip(self.base, self.probability, strict=True)
        ]
        return np.asarray(np.mean(means, axis=0))


class Reversed(Links):
    """The same links with every message turned round: `Wᵀ`. Only undirected links can carry it."""

    links: Links

    def network(self, n: int) -> Network:
        raise TypeError("reversed links are known exchange by exchange only; use their `weights`")

    def weights(
        self, key: Key[Array, ""], n: int, time: Any = 0, there: Any = None
    ) -> Float[Array, "{n} {n}"]:
        return self.links.weights(key, n, time, there).T


class Lazy(Links):
    """The same links where every client keeps half of its own value: `(I + W)/2`."""

    links: Links

    def network(self, n: int) -> Network:
        raise TypeError("lazy links are known exchange by exchange only; use their `weights`")

    def weights(
        self, key: Key[Array, ""], n: int, time: Any = 0, there: Any = None
    ) -> Float[Array, "{n} {n}"]:
        half = self.links.weights(key, n, time, there) / 2
        # What rounding leaves of a row's sum goes to the client itself: it would add up from step to step.
        return half + jnp.diag(1 - jnp.sum(half, axis=1))


def among_those_there(
    weights: Float[Array, "clients clients"], there: Bool[Array, " clients"]
) -> Float[Array, "clients clients"]:
    """Weights without the links of clients that are away; what a sender would give over them it keeps.

    Columns keep their sums, so nothing is lost; symmetric weights stay symmetric, and so doubly stochastic.
    """
    diagonal = jnp.eye(weights.shape[0], dtype=bool)
    left = jnp.where((there[:, None] & there[None, :]) | diagonal, weights, 0)
    return left + jnp.diag(jnp.sum(weights - left, axis=0))


def edges(weights: Float[Array, "clients clients"]) -> Int[Array, ""]:
    """How many messages an exchange takes: the non-zero weights off the diagonal."""
    n = weights.shape[0]
    return jnp.sum((weights != 0) & ~jnp.eye(n, dtype=bool)).astype(jnp.int32)


def _shared_out(base: jax.Array, present: jax.Array) -> jax.Array:
    """Columns of `base` on present links, each scaled to the sum it has when all are present."""
    given = jnp.where(present, base, 0)
    total, left = jnp.sum(base, axis=0), jnp.sum(given, axis=0)
    # A column of which nothing is missing stays as it is: its sum may be zero, as in I − W.
    missing = jnp.any(given != base, axis=0)
    return given * jnp.where(missing, total / jnp.where(left == 0, 1, left), 1)
