"""Tune a penalty over clients' data that may not be moved: the program of the README."""

import jax
import jax.numpy as jnp

import fedbilevel as fb


def upper(x, y, samples):  # what we care about: the error on validation data
    return jnp.mean((samples["features"] @ y - samples["targets"]) ** 2)


def lower(x, y, samples):  # what trains the model y: the penalty's weight is exp(x)
    return upper(x, y, samples) + jnp.exp(x) * jnp.sum(y**2)


def client(key, size):  # a client's own samples; twenty features, of which three matter
    features = jax.random.normal(key, (size, 20))
    noise = jax.random.normal(jax.random.fold_in(key, 1), (size,))
    return {"features": features, "targets": features[:, :3].sum(1) + noise}


if __name__ == "__main__":
    keys = jax.random.split(jax.random.key(0), 8)
    clients = fb.Clients(lower=[client(k, 8) for k in keys[:4]], upper=[client(k, 30) for k in keys[4:]])
    problem = fb.Problem(upper=upper, lower=lower, x0=-3.0, y0=jnp.zeros(20))
    algorithm = fb.FedNest(upper_lr=0.3, lower_lr=0.05, lower_steps=10, terms=10, series="cg")

    result = fb.solve(problem, clients, algorithm, steps=100)
    print(f"penalty {jnp.exp(result.x):.3f}, after")
    print(result.ledger)
