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

from fedbilevel.fed.mixing import Matrix, connected, expected_weights, metropolis


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


# ------------------------------------------------------------------- checks


def check_links(links: Any) -> None:
    """Raise an error that explains unless these are links."""
    if not isinstance(links, Links):
        raise TypeError(
            f"links is {links!r}; it must say who hears whom, such as fedbilevel.links.Complete() or "
            "fedbilevel.links.Given(matrix)"
        )


def check_all_answer(fed: Any) -> None:
    """Raise an error that explains if clients of a federation may fall silent, where they mix what they hold.

    A sender's weights, its own among them, keep the sum of all values; who computes nothing sends nothing,
    not even to itself.
    """
    dropout = getattr(fed, "dropout", 0.0)
    if dropout > 0:
        raise ValueError(
            f"dropout is {dropout}, but where clients mix with their neighbours, what a silent client held "
            "is lost for all. Leave dropout at 0; for links that come and go use links.Stochastic, for "
            "clients that do Simulator(availability=...)"
        )


def check_push_sum(network: Network) -> None:
    """Raise an error that explains unless push-sum over these links reaches a consensus."""
    totals = np.asarray(network.base).sum(axis=1)
    if not bool(network.balanced) and not np.allclose(totals, 1, atol=1e-5):
        sender = int(np.argmax(np.abs(totals - 1).max(axis=0)))
        raise ValueError(
            f"client {sender} gives away weights that sum to {totals[:, sender].tolist()}; in push-sum every "
            "sender's weights, a column of the matrix, must sum to one, or mass is lost"
        )
    if np.any(np.asarray(network.base) < 0):
        raise ValueError("push-sum needs weights of at least 0; a weight is negative")
    _check_something_stays(network)
    if not connected(network.heard() > 0):
        raise ValueError(
            "some client never hears, even by others, from some other one: no consensus is possible"
        )


def _check_something_stays(network: Network) -> None:
    """Raise an error that explains if a client may have nobody to give its mass to, not even itself."""
    base, probability = np.asarray(network.base), np.asarray(network.probability)
    itself = np.diagonal(base, axis1=1, axis2=2)
    safe = (itself > 0) | np.all((probability >= 1) | (base == 0), axis=1) | bool(network.balanced)
    if not np.all(safe):
        raise ValueError(
            f"client {int(np.argwhere(~safe)[0, 1])} gives itself no weight, and its links may all be "
            "absent: its mass would be lost. Give every client whose links come and go a weight for itself"
        )


def check_both_ways(network: Network) -> None:
    """Raise an error that explains unless whoever can hear a client can also be heard by it.

    Hypergradient push receives over j → i what the exact recursion needs over i → j.
    """
    heard = network.heard() > 0
    one_way = np.argwhere(heard & ~heard.T)
    if len(one_way):
        i, j = one_way[0].tolist()
        raise ValueError(
            f"client {i} hears client {j}, but {j} never hears {i} ({len(one_way)} such links). "
            f"Hypergradient push "
            "needs links that exist both ways, if not at the same time (assumption 6 of its paper)"
        )


def check_undirected(network: Network) -> None:
    """Raise an error that explains unless in every exchange links come in pairs."""
    support = (np.asarray(network.base) != 0) & (np.asarray(network.probability) > 0)
    certain = np.all((np.asarray(network.probability) >= 1) | ~support)
    if not np.array_equal(support, support.transpose(0, 2, 1)) or not (certain or bool(network.undirected)):
        raise ValueError(
            "exact backpropagation answers over the link that brought a message, so links must be "
            "undirected; "
            "over directed links use hypergradient push (HGP, VRHGP)"
        )


# ------------------------------------------------------------------ the parts


def _shared_out(base: jax.Array, present: jax.Array) -> jax.Array:
    """Columns of `base` on present links, each scaled to the sum it has when all are present."""
    given = jnp.where(present, base, 0)
    total, left = jnp.sum(base, axis=0), jnp.sum(given, axis=0)
    # A column of which nothing is missing stays as it is: its sum may be zero, as in I − W.
    missing = jnp.any(given != base, axis=0)
    return given * jnp.where(missing, total / jnp.where(left == 0, 1, left), 1)
