"""Tune a penalty over clients' data that may not be moved: the program of the README."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import fedbilevel as fb


def loss(y: jax.Array, samples: dict[str, jax.Array]) -> jax.Array:
    """Squared error of a linear model y."""
    return jnp.mean((samples["features"] @ y - samples["targets"]) ** 2)


def upper(x: jax.Array, y: jax.Array, samples: dict[str, jax.Array]) -> jax.Array:
    """What we care about: the error on validation data."""
    return loss(y, samples)


def lower(x: jax.Array, y: jax.Array, samples: dict[str, jax.Array]) -> jax.Array:
    """What trains the model: the error on training data and a penalty, its weight exp(x)."""
    return loss(y, samples) + jnp.exp(x) * jnp.sum(y**2)


def data(key: jax.Array, samples: int) -> list[dict[str, jax.Array]]:
    """Four clients, each with its own noise."""
    truth = jnp.where(jnp.arange(20) < 3, 1.0, 0.0)
    clients = []
    for client, own in enumerate(jax.random.split(key, 4)):
        k_features, k_noise = jax.random.split(own)
        features = jax.random.normal(k_features, (samples, 20))
        noise = 0.5 * (1 + client) * jax.random.normal(k_noise, (samples,))
        clients.append({"features": features, "targets": features @ truth + noise})
    return clients


def main() -> None:
    """FedNest tunes the penalty; the ledger says what that took."""
    train, validation = data(jax.random.key(0), 8), data(jax.random.key(1), 40)
    problem = fb.Problem(upper=upper, lower=lower, x0=-3.0, y0=jnp.zeros(20))
    clients = fb.Clients(lower=train, upper=validation)
    algorithm = fb.FedNest(upper_lr=0.3, lower_lr=0.05, lower_steps=10, terms=10, series="cg")
    result = fb.solve(problem, clients, algorithm, steps=100)
    print(f"penalty {jnp.exp(result.x):.3f}")
    print(result.ledger)


if __name__ == "__main__":
    main()
