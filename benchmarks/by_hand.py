"""FedNest's hyper-representation step written by hand in JAX: no placed values, no ledger, no oracles.

The same mathematics and the same draws as the library's, so that both give the same iterates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from representation import (
    BATCH,
    CLASSES,
    CLIENTS,
    COHORT,
    EPOCHS,
    LOWER_LR,
    PENALTY,
    SAMPLES,
    SMOOTHNESS,
    TERMS,
    UPPER_LR,
)

from fedbilevel.draw import below, shuffled
from fedbilevel.fed.federation import choose


class Data(NamedTuple):
    """`(clients, samples, 784)` and `(clients, samples)`, at both levels."""

    train: Any
    validation: Any


def steps(data: Data, x: Any, y: Any, key: jax.Array, count: Any) -> Any:
    """So many steps as one program."""
    return jax.lax.fori_loop(0, count, lambda t, xy: step(data, *xy, jr.fold_in(key, t)), (x, y))


def step(data: Data, x: Any, y: Any, key: jax.Array) -> Any:
    """One round."""
    k_cohort, k_inner, k_outer = jr.split(key, 3)
    ids = choose(k_cohort, CLIENTS, COHORT)
    k_anchor, k_steps = jr.split(jr.fold_in(k_inner, 0))
    q = mean(jax.vmap(lambda i: anchor(data, x, y, i, own_key(k_anchor, i)))(ids))
    y = mean(jax.vmap(lambda i: inner(data, x, y, q, i, own_key(k_steps, i)))(ids))
    k_hyper, _ = jr.split(k_outer)
    k_adjoint, k_assemble = jr.split(k_hyper)
    u = adjoint(data, x, y, k_adjoint)
    h = mean(jax.vmap(lambda i: hypergradient(data, x, y, u, own_key(k_assemble, i), i))(ids))
    return move(x, UPPER_LR, h), y  # the first of the local steps on x: its two gradients cancel


def anchor(data: Data, x: Any, y: Any, client: Any, key: jax.Array) -> Any:
    """The gradient of the head on a batch."""
    return jax.grad(lower, argnums=1)(x, y, batch(data.train, client, key))


def inner(data: Data, x: Any, y: Any, q: Any, client: Any, key: jax.Array) -> Any:
    """Local epochs on the head, on features that are computed once."""
    inputs, labels = row(data.train, client)
    features = hidden(x, inputs)

    def epoch(index: Any, own: Any) -> Any:
        order = shuffled(jr.fold_in(key, index), SAMPLES, SAMPLES)
        order = jnp.pad(order, (0, -SAMPLES % BATCH))

        def visit(number: Any, own: Any) -> Any:
            rows = jax.lax.dynamic_slice(order, (number * BATCH,), (BATCH,))
            count = jnp.minimum(SAMPLES - number * BATCH, BATCH)
            weight = (jnp.arange(BATCH) < count) / count
            gradient = jax.grad(lambda y: head_loss(y, features[rows], labels[rows], weight))
            change = jax.tree.map(lambda a, b, c: a - b + c, gradient(own), gradient(y), q)
            return move(own, LOWER_LR * count / BATCH, change)

        return jax.lax.fori_loop(0, -(-SAMPLES // BATCH), visit, own)

    return jax.lax.fori_loop(0, EPOCHS, epoch, y)


def adjoint(data: Data, x: Any, y: Any, key: jax.Array) -> Any:
    """A sampled term of the series; every product at new clients."""
    k_right, k_products, k_series, _ = jr.split(key, 4)

    def right(client: Any, own: jax.Array) -> Any:
        return jax.grad(upper, argnums=1)(x, y, batch(data.validation, client, own))

    def product(client: Any, own: jax.Array, v: Any) -> Any:
        samples = batch(data.train, client, own)
        return jax.jvp(lambda y: jax.grad(lower, argnums=1)(x, y, samples), (y,), (v,))[1]

    def ask(function: Any, key: jax.Array, *values: Any) -> Any:
        k_who, k_what = jr.split(key)
        ids = choose(k_who, CLIENTS, COHORT)
        return mean(jax.vmap(lambda i: function(i, own_key(k_what, i), *values))(ids))

    def advance(index: Any, term: Any) -> Any:
        return move(term, 1 / SMOOTHNESS, ask(product, jr.fold_in(k_products, index), term))

    first = jax.tree.map(lambda leaf: leaf / SMOOTHNESS, ask(right, k_right))
    last = jax.lax.fori_loop(0, below(k_series, (), TERMS), advance, first)
    return jax.tree.map(lambda leaf: TERMS * leaf, last)


def hypergradient(data: Data, x: Any, y: Any, u: Any, key: jax.Array, client: Any) -> Any:
    """`∇_x f − J u` on a batch of each level."""
    k_upper, k_lower = jr.split(key)
    direct = jax.grad(upper)(x, y, batch(data.validation, client, k_upper))
    samples = batch(data.train, client, k_lower)

    def slope(x: Any) -> jax.Array:
        return jax.jvp(lambda y: lower(x, y, samples), (y,), (u,))[1]

    return jax.tree.map(jnp.subtract, direct, jax.grad(slope)(x))


def hidden(x: Any, inputs: jax.Array) -> jax.Array:
    """The features."""
    return jax.nn.relu(inputs @ x["weight"] + x["bias"])


def head_loss(y: Any, features: jax.Array, labels: jax.Array, weight: jax.Array) -> jax.Array:
    """The weighted loss of the head, and its penalty."""
    logits = features @ y["weight"] + y["bias"]
    each = jnp.sum(jax.nn.one_hot(labels, CLASSES) * jax.nn.log_softmax(logits), axis=-1)
    return -weight @ each + PENALTY / 2 * (jnp.sum(y["weight"] ** 2) + jnp.sum(y["bias"] ** 2))


def lower(x: Any, y: Any, samples: Any) -> jax.Array:
    """g on a batch."""
    inputs, labels = samples
    return head_loss(y, hidden(x, inputs), labels, jnp.full(BATCH, 1 / BATCH))


def upper(x: Any, y: Any, samples: Any) -> jax.Array:
    """f on a batch: without penalty."""
    inputs, labels = samples
    logits = hidden(x, inputs) @ y["weight"] + y["bias"]
    return -jnp.mean(jnp.sum(jax.nn.one_hot(labels, CLASSES) * jax.nn.log_softmax(logits), axis=-1))


def batch(table: Any, client: Any, key: jax.Array) -> Any:
    """A batch with replacement."""
    rows = below(key, (BATCH,), SAMPLES)
    return jax.tree.map(lambda leaf: leaf[client, rows], table)


def own_key(key: jax.Array, client: Any) -> jax.Array:
    """A client's own key."""
    return jr.fold_in(key, client)


def row(table: Any, client: Any) -> Any:
    """One client's samples."""
    return jax.tree.map(lambda leaf: leaf[client], table)


def mean(rows: Any) -> Any:
    """Over clients."""
    # A product: XLA sums over the first axis slowly on a CPU.
    return jax.tree.map(lambda leaf: jnp.tensordot(jnp.full(COHORT, 1 / COHORT), leaf, axes=1), rows)


def move(a: Any, lr: Any, direction: Any) -> Any:
    """`a − lr · direction`."""
    return jax.tree.map(lambda p, d: p - lr * d, a, direction)
