"""How much faster convolutions with every client's own weights are as matrix products, on this machine.

Times of the gradient of a four-layer `ConvNet` (forward and backward), every client with weights and images
of its own: XLA's convolution under `vmap`, ours under `vmap`, and ours with one client after another, as in
`Simulator(chunk=1)`. All in one run, in turn, the best of several: only the ratios mean something.

    python benchmarks/convolution.py [clients] [samples] [filters]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.problem.convolution import ConvNet, convolve, group_norm, pool

Convolution = Callable[[jax.Array, jax.Array], jax.Array]
REPEATS = 5


def of_xla(images: jax.Array, weight: jax.Array) -> jax.Array:
    """The convolution of XLA."""
    names = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, weight, (1, 1), "SAME", dimension_numbers=names)


def loss(convolution: Convolution, parameters: Any, images: jax.Array) -> jax.Array:
    """The sum of the squared features of a network that is a `ConvNet` but for its convolution."""
    for own in parameters:
        z = group_norm(convolution(images, own["weight"]) + own["bias"], 4)
        images = jax.nn.relu(pool(z * own["scale"] + own["shift"]))
    return jnp.sum(images**2)


def gradients(convolution: Convolution, one_by_one: bool) -> Callable[[Any, jax.Array], Any]:
    """The compiled gradients of all clients, each in its own parameters."""

    def of_one(parameters: Any, images: jax.Array) -> Any:
        return jax.grad(lambda p: loss(convolution, p, images))(parameters)

    def of_all(parameters: Any, images: jax.Array) -> Any:
        return jax.lax.map(lambda own: of_one(*own), (parameters, images))

    return jax.jit(of_all if one_by_one else jax.vmap(of_one))


def seconds(compute: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """How long one call takes."""
    begin = time.perf_counter()
    jax.block_until_ready(compute(*arguments))
    return time.perf_counter() - begin


def main(clients: int = 10, samples: int = 25, filters: int = 16) -> None:
    """Print the ratios."""
    model = ConvNet((filters,) * 4)
    parameters = jax.vmap(lambda key: model.init(key, (28, 28, 1))[0])(jr.split(jr.key(0), clients))
    arguments = parameters, jr.uniform(jr.key(1), (clients, samples, 28, 28, 1))
    ways = {
        "XLA's convolution, vmap": gradients(of_xla, one_by_one=False),
        "ours, vmap": gradients(convolve, one_by_one=False),
        "ours, one by one (chunk=1)": gradients(convolve, one_by_one=True),
    }
    for compute in ways.values():
        seconds(compute, arguments)  # compiles
    turns = [{name: seconds(compute, arguments) for name, compute in ways.items()} for _ in range(REPEATS)]
    best = {name: min(turn[name] for turn in turns) for name in ways}
    base = next(iter(best.values()))
    print(f"{clients} clients, {samples} images of 28 × 28, 4 layers of {filters} filters, float32")
    for name, value in best.items():
        print(f"{name:30}{1e3 * value:9.1f} ms   {base / value:5.1f} times as fast")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
