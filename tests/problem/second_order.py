"""Derivatives of gradients, exact and as differences of gradients, for the tests of models."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from fedbilevel.problem.accuracy import cross_entropy
from fedbilevel.tree import all_finite, dot, normal_like, row, scale, step, sub


def check_second_derivatives(model, inputs, tolerance=1e-6):
    """`H v` of a loss, forward over reverse, is the difference of gradients along v, and `H` is symmetric.

    In double precision. At the start of the parameters, moved a little so that no bias is zero.
    """
    start, shape = model.init(jr.key(0), inputs.shape[1:])
    parameters = step(start, -0.05, normal_like(jr.key(1), start))
    v, w = (normal_like(jr.key(seed), parameters) for seed in (2, 3))
    labels = jnp.arange(len(inputs)) % shape[0]
    slope = jax.grad(lambda p: jnp.mean(cross_entropy(model(p, inputs), labels)))

    @jax.jit
    def compared(p, small):
        # Loops, so that each derivative is compiled once.
        products = jax.lax.map(lambda along: jax.jvp(slope, (p,), (along,))[1], stacked(v, w))
        exact, other = row(products, 0), row(products, 1)
        slopes = jax.lax.map(slope, stacked(step(p, -small, v), step(p, small, v)))
        near = scale(1 / (2 * small), sub(row(slopes, 0), row(slopes, 1)))
        return exact, near, dot(exact, w), dot(other, v)

    exact, near, one_order, other_order = compared(parameters, 1e-6)
    largest = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(exact))
    assert largest > 1e-3, "or the test would show nothing"
    for own, other in zip(jax.tree.leaves(exact), jax.tree.leaves(near), strict=True):
        np.testing.assert_allclose(own, other, rtol=tolerance, atol=tolerance * largest)
    np.testing.assert_allclose(one_order, other_order, rtol=1e-9)


def stacked(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def check_clients_apart(model, inputs, clients=2):
    """Gradients of clients with parameters of their own: under `vmap` those of each by itself, and finite."""
    keys = jr.split(jr.key(4), clients)
    parameters = stacked(*(model.init(key, inputs.shape[2:])[0] for key in keys))

    def slope(p, own):
        return jax.grad(lambda p: jnp.mean(jnp.square(model(p, own))))(p)

    together = jax.jit(jax.vmap(slope))(parameters, inputs)
    apart = jax.jit(lambda *given: jax.lax.map(lambda own: slope(*own), given))(parameters, inputs)
    assert all_finite(together)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(together)), "every parameter counts"
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-10)
