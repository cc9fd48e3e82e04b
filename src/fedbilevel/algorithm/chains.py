"""FedMBO's hypergradient: a chain for every client of the cohort, each of which walks over single clients."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.adjoint.neumann import Neumann
from fedbilevel.algorithm.base import Info
from fedbilevel.algorithm.exchange import Point
from fedbilevel.draw import below, shuffled
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.program import Program
from fedbilevel.local.gradients import Assemble, Curvature, UpperGradient
from fedbilevel.tree import PyTree, add, norm, row, scale, step, where


class Chains(NamedTuple):
    """One chain a row.

    Attributes:
        vectors: `(N/ℓ) Π (I − H_i/ℓ) ∇_y f_i` as far as it is, stacked like y.
        left: how many factors are still to come.
    """

    vectors: PyTree
    left: jax.Array


def chained_hypergradient(
    fed: Federation, series: Neumann, cohort: Cohort, size: int | None, point: Point, key: jax.Array
) -> tuple[PyTree, Point, Info]:
    """`h = mean_c (∇_x f_c − J_c u_c)`, u_c by a chain for each client c of the cohort.

    A chain is `u_c = (N/ℓ) Π_{n≤N'_c} (I − H_{i_n}/ℓ) ∇_y f_{i_0}`, with a length N'_c uniform in {0..N−1}
    and clients i_0, i_1, ... of its own: every exchange deals the chains, in a random order, to a fresh
    cohort of as many clients. So every i_n is uniform over all clients and does not depend on the others,
    nor on c, and the mean of u_c is the truncated series of the mean Hessian.

    Clients with weights count as if f_i and g_i were multiplied by w_i, the weight over the mean weight.
    ℓ is multiplied by the largest w_i, so that no factor makes a vector longer.

    A chain whose client does not answer keeps its vector, and gets its factor in a later exchange, if there
    is one; one whose first client does not answer starts with the mean of those who did.

    Args:
        fed: the federation.
        series: N, ℓ (a bound of every client's own Hessian) and the damping, which is added to the diagonal
            of H and to ℓ.
        cohort: the cohort of the round.
        size: how many clients a fresh cohort has; None: everyone.
        point: where.
        key: of the estimate.

    Returns:
        h, the point (with its new holders), and how much a vector grew at worst, `adjoint_growth`.

    Cost, with M = max N'_c: M + 2 exchanges. Down d_y scalars a client in all but the first; up d_y in all
    but the last, d_x in that. Chains that have ended travel with the others. `(x, y)` goes down to clients
    that do not have it yet.

    Reference: M. Huang, D. Zhang, K. Ji, Achieving linear speedup in non-iid federated bilevel learning,
    ICML 2023, algorithm 2.
    """
    k_lengths, k_start, k_factors, k_order, k_last = jr.split(key, 5)
    bound = series.smoothness * jnp.max(_weights(fed, fed.everyone)) + series.damping
    starts, point = _starts(fed, size, point, k_start)
    lengths = below(k_lengths, (cohort.size,), series.terms)
    chains = Chains(scale(series.terms / bound, starts), lengths)

    def advance(index: Any, carry: Any) -> Any:
        chains, point, growth = carry
        own = jr.fold_in(k_factors, index)
        chains, point, ratio = _multiplied(fed, size, chains, point, own, bound, series.damping)
        return chains, point, jnp.maximum(growth, ratio)

    nothing = jnp.zeros((), norm(starts).dtype)
    chains, point, growth = fed.loop(jnp.max(lengths), advance, (chains, point, nothing))
    x, y, point = point.read(cohort)
    u = cohort.deal(_in_random_order(chains, k_order).vectors, "u")
    h = cohort.mean(cohort.run(Assemble(), x, y, u, key=k_last), "h")
    return h, point, {"adjoint_growth": growth}


def _starts(fed: Federation, size: int | None, point: Point, key: jax.Array) -> tuple[PyTree, Point]:
    """`w_i ∇_y f_i` of a fresh cohort, one row a client; the mean of those who answered for the others."""
    k_who, k_what = jr.split(key)
    asked = fed.cohort(k_who, size)
    rows, answered, point = _gathered(asked, UpperGradient(), point, k_what)
    rows = jax.vmap(scale)(_weights(fed, asked), rows)
    # Who did not answer is a row of zeros.
    mean = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0) / jnp.sum(answered), rows)
    return jax.vmap(where, in_axes=(0, 0, None))(answered, rows, mean), point


def _multiplied(
    fed: Federation, size: int | None, chains: Chains, point: Point, key: jax.Array, bound: Any, damping: Any
) -> tuple[Chains, Point, jax.Array]:
    """One exchange: `v ← v − (w_i H_i + damping) v/ℓ` for chains that go on, each at a client of its own.

    Returns:
        the chains, the point, and the largest ratio of a new norm to an old one.
    """
    k_who, k_order, k_what = jr.split(key, 3)
    asked, chains = fed.cohort(k_who, size), _in_random_order(chains, k_order)
    old = chains.vectors
    products, answered, point = _gathered(asked, Curvature(), point, k_what, old)
    products = add(jax.vmap(scale)(_weights(fed, asked), products), scale(damping, old))
    moves = answered & (chains.left > 0)
    vectors = jax.vmap(where)(moves, step(old, 1 / bound, products), old)
    return Chains(vectors, chains.left - moves.astype(jnp.int32)), point, _growth(old, vectors, moves)


def _gathered(
    asked: Cohort, program: Program, point: Point, key: jax.Array, *stacked: PyTree
) -> tuple[PyTree, jax.Array, Point]:
    """One exchange: deal the rows, run `program(x, y, *rows)` there; the answers, and who answered."""
    x, y, point = point.read(asked)
    dealt = [asked.deal(rows, "u") for rows in stacked]
    rows, answered = asked.gather(asked.run(program, x, y, *dealt, key=key), "u")
    return rows, answered, point


def _in_random_order(chains: Chains, key: jax.Array) -> Chains:
    """The chains in a random order: without it a chain would meet the clients of its own row."""
    count = chains.left.shape[0]
    mixed: Chains = row(chains, shuffled(key, count, count))
    return mixed


def _weights(fed: Federation, asked: Cohort) -> jax.Array:
    """w_i, the weights of some clients over the mean weight of all of them."""
    if asked.weights is None:
        return jnp.ones(asked.size)
    return jnp.asarray(asked.weights, float) / jnp.mean(jnp.asarray(fed.everyone.weights, float))


def _growth(old: PyTree, new: PyTree, moves: jax.Array) -> jax.Array:
    """The largest `‖new‖/‖old‖` of the rows that moved; 0 if none did."""
    before, after = jax.vmap(norm)(old), jax.vmap(norm)(new)
    counts = moves & (before > 0)
    return jnp.max(jnp.where(counts, after / jnp.where(counts, before, 1), 0))
