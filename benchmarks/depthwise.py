"""How much faster depthwise convolutions with every client's own weights are as sums of shifted images.

Times of the gradients of one depthwise convolution between two normalisations, as it stands in a block of
`MobileNetV2`: XLA's convolution with a group for every channel, under `vmap` and with one client after
another, and ours.

    python benchmarks/depthwise.py [clients] [samples] [side] [channels]
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from timing import compare, figure, gain, one_by_one, together

from fedbilevel.problem.image import convolve_depthwise, first_kernel, group_norm


def of_xla(images: jax.Array, weight: jax.Array, stride: int) -> jax.Array:
    """The convolution of XLA with as many groups as channels."""
    return jax.lax.conv_general_dilated(
        images,
        weight[:, :, None],
        (stride, stride),
        ((1, 1), (1, 1)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=weight.shape[-1],
    )


def loss(convolution: Any, stride: int, parameters: Any, images: jax.Array) -> jax.Array:
    """The sum of the cubes of what comes out: squares of normalised numbers would hardly have a slope."""
    z = jax.nn.relu6(group_norm(images, 4) * parameters["scale"])
    return jnp.sum(group_norm(convolution(z, parameters["weight"], stride), 4) ** 3)


def main(clients: int = 10, samples: int = 16, side: int = 16, channels: int = 96) -> None:
    """Print the times and ratios."""
    weight = first_kernel(jr.key(0), (clients, 3, 3, channels), 9)
    parameters = {"weight": weight, "scale": jnp.ones((clients, channels))}
    arguments = parameters, jr.normal(jr.key(1), (clients, samples, side, side, channels))
    for stride in (1, 2):
        ways = {
            f"{whose}, {how.__name__}": how(functools.partial(loss, convolution, stride))
            for whose, convolution in (("XLA's convolution", of_xla), ("ours", convolve_depthwise))
            for how in (together, one_by_one)
        }
        sizes = {"clients": clients, "samples": samples, "side": side, "channels": channels}
        best = compare(ways, arguments, stride=stride, **sizes)
        what = f"gradients of a depthwise convolution, stride {stride}, times as fast as with XLA's"
        figure(what, gain(best))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
