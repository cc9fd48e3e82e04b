"""Convolutional networks for small images, made of matrix products (see `problem/image.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.number import check_count
from fedbilevel.problem.base import ProblemError
from fedbilevel.problem.image import convolve, first_kernel, group_norm, pool
from fedbilevel.problem.model import Chain, Dense, Model, Shape
from fedbilevel.tree import PyTree


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
        >>> parameters = jax.eval_shape(lambda key: backbone.init(key, (28, 28, 1))[0], jr.key(0))
        >>> jax.eval_shape(backbone, parameters, jnp.ones((5, 28, 28, 1))).shape
        (5, 32)
    """

    filters: tuple[int, ...] = eqx.field(static=True, converter=tuple, default=(32, 32, 32, 32))
    groups: int = eqx.field(static=True, default=4)

    def __check_init__(self) -> None:
        if not self.filters:
            raise ValueError("filters is empty; give the channels of every layer, for example (32, 32)")
        for count in (*self.filters, self.groups):
            check_count("a number of channels or groups", count)
        odd = [count for count in self.filters if count % self.groups]
        if odd:
            raise ValueError(
                f"groups is {self.groups}, which does not divide {odd} of the filters {self.filters}; the "
                "groups of a layer must be of one size"
            )

    def init(self, key: jax.Array, input_shape: Shape) -> tuple[PyTree, Shape]:
        height, width, channels = image_shape(input_shape, "ConvNet")
        parameters: list[PyTree] = []
        for own_key, filters in zip(jr.split(key, len(self.filters)), self.filters, strict=True):
            if min(height, width) < 2:
                raise ProblemError(
                    f"images of shape {input_shape} are too small for {len(self.filters)} layers: every "
                    f"layer halves them, and layer {len(parameters) + 1} would get {height} × {width} pixels"
                )
            own = _first_layer(own_key, 3, channels, filters)
            parameters.append(own | {"scale": jnp.ones(filters), "shift": jnp.zeros(filters)})
            height, width, channels = height // 2, width // 2, filters
        return tuple(parameters), (height * width * channels,)

    def __call__(self, parameters: PyTree, inputs: jax.Array) -> jax.Array:
        for own in parameters:
            z = convolve(inputs, own["weight"]) + own["bias"]
            z = group_norm(z, self.groups) * own["scale"] + own["shift"]
            # The largest of the relus is the relu of the largest, a quarter of the work.
            inputs = jax.nn.relu(pool(z))
        return inputs.reshape(inputs.shape[0], -1)


class PooledConvolution(Model):
    """`relu(pool(inputs * W + b))` without zeros around the image: n → (n − kernel + 1)/2, rounded down.

    Parameters: `{"weight": (kernel, kernel, in, filters), "bias"}`. Weights are normal with variance
    `2/(kernel² in)` (He), the bias starts at zero.

    Args:
        filters: channels that come out.
        kernel: side of the kernels, odd.
    """

    filters: int = eqx.field(static=True)
    kernel: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        check_count("a number of filters", self.filters)
        check_count("the size of a kernel", self.kernel)
        if self.kernel % 2 == 0:
            raise ValueError(f"the size of a kernel is {self.kernel}; it must be odd, such as 3 or 5")

    def init(self, key: jax.Array, input_shape: Shape) -> tuple[PyTree, Shape]:
        height, width, channels = image_shape(input_shape, "PooledConvolution")
        if min(height, width) < self.kernel + 1:
            raise ProblemError(
                f"a layer gets images of shape {input_shape}, too small for a kernel of size {self.kernel} "
                f"and pooling after it: it needs {self.kernel + 1} × {self.kernel + 1} pixels at least; take "
                "smaller kernels, or larger images"
            )
        shape = *((side - self.kernel + 1) // 2 for side in (height, width)), self.filters
        return _first_layer(key, self.kernel, channels, self.filters), shape

    def __call__(self, parameters: PyTree, inputs: jax.Array) -> jax.Array:
        # The largest first, as in `ConvNet`; a bias for every channel can come after it, too.
        return jax.nn.relu(pool(convolve(inputs, parameters["weight"], pad=False)) + parameters["bias"])


def TwoLayerCNN(
    outputs: int = 62, filters: Sequence[int] = (32, 64), hidden: int = 2048, kernel: int = 5
) -> Chain:
    """A classifier for images: two convolutions, each with pooling, and two dense layers.

    With the usual sizes 28 → 24 → 12 → 8 → 4 pixels, and 64 · 4 · 4 = 1024 → 2048 → 62. Parameters: a tuple
    with `{"weight", "bias"}` for each of the four layers.

    Args:
        outputs: how many logits come out; 62 are the digits and letters of EMNIST. With 0 the last layer is
            left out: a backbone, whose features are those of the hidden layer.
        filters: channels out of the two convolutions.
        hidden: width of the dense layer between.
        kernel: side of the kernels, odd.

    Reference: O. Marfoq et al., Federated multi-task learning under a mixture of distributions, NeurIPS
    2021 (their network for handwritten characters).

    Example:
        >>> parameters = jax.eval_shape(lambda key: TwoLayerCNN().init(key, (28, 28, 1))[0], jr.key(0))
        >>> sum(leaf.size for leaf in jax.tree.leaves(parameters))
        2278334
    """
    if len(filters) != 2:
        raise ValueError(
            f"filters is {tuple(filters)}; there are two convolutions: give the channels of each"
        )
    body = *(PooledConvolution(count, kernel) for count in filters), Dense(hidden, "relu")
    return with_head(body, outputs)


def with_head(body: Sequence[Model], outputs: int) -> Chain:
    """Models one after another and a linear head on top; 0 outputs: none, the last features come out."""
    # A truth value is no number of outputs: it goes on to `Dense`, which refuses it.
    no_head = type(outputs) is int and outputs == 0
    return Chain(tuple(body) if no_head else (*body, Dense(outputs)))


def image_shape(shape: Shape, model: str) -> tuple[int, int, int]:
    """Height, width and channels of a sample; an error that names the model if it is no image."""
    if len(shape) != 3:
        raise ProblemError(
            f"a sample has the shape {shape}; a {model} needs images of shape (height, width, channels)"
        )
    return shape[0], shape[1], shape[2]


def _first_layer(key: jax.Array, kernel: int, channels: int, filters: int) -> dict[str, jax.Array]:
    """The weights and biases that a convolution starts with."""
    weight = first_kernel(key, (kernel, kernel, channels, filters), kernel**2 * channels)
    return {"weight": weight, "bias": jnp.zeros(filters)}
