"""Doubly stochastic weights on an undirected graph, and whether a graph is connected."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[Any]


def metropolis(graph: jax.Array) -> jax.Array:
    """`W_ij = 1/(1 + max(degree_i, degree_j))` on links, the rest on the diagonal.

    Symmetric and doubly stochastic on an undirected graph.

    Args:
        graph: `(n, n)` bool; the diagonal is not looked at.

    Reference: L. Xiao, S. Boyd, Fast linear iterations for distributed averaging, 2004.
    """
    links = graph & ~jnp.eye(graph.shape[0], dtype=bool)
    degree = jnp.sum(links, axis=1)
    weights = jnp.where(links, 1.0 / (1.0 + jnp.maximum(degree[:, None], degree[None, :])), 0.0)
    return weights + jnp.diag(1.0 - jnp.sum(weights, axis=1))


def fastest_mixing(graph: Matrix) -> Matrix:
    """The symmetric doubly stochastic weights on a graph with the smallest second eigenvalue modulus.

    Minimises `‖W − 11ᵀ/n‖₂` over W ≥ 0, W = Wᵀ, W1 = 1, zero off the graph: a semidefinite program.

    Args:
        graph: `(n, n)` bool, symmetric, with self-loops.

    Reference: S. Boyd, P. Diaconis, L. Xiao, Fastest mixing Markov chain on a graph, SIAM Review 2004.
    """
    try:
        import cvxpy  # an extra, and slow to import
    except ImportError:
        raise ImportError(
            'the fastest mixing weights need a convex solver: pip install "fedbilevel[networks]"; '
            'or take mixing="metropolis"'
        ) from None
    n = len(graph)
    weights = cvxpy.Variable((n, n), symmetric=True)
    rules = [weights >= 0, cvxpy.sum(weights, axis=1) == 1, weights[~graph] == 0]
    program = cvxpy.Problem(cvxpy.Minimize(cvxpy.sigma_max(weights - np.full((n, n), 1 / n))), rules)
    program.solve()
    if weights.value is None:
        raise RuntimeError(
            f"the solver found no fastest mixing weights for this graph of {n} clients (it says "
            f'"{program.status}"); take mixing="metropolis"'
        )
    return feasible(np.asarray(weights.value), graph)


def connected(heard: Matrix) -> bool:
    """Whether everybody hears, perhaps by others, from everybody.

    Args:
        heard: `(n, n)` bool; `[i, j]`: i hears j.
    """
    reach, steps = (heard | np.eye(len(heard), dtype=bool)).astype(float), 1
    while steps < len(heard):
        reach, steps = ((reach @ reach) > 0).astype(float), 2 * steps
    return bool(np.all(reach > 0))


def expected_weights(base: Matrix, probability: Matrix, balanced: bool) -> Matrix:
    """`(n, n)`: the mean weight of j's value at i over random links, where it has a closed form.

    Args:
        base: `(n, n)` weights when all links are there.
        probability: `(n, n)`, how often i hears j.
        balanced: whether weights are Metropolis' on the links that are there.
    """
    certain = np.all((probability >= 1) | (base == 0) | np.eye(len(base), dtype=bool))
    if certain:
        return np.asarray(metropolis(jnp.asarray(base != 0)), float) if balanced else base
    columns = [column[column != 0] for column in base.T]
    if balanced or not all(np.allclose(column, column[0]) for column in columns):
        raise ValueError(
            "the mean weights of these random links have no closed form here; let the nodes estimate them "
            '(statistics="estimated")'
        )
    n = len(base)
    chances = np.where(np.eye(n, dtype=bool), 1.0, probability) * (base != 0)
    return np.stack([_mean_shares(chances[:, j], j) for j in range(n)], axis=1)


def _mean_shares(chances: Matrix, sender: int) -> Matrix:
    """`E[δ_i/Σ_k δ_k]` for independent δ, one of them (the sender's own) always 1.

    `1/S = ∫₀¹ s^{S−1} ds`, so it is `q_i ∫₀¹ Π_{k ≠ i, sender} (1 − q_k + q_k s) s^{i ≠ sender} ds`, a
    polynomial that Gauss' quadrature integrates exactly.
    """
    nodes, weights = np.polynomial.legendre.leggauss(len(chances) // 2 + 1)
    s, weights = (nodes + 1) / 2, weights / 2
    factors = 1 - chances[:, None] + chances[:, None] * s
    factors[sender] = 1.0
    products = np.stack([np.delete(factors, i, axis=0).prod(axis=0) for i in range(len(chances))])
    powers = np.where(np.arange(len(chances))[:, None] == sender, 1.0, s)
    return np.asarray(chances * ((products * powers) @ weights))


def feasible(weights: Matrix, graph: Matrix) -> Matrix:
    """What a solver gives to a tolerance, made to fulfil the rules exactly: symmetric, zeros, row sums."""
    links = np.where(graph, np.clip((weights + weights.T) / 2, 0, None), 0.0)
    np.fill_diagonal(links, 0.0)
    links /= max(1.0, links.sum(axis=1).max())  # what a node keeps for itself is not below zero
    return links + np.diag(np.maximum(0, 1 - links.sum(axis=1)))  # rounding alone may go below zero
