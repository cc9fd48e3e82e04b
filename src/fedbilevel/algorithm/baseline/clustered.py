"""Clustered federated learning: federated averaging among clients that pull the same way."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fedbilevel.algorithm.base import Algorithm, Info, check_lengths, with_server
from fedbilevel.algorithm.baseline.local import first_own
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.links import Complete, Links
from fedbilevel.fed.place import Kept
from fedbilevel.fed.program import Program
from fedbilevel.local.descent import Descent
from fedbilevel.local.work import Amount, Work, amount, check_amounts
from fedbilevel.number import check_not_negative
from fedbilevel.problem.oracle import Client
from fedbilevel.schedule import Rate, rate
from fedbilevel.tree import PyTree, add, copies, sub


class Clustered(NamedTuple):
    """x and the model of its cluster at every client; that model for each as the server knows it; `(n,)`:
    the cluster of each.

    A cluster is called by the smallest id of its clients, so there is no need to number them.
    """

    x: Kept
    y: Kept
    models: PyTree
    cluster: jax.Array


class Update(Program):
    """`(x, y) ↦ Δ_i`: how far local steps take a client from y."""

    descent: Descent

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y = values
        return sub(self.descent(me, x, y), y)


class ClusteredFL(Algorithm[Clustered]):
    """FedAvg within clusters; a cluster whose clients pull different ways where they stand is divided.

    A step: every client makes τ SGD steps on `g_i(x0, ·)` from the model of its cluster and sends the update
    Δ_i. A cluster c is divided if, with the clients' weights in the mean,

        ‖mean_{i∈c} Δ_i‖ < ε₁   and   max_{i∈c} ‖Δ_i‖ > ε₂

    into the two halves a, b whose most similar clients of different halves are least so:

        min over a ∪ b = c of   max_{i∈a, j∈b} ⟨Δ_i, Δ_j⟩/(‖Δ_i‖ ‖Δ_j‖)

    (the paper's rule: the weakest link of a maximum spanning tree; where several halvings are equally good,
    the one that leaves the smallest id with its nearest). Then every cluster's model
    moves by its mean update, and is sent to its clients: who missed a round has it after the next. At
    first all clients are one cluster. `result.y` has one row a client: its cluster's model.

    Args:
        lower_lr: step size; a number or an optax schedule of the step.
        mean_below: ε₁, of the order of the steps: the common model hardly moves any more.
        largest_above: ε₂, at least ε₁: some client still wants to move.
        steps: τ, a number or a tuple with one for each client.
        epochs: shuffled passes over the data in the place of steps.
        links: must be complete, since it needs a server; others are refused with a `CannotRunError`.

    A cluster is divided only if all of its clients have answered. The server sees every client's update.
    The history has `clusters`, how many there are.

    Cost a step and client: one exchange, `d_y` scalars each way, τ calls of g_y.

    Reference: F. Sattler, K.-R. Müller, W. Samek, Clustered federated learning: model-agnostic distributed
    multitask optimization under privacy constraints, IEEE TNNLS 2021.
    """

    lower_lr: Rate = eqx.field(converter=rate)
    mean_below: Any
    largest_above: Any
    steps: Amount = eqx.field(static=True, converter=amount, default=1)
    epochs: Amount | None = eqx.field(static=True, converter=amount, default=None)
    links: Links = Complete()

    def __check_init__(self) -> None:
        check_amounts(self, "steps", "epochs")
        check_not_negative(self, "mean_below", "largest_above")

    def among(self, n: int) -> Any:
        return with_server(self, n)

    def init(self, fed: Federation, key: jax.Array) -> Clustered:
        check_lengths(self, fed.n)
        return Clustered(*first_own(fed), copies(fed.problem.y0, fed.n), jnp.zeros(fed.n, jnp.int32))

    def step(self, fed: Federation, state: Clustered, key: jax.Array) -> tuple[Clustered, Info]:
        everyone, (x, y) = fed.everyone, (fed.everyone.take(state.x), fed.everyone.take(state.y))
        program = Update(Descent(self.lower_lr, Work("lower", self.steps, self.epochs)))
        updates, answered = everyone.gather(everyone.run(program, x, y, key=key), "update")
        weights = (jnp.ones(fed.n) if everyone.weights is None else everyone.weights) * answered
        products = _products(updates)
        due = self._due(products, state.cluster, weights) & _all_of(state.cluster, answered)
        cluster = halved(_cosines(products), state.cluster, due)
        means = jax.tree.map(lambda rows: _mixed(shares(cluster, weights), rows), updates)
        models = add(state.models, means)
        own = everyone.put(state.y, everyone.deal(models, "y"))
        return Clustered(state.x, own, models, cluster), {"clusters": jnp.sum(cluster == jnp.arange(fed.n))}

    def _due(self, products: jax.Array, cluster: jax.Array, weights: jax.Array) -> Bool[Array, " n"]:
        """For each client whether its cluster shall be divided."""
        share = shares(cluster, weights).astype(products.dtype)
        mean = jnp.sum((share @ products) * share, axis=1)  # ‖Σ_j share_ij Δ_j‖²
        largest = jnp.max(jnp.where(_same(cluster), jnp.diag(products), 0), axis=1)
        return (mean < self.mean_below**2) & (largest > self.largest_above**2)

    def solution(self, state: Clustered) -> tuple[PyTree, PyTree]:
        return state.x, state.y


# ------------------------------------------------------------------ clusters


def shares(cluster: Int[Array, " n"], weights: Float[Array, " n"]) -> Float[Array, "n n"]:
    """`[i, j]`: the share of j in the mean over the cluster of i; zero where nobody there has a weight."""
    inside = jnp.where(_same(cluster), weights, 0)
    total = jnp.sum(inside, axis=1, keepdims=True)
    return jnp.where(total > 0, inside / jnp.where(total > 0, total, 1), 0)


def halved(
    similar: Float[Array, "n n"], cluster: Int[Array, " n"], due: Bool[Array, " n"]
) -> Int[Array, " n"]:
    """The clusters after some are divided, so that the halves are as dissimilar as possible.

    The closure of the similarities by `max_k min(s_ik, s_kj)` is that of the weakest link on the best chain
    from i to j. Its smallest value in a cluster is that of the link to cut; who is reached from the cluster's
    first client over better links only stays with it.

    Args:
        similar: symmetric, of each pair of clients.
        cluster: for each client the smallest id in its cluster.
        due: for each client whether its cluster is to be divided.
    """
    ids, inside = jnp.arange(len(cluster), dtype=cluster.dtype), _same(cluster)
    chain = _best_chains(jnp.where(inside, similar, -jnp.inf))
    weakest = jnp.min(jnp.where(inside, chain, jnp.inf), axis=1)
    leaves = due & (ids != cluster) & (chain[ids, cluster] <= weakest)
    first = jnp.min(jnp.where(inside & leaves, ids, len(cluster)), axis=1)
    return jnp.where(leaves, first.astype(cluster.dtype), cluster)


@jax.jit  # a server that runs it step by step would compile the loop in every step
def _best_chains(similar: jax.Array) -> jax.Array:
    def by_way_of(k: Any, best: jax.Array) -> jax.Array:
        return jnp.maximum(best, jnp.minimum(best[:, k, None], best[None, k, :]))

    return jax.lax.fori_loop(0, len(similar), by_way_of, similar)


def _same(cluster: jax.Array) -> jax.Array:
    return cluster[:, None] == cluster[None, :]


def _all_of(cluster: jax.Array, answered: jax.Array) -> jax.Array:
    return jnp.all(~_same(cluster) | answered, axis=1)


def _products(rows: PyTree) -> jax.Array:
    """`(n, n)`: the inner product of each pair of rows."""
    flat = [leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(rows)]
    products = jnp.asarray(sum(leaf @ leaf.T for leaf in flat))
    return (products + products.T) / 2  # symmetric to the last bit, in whichever order sums were taken


def _cosines(products: jax.Array) -> jax.Array:
    """Of the angles between rows; zero for a row of length zero."""
    length = jnp.sqrt(jnp.diag(products))
    both = length[:, None] * length[None, :]
    return jnp.where(both > 0, products / jnp.where(both > 0, both, 1), 0)


def _mixed(share: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.tensordot(share.astype(rows.dtype), rows, axes=1)
