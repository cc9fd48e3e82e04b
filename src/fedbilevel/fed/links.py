"""Links: who hears whom, and with which weight, when clients talk to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedbilevel.fed.mixing import Matrix, connected, fastest_mixing, metropolis
from fedbilevel.fed.network import Links, Network
from fedbilevel.number import check_shares

__all__ = ["Complete", "ErdosRenyi", "Given", "Links", "Network", "Ring", "Stochastic"]


class Complete(Links):
    """Everybody hears everybody, with weight 1/n: `push` is the mean, at every client."""

    def network(self, n: int) -> Network:
        return Network(jnp.full((1, n, n), 1.0 / n), jnp.ones((1, n, n)), True)


class Ring(Links):
    """Clients in a circle hear their two neighbours and themselves, with weight 1/3 (two clients: 1/2).

    Args:
        directed: hear only the one before, with weight 1/2. Messages then go one way round: push-sum works,
            hypergradient push does not.
    """

    directed: bool = eqx.field(static=True, default=False)

    def network(self, n: int) -> Network:
        one_way = np.eye(n) + np.roll(np.eye(n), 1, axis=0)
        support = one_way if self.directed else one_way + np.roll(np.eye(n), -1, axis=0)
        present = support != 0
        return _always(present / present.sum(axis=0))


class ErdosRenyi(Links):
    """A fixed undirected random graph: every pair is linked with probability p. Doubly stochastic weights.

    Graphs are drawn from `seed` until one is connected.

    Args:
        probability: p, of each link.
        mixing: the weights: "metropolis": `1/(1 + max degree of the two)`; "fastest": those of the fastest
            mixing Markov chain on the graph, by a convex solver (needs the extra `fedbilevel[networks]`).
        seed: draws the graph.

    References: P. Erdős, A. Rényi, On random graphs, 1959; S. Boyd, P. Diaconis, L. Xiao, Fastest mixing
    Markov chain on a graph, SIAM Review 2004.
    """

    probability: float = eqx.field(static=True, default=0.4)
    mixing: str = eqx.field(static=True, default="metropolis")
    seed: int = eqx.field(static=True, default=0)

    def __check_init__(self) -> None:
        if self.mixing not in ("metropolis", "fastest"):
            raise ValueError(f'mixing is {self.mixing!r}; it must be "metropolis" or "fastest"')
        check_shares(self, "probability")

    def network(self, n: int) -> Network:
        graph = _connected_graph(n, self.probability, self.seed)
        if self.mixing == "fastest":
            return _always(fastest_mixing(graph), undirected=True)
        return _always(np.asarray(metropolis(jnp.asarray(graph))), undirected=True)


class Stochastic(Links):
    """Links that come and go: each is present with a probability of its own, anew in every exchange.

    Args:
        low, high: the probability of each pair is drawn once between these, from `seed`.
        directed: whether "i hears j" and "j hears i" are separate events with separate probabilities.
        balanced: doubly stochastic weights (undirected links only) in the place of equal shares for all whom
            the sender reaches.
        probability: `(n, n)` instead: `[i, j]` how often i hears j; or one number for all.
        seed: draws the probabilities.
    """

    low: float = eqx.field(static=True)
    high: float = eqx.field(static=True)
    directed: bool = eqx.field(static=True)
    balanced: bool = eqx.field(static=True)
    probability: Any
    seed: int = eqx.field(static=True)

    def __init__(
        self,
        low: float = 0.4,
        high: float = 0.8,
        directed: bool = True,
        balanced: bool = False,
        probability: Any = None,
        seed: int = 0,
    ) -> None:
        if directed and balanced:
            raise ValueError("balanced weights need undirected links: a sender cannot know who hears others")
        _check_probabilities(np.asarray([low, high] if probability is None else probability))
        if low > high:
            raise ValueError(f"low is {low} and high {high}; probabilities are drawn from low to high")
        if not directed and probability is not None:
            _check_symmetric(np.asarray(probability))
        self.low, self.high, self.directed, self.balanced, self.seed = low, high, directed, balanced, seed
        self.probability = None if probability is None else jnp.asarray(probability, float)

    def network(self, n: int) -> Network:
        chances = self._probabilities(n)
        return Network(jnp.full((1, n, n), 1.0 / n), chances[None], not self.directed, self.balanced)

    def _probabilities(self, n: int) -> Any:
        if self.probability is None:
            drawn = np.random.default_rng(self.seed).uniform(self.low, self.high, (n, n))
            chances = drawn if self.directed else np.triu(drawn) + np.triu(drawn, 1).T
            return jnp.asarray(chances, float)
        if self.probability.ndim and self.probability.shape != (n, n):
            raise ValueError(
                f"the probabilities of links have shape {self.probability.shape}; {n} clients need ({n}, {n})"
            )
        return jnp.broadcast_to(self.probability, (n, n))


class Given(Links):
    """Fixed weights, or a schedule of them.

    Args:
        matrix: `(n, n)`; entry `[i, j]` is the weight of client j's value at client i. A zero is no
            link, and costs nothing. Or `(times, n, n)`, one matrix an exchange, again and again.
    """

    matrix: Float[Array, "... clients clients"]

    def __init__(self, matrix: Any) -> None:
        self.matrix = _as_array(matrix)
        if self.matrix.ndim not in (2, 3) or self.matrix.shape[-2] != self.matrix.shape[-1]:
            raise ValueError(
                "links need a square matrix, one row and column a client, or several of them; "
                f"got shape {self.matrix.shape}"
            )
        computed = isinstance(self.matrix, jax.core.Tracer)  # inside a step: known at run time only
        if not computed and not np.all(np.isfinite(np.asarray(self.matrix))):
            raise ValueError("links need finite weights; the matrix holds a NaN or an infinity")

    def network(self, n: int) -> Network:
        if self.matrix.shape[-1] != n:
            raise ValueError(
                f"the links are for {self.matrix.shape[-1]} clients, but {n} take part in this push"
            )
        matrices = self.matrix[None] if self.matrix.ndim == 2 else self.matrix
        return Network(matrices, jnp.ones_like(matrices))


def _always(matrix: Matrix, undirected: bool = False) -> Network:
    return Network(matrix[None], np.ones_like(matrix)[None], undirected)


def _connected_graph(n: int, probability: float, seed: int) -> Matrix:
    """A symmetric `(n, n)` graph with self-loops, connected."""
    draws = np.random.default_rng(seed)
    for _ in range(1000):
        upper = np.triu(draws.random((n, n)) < probability, 1)
        graph = upper | upper.T | np.eye(n, dtype=bool)
        if connected(graph):
            return graph
    raise ValueError(
        f"none of 1000 random graphs of {n} clients with link probability {probability} was connected; "
        "raise the probability"
    )


def _check_probabilities(values: Matrix) -> None:
    if values.dtype.kind not in "biuf" or not np.all((values >= 0) & (values <= 1)):
        raise ValueError(f"probabilities of links must lie between 0 and 1; got {values.tolist()}")


def _check_symmetric(probability: Matrix) -> None:
    if probability.ndim == 2 and not np.array_equal(probability, probability.T):
        raise ValueError(
            "undirected links need symmetric probabilities: i hears j exactly when j hears i. "
            "For separate ones set directed=True"
        )


def _as_array(matrix: Any) -> jax.Array:
    """A matrix, or a sequence of matrices or rows, as one array."""
    try:
        rows = isinstance(matrix, Sequence) and not isinstance(matrix, str)
        return jnp.stack([jnp.asarray(row) for row in matrix]) if rows else jnp.asarray(matrix)
    except (TypeError, ValueError):
        raise ValueError(
            f"links need a square matrix of numbers, one row and column a client; got {repr(matrix)[:80]}"
        ) from None
