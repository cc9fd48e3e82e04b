"""Personalise a model without a server: every node finds out which of two shared models fits its own data."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import fedbilevel as fb


def loss(x: Any, y: Any, samples: Any) -> Any:
    """Both levels: x is a node's own, a number that chooses between the models y, which all nodes share."""
    share = jax.nn.sigmoid(x)
    model = share * y[0] + (1 - share) * y[1]
    return jnp.mean((samples["features"] @ model - samples["targets"]) ** 2) + 1e-3 * jnp.sum(y**2)


def node(key: Any, slope: float) -> Any:
    """Twenty samples of a node; what they have in common with those of others is known to nobody."""
    features = jax.random.normal(key, (20, 3))
    noise = jax.random.normal(jax.random.fold_in(key, 1), (20,))
    return {"features": features, "targets": slope * features.sum(1) + 0.1 * noise}


def main() -> None:
    """Six nodes of two kinds; over links that come and go, each direction by itself."""
    first, *keys = jax.random.split(jax.random.key(0), 7)
    clients = fb.Clients([node(key, slope) for key, slope in zip(keys, (1, -1) * 3, strict=True)])
    problem = fb.Problem(loss, loss, x0=0.0, y0=0.1 * jax.random.normal(first, (2, 3)))
    algorithm = fb.PDBO(
        links=fb.links.Stochastic(0.4, 0.8), lower_lr=0.1, lower_steps=50, terms=30, upper=fb.Adam(0.5)
    )
    result = fb.solve(problem, clients, algorithm, steps=20)
    for place, share in enumerate(jax.nn.sigmoid(result.x)):
        print(f"node {place} takes {share:.0%} of the first model, {1 - share:.0%} of the second")
    print(result.ledger)


if __name__ == "__main__":
    main()
