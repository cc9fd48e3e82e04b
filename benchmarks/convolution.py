"""How much faster convolutions with every client's own weights are as matrix products, on this machine.

Times of the gradients of a `ConvNet` and of the `TwoLayerCNN` (forward and backward), every client with
weights and images of its own: XLA's convolution under `vmap` and with one client after another, and ours.

    python benchmarks/convolution.py [clients] [samples]
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from timing import Loss, compare, figure, gain, one_by_one, together

from fedbilevel.problem.convolution import ConvNet, TwoLayerCNN
from fedbilevel.problem.image import group_norm, pool
from fedbilevel.problem.model import Model

CONV_NET = ConvNet((16,) * 4)
TWO_LAYERS = TwoLayerCNN()


def of_xla(images: jax.Array, weight: jax.Array, pad: str) -> jax.Array:
    """The convolution of XLA."""
    names = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, weight, (1, 1), pad, dimension_numbers=names)


def conv_net(parameters: Any, images: jax.Array) -> jax.Array:
    """A `ConvNet` but for its convolution."""
    for own in parameters:
        z = group_norm(of_xla(images, own["weight"], "SAME") + own["bias"], CONV_NET.groups)
        images = jax.nn.relu(pool(z * own["scale"] + own["shift"]))
    return images


def two_layers(parameters: Any, images: jax.Array) -> jax.Array:
    """A `TwoLayerCNN` but for its convolution."""
    *convolutions, hidden, head = parameters
    for own in convolutions:
        images = jax.nn.relu(pool(of_xla(images, own["weight"], "VALID")) + own["bias"])
    first, last = TWO_LAYERS.models[2:]
    return last(head, first(hidden, images))


def squares(network: Any) -> Loss:
    """The sum of the squared outputs of a network."""
    return lambda parameters, images: jnp.sum(network(parameters, images) ** 2)


def main(clients: int = 20, samples: int = 32) -> None:
    """Print the times and ratios."""
    networks: dict[str, tuple[Model, Any]] = {
        "ConvNet": (CONV_NET, conv_net),
        "TwoLayerCNN": (TWO_LAYERS, two_layers),
    }
    for name, (model, with_xla) in networks.items():
        init = functools.partial(_init, model)
        arguments = jax.vmap(init)(jr.split(jr.key(0), clients)), _images(clients, samples)
        ways = {
            f"{whose}, {how.__name__}": how(squares(network))
            for whose, network in (("XLA's convolution", with_xla), ("ours", model))
            for how in (together, one_by_one)
        }
        best = compare(ways, arguments, network=name, clients=clients, samples=samples)
        figure(f"gradients of a {name}, times as fast as with XLA's convolution", gain(best))


def _init(model: Model, key: jax.Array) -> Any:
    return model.init(key, (28, 28, 1))[0]


def _images(clients: int, samples: int) -> jax.Array:
    return jr.uniform(jr.key(1), (clients, samples, 28, 28, 1))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
