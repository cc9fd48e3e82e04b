"""A small convolutional network, made of matrix products.

In a federation every client has weights of its own as soon as it has made one step, and a convolution with
another kernel for every client is slow on a CPU: under `vmap` it becomes a grouped convolution.
Here a convolution is nine shifted copies of the image side by side, times one matrix (*im2col*): under
`vmap` that is a product of stacked matrices. `benchmarks/convolution.py` measures what it gains.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from fedbilevel.problem.base import ProblemError
from fedbilevel.problem.model import Model, Shape
from fedbilevel.tree import PyTree

_SMALL = 1e-5
"""Added to a variance: an image without any contrast has none."""


class ConvNet(Model):
    """Layers of `relu(pool(norm(inputs * W + b)))`, then flattened: a backbone for images.

    A layer is a 3 × 3 convolution with zeros around the image, a group normalisation with a scale and a shift
    for every channel, the largest of every 2 × 2 pixels (an odd last row or column is left out), and a relu:
    28 → 14 → 7 → 3 → 1. Parameters: a tuple with `{"weight": (3, 3, in, out), "bias", "scale", "shift"}` for
    every layer.

    Group normalisation looks at one sample at a time. Statistics of a batch would make the loss no mean over
    samples, would differ between the batches of an oracle call and of a test, and would tell one sample
    of another.

    Weights are normal with variance `2/(9 in)` (He), biases and shifts start at zero, scales at one.

    Args:
        filters: channels out of every layer.
        groups: into how many groups of channels a layer's output is divided; mean and variance are taken over
            the pixels and channels of a group. It must divide all of `filters`.

    References: K. He et al., ICCV 2015; Y. Wu, K. He, Group normalization, ECCV 2018; O. Vinyals et al.,
    Matching networks for one shot learning, NeurIPS 2016 (four such layers for Omniglot, with batch
    statistics).

    Example:
        >>> backbone = ConvNet()
        >>> parameters, shape = backbone.init(jr.key(0), (28, 28, 1))
        >>> shape, backbone(parameters, jnp.ones((5, 28, 28, 1))).shape
        ((32,), (5, 32))
    """

    filters: tuple[int, ...] = eqx.field(static=True, converter=tuple, default=(32, 32, 32, 32))
    groups: int = eqx.field(static=True, default=4)

    def __check_init__(self) -> None:
        if not self.filters:
            raise ValueError("filters is empty; give the channels of every layer, for example (32, 32)")
        for count in (*self.filters, self.groups):
            _check_count(count)
        odd = [count for count in self.filters if count % self.groups]
        if odd:
            raise ValueError(
                f"groups is {self.groups}, which does not divide {odd} of the filters {self.filters}; the "
                "groups of a layer must be of one size"
            )

    def init(self, key: jax.Array, input_shape: Shape) -> tuple[PyTree, Shape]:
        height, width, channels = _image(input_shape)
        parameters: list[PyTree] = []
        for own_key, filters in zip(jr.split(key, len(self.filters)), self.filters, strict=True):
            if min(height, width) < 2:
                raise ProblemError(
                    f"images of shape {input_shape} are too small for {len(self.filters)} layers: every "
                    f"layer halves them, and layer {len(parameters) + 1} would get {height} × {width} pixels"
                )
            parameters.append(_first_layer(own_key, channels, filters))
            height, width, channels = height // 2, width // 2, filters
        return tuple(parameters), (height * width * channels,)

    def __call__(self, parameters: PyTree, inputs: jax.Array) -> jax.Array:
        for own in parameters:
            z = convolve(inputs, own["weight"]) + own["bias"]
            z = group_norm(z, self.groups) * own["scale"] + own["shift"]
            # The largest of the relus is the relu of the largest, a quarter of the work.
            inputs = jax.nn.relu(pool(z))
        return inputs.reshape(inputs.shape[0], -1)


def convolve(
    images: Float[Array, "samples height width channels"], weight: Float[Array, "3 3 channels filters"]
) -> Float[Array, "samples height width filters"]:
    """Cross-correlation with 3 × 3 kernels, zeros around the image: what networks call a convolution.

    Example:
        >>> image = jnp.arange(4.0).reshape(1, 2, 2, 1)
        >>> middle = jnp.zeros((3, 3, 1, 1)).at[1, 1].set(2.0)
        >>> convolve(image, middle).ravel().tolist()
        [0.0, 2.0, 4.0, 6.0]
    """
    height, width = images.shape[1:3]
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifted = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    # The order of the shifts is that of the kernel's first two axes.
    return jnp.concatenate(shifted, axis=-1) @ weight.reshape(-1, weight.shape[-1])


def group_norm(
    images: Float[Array, "samples height width channels"], groups: int
) -> Float[Array, "samples height width channels"]:
    """Every sample's groups of channels shifted and scaled to mean zero and variance (almost) one."""
    count, height, width, channels = images.shape
    grouped = images.reshape(count, height * width, groups, channels // groups)
    centred = grouped - jnp.mean(grouped, axis=(1, 3), keepdims=True)
    variance = jnp.mean(centred**2, axis=(1, 3), keepdims=True)
    return (centred * jax.lax.rsqrt(variance + _SMALL)).reshape(images.shape)


def pool(
    images: Float[Array, "samples height width channels"],
) -> Float[Array, "samples half_height half_width channels"]:
    """The largest of every 2 × 2 pixels; an odd last row or column is left out.

    A maximum over axes of a reshaped array: on a CPU its gradient is faster than that of strided slices, and
    it can be differentiated again. Equal pixels share the gradient.

    Example:
        >>> pool(jnp.arange(20.0).reshape(1, 4, 5, 1)).ravel().tolist()
        [6.0, 8.0, 16.0, 18.0]
    """
    count, height, width, channels = images.shape
    whole = images[:, : height // 2 * 2, : width // 2 * 2]
    return jnp.max(whole.reshape(count, height // 2, 2, width // 2, 2, channels), axis=(2, 4))


def _first_layer(key: jax.Array, channels: int, filters: int) -> dict[str, jax.Array]:
    """The parameters that a layer starts with."""
    weight = (2 / (9 * channels)) ** 0.5 * jr.normal(key, (3, 3, channels, filters))
    zeros = jnp.zeros(filters)
    return {"weight": weight, "bias": zeros, "scale": jnp.ones(filters), "shift": zeros}


def _image(shape: Shape) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise ProblemError(
            f"a sample has the shape {shape}; a ConvNet needs images of shape (height, width, channels)"
        )
    return shape[0], shape[1], shape[2]


def _check_count(count: Any) -> None:
    if type(count) is not int or count < 1:
        raise ValueError(
            f"a number of channels or groups is {count!r}; it must be a whole number of at least 1"
        )
