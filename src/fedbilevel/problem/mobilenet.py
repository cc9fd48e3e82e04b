"""MobileNetV2 for small and large images, with group normalisation.

Batch normalisation is left out on purpose: statistics of a batch make the loss no mean over samples, and
those of different clients do not average. What remains of a normalisation is a scale and a shift for every
channel, and none of the convolutions has a bias: the shift is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp

from fedbilevel.name import check_choice
from fedbilevel.number import check_count
from fedbilevel.problem.convolution import image_shape, with_head
from fedbilevel.problem.image import convolve, convolve_depthwise, first_kernel, group_norm
from fedbilevel.problem.model import Chain, Model, Shape
from fedbilevel.tree import PyTree

Stages: TypeAlias = Sequence[Sequence[int]]
"""Rows `(expansion, channels, blocks, stride)`; the stride is that of the first block, the others have 1."""

PAPER_STAGES: Stages = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)

# Small images stay as they are up to the third stage.
SMALL_STAGES: Stages = (PAPER_STAGES[0], (6, 24, 2, 1), *PAPER_STAGES[2:])


class Normalised(Model):
    """`a(norm(inputs * W) · scale + shift)`: a convolution with zeros around the image, no bias.

    Parameters: `{"weight": (kernel, kernel, in, out), "scale", "shift"}`; of a depthwise convolution, which
    has a kernel for every channel, `(kernel, kernel, in)`. Weights are normal with the variance of He, the
    scale starts at one, the shift at zero.

    Args:
        filters: channels that come out; None: those that come in, each by itself (depthwise).
        groups: of the group normalisation; it must divide the channels.
        kernel: side of the kernels, odd.
        stride: 1, or 2 to halve height and width.
        bounded: a is relu6, `min(max(z, 0), 6)`; else nothing (a linear bottleneck).
    """

    filters: int | None = eqx.field(static=True)
    groups: int = eqx.field(static=True)
    kernel: int = eqx.field(static=True, default=1)
    stride: int = eqx.field(static=True, default=1)
    bounded: bool = eqx.field(static=True, default=True)

    def init(self, key: jax.Array, input_shape: Shape) -> tuple[PyTree, Shape]:
        height, width, channels = image_shape(input_shape, "MobileNetV2")
        filters = self.filters or channels
        shape = (self.kernel, self.kernel, channels, *((filters,) if self.filters else ()))
        summed = self.kernel**2 * (channels if self.filters else 1)
        weight = first_kernel(key, shape, summed)
        parameters = {"weight": weight, "scale": jnp.ones(filters), "shift": jnp.zeros(filters)}
        return parameters, (-(-height // self.stride), -(-width // self.stride), filters)

    def __call__(self, parameters: PyTree, inputs: jax.Array) -> jax.Array:
        convolution = convolve if self.filters else convolve_depthwise
        z = convolution(inputs, parameters["weight"], self.stride)
        z = group_norm(z, self.groups) * parameters["scale"] + parameters["shift"]
        return jax.nn.relu6(z) if self.bounded else z


class InvertedResidual(Model):
    """`inputs + project(depthwise(expand(inputs)))`, the sum only where both have one shape.

    A 1 × 1 convolution widens the channels by a factor, a 3 × 3 depthwise convolution filters them, and a
    1 × 1 convolution without activation narrows them again. An expansion of 1 has no first convolution.

    Args:
        channels: that come out.
        expansion: the factor.
        stride: of the depthwise convolution; with 2 there is no sum.
        groups: of the normalisations.
    """

    channels: int = eqx.field(static=True)
    expansion: int = eqx.field(static=True)
    stride: int = eqx.field(static=True)
    groups: int = eqx.field(static=True)

    def init(self, key: jax.Array, input_shape: Shape) -> tuple[PyTree, Shape]:
        channels = image_shape(input_shape, "MobileNetV2")[-1]
        return self._branch(channels).init(key, input_shape)

    def __call__(self, parameters: PyTree, inputs: jax.Array) -> jax.Array:
        outputs = self._branch(inputs.shape[-1])(parameters, inputs)
        alike = self.stride == 1 and inputs.shape[-1] == self.channels
        return inputs + outputs if alike else outputs

    def _branch(self, channels: int) -> Chain:
        expand = Normalised(self.expansion * channels, self.groups)
        each = Normalised(None, self.groups, kernel=3, stride=self.stride)
        project = Normalised(self.channels, self.groups, bounded=False)
        return Chain((each, project) if self.expansion == 1 else (expand, each, project))


class MeanOverPixels(Model):
    """The mean of every channel over all pixels; no parameters."""

    def init(self, key: jax.Array, input_shape: Shape) -> tuple[PyTree, Shape]:
        return (), (image_shape(input_shape, "MobileNetV2")[-1],)

    def __call__(self, parameters: PyTree, inputs: jax.Array) -> jax.Array:
        return jnp.mean(inputs, axis=(1, 2))


def MobileNetV2(
    outputs: int = 10,
    width: float = 1.0,
    stages: Stages | None = None,
    features: int = 1280,
    groups: int = 4,
    strides: str = "small",
) -> Chain:
    """MobileNetV2: inverted residuals and linear bottlenecks.

    A 3 × 3 convolution to 32 channels, the stages, a 1 × 1 convolution to 1280 channels, the mean over the
    pixels, and a linear head. Group in the place of batch normalisation, and no dropout. 2,223,872
    parameters, and those of the head, whatever the strides.

    Args:
        outputs: how many logits come out; with 0 there is no head: a backbone with `features` features.
        width: factor for the channels of the first convolution and of all stages, which are then rounded to
            multiples of 8.
        stages: rows `(expansion, channels, blocks, stride)`; None: the paper's, with `strides`.
        features: channels of the last convolution; not multiplied by `width`.
        groups: of every normalisation; 1, 2, 4 or 8, so that they divide all channels.
        strides: "paper": for 224 × 224 pixels, halved five times (as TorchVision has it); 32 × 32 ones
            become a single pixel, for 6 million multiplications. "small", usual for 32 × 32: the first
            convolution and the second stage do not halve, 32 → 16 → 8 → 4 pixels, 88 million
            multiplications. Of `stages` of one's own it decides the first convolution only.

    References: M. Sandler et al., MobileNetV2: inverted residuals and linear bottlenecks, CVPR 2018; Y. Wu,
    K. He, Group normalization, ECCV 2018.

    Example:
        >>> small = MobileNetV2(width=0.25, stages=((1, 16, 1, 1), (6, 24, 2, 2)), features=64)
        >>> parameters, shape = small.init(jax.random.key(0), (32, 32, 3))
        >>> jax.eval_shape(small, parameters, jnp.ones((2, 32, 32, 3))).shape, shape
        ((2, 10), (10,))
    """
    first, known = _known_strides(strides)
    stages = known if stages is None else stages
    _check(width, stages, features, groups)
    body: list[Model] = [Normalised(_channels(32, width), groups, kernel=3, stride=first)]
    for expansion, channels, blocks, stride in stages:
        for number in range(blocks):
            own_stride = stride if number == 0 else 1
            body.append(InvertedResidual(_channels(channels, width), expansion, own_stride, groups))
    return with_head([*body, Normalised(features, groups), MeanOverPixels()], outputs)


def _known_strides(strides: str) -> tuple[int, Stages]:
    """The stride of the first convolution, and the stages."""
    check_choice("strides", strides, ("small", "paper"))
    return (1, SMALL_STAGES) if strides == "small" else (2, PAPER_STAGES)


def _channels(count: int, width: float) -> int:
    """The multiple of 8 nearest to `width · count`, the next one if that is less than 90 % of it."""
    exact = width * count
    nearest = max(8, int(exact + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * exact else nearest + 8


def _check(width: Any, stages: Stages, features: int, groups: int) -> None:
    if not width > 0:
        raise ValueError(f"width is {width!r}; it must be a factor above 0")
    check_count("features", features)
    if groups not in (1, 2, 4, 8) or features % groups:
        raise ValueError(
            f"groups is {groups!r} and features is {features}; groups must divide the features and all "
            "channels, which are multiples of 8: it must be 1, 2, 4 or 8"
        )
    for stage in stages:
        _check_stage(stage)


def _check_stage(stage: Sequence[int]) -> None:
    if len(stage) != 4:
        raise ValueError(f"a stage is {stage!r}; it must be (expansion, channels, blocks, stride)")
    for count in stage:
        check_count(f"a number of the stage {tuple(stage)}", count)
    if stage[3] > 2:
        raise ValueError(f"the stride of the stage {tuple(stage)} is {stage[3]}; it must be 1 or 2")
