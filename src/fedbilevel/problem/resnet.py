"""Residual networks for small images, of which clients can hold a part."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.name import check_choice
from fedbilevel.number import check_count
from fedbilevel.problem.convolution import image_shape
from fedbilevel.problem.model import Dense, Shape
from fedbilevel.problem.scaled import NORMS, ScaledConvolution
from fedbilevel.problem.submodel import Sliceable, held
from fedbilevel.tree import PyTree


class Block(eqx.Module):
    """`relu(second(relu(first(z))) + z)`; where the shape changes, z goes through a 1 × 1 convolution.

    Attributes:
        inside, outside: names of the kernels of the first convolution, and of those that are added.
        before: name of the channels that come in.
        first, second, short: the convolutions; `short` is None where z is added as it is.
    """

    inside: str = eqx.field(static=True)
    outside: str = eqx.field(static=True)
    before: str = eqx.field(static=True)
    first: ScaledConvolution
    second: ScaledConvolution
    short: ScaledConvolution | None

    def init(self, key: jax.Array, input_shape: Shape) -> tuple[PyTree, Shape]:
        k_first, k_second, k_short = jr.split(key, 3)
        first, shape = self.first.init(k_first, input_shape)
        second, shape = self.second.init(k_second, shape)
        short = {} if self.short is None else {"short": self.short.init(k_short, input_shape)[0]}
        return {"first": first, "second": second} | short, shape

    def __call__(self, parameters: PyTree, inputs: jax.Array) -> jax.Array:
        z = self.second(parameters["second"], jax.nn.relu(self.first(parameters["first"], inputs)))
        added = inputs if self.short is None else self.short(parameters["short"], inputs)
        return jax.nn.relu(z + added)

    def axes(self) -> PyTree:
        short = {} if self.short is None else {"short": self.short.axes(self.before, self.outside)}
        first, second = self.first.axes(self.before, self.inside), self.second.axes(self.inside, self.outside)
        return {"first": first, "second": second} | short

    def uses(self, input_shape: Shape) -> PyTree:
        between = (*self.first.pixels(input_shape), 1)
        short = {} if self.short is None else {"short": self.short.uses(input_shape)}
        return {"first": self.first.uses(input_shape), "second": self.second.uses(between)} | short


class ResNet(Sliceable):
    """A residual network in the form for 32 × 32 images; `ResNet18` has the usual sizes.

    A 3 × 3 convolution, then stages of blocks of two 3 × 3 convolutions, each with a normalisation; the first
    block of every stage but the first has stride 2 and a 1 × 1 convolution beside it; the mean over the
    pixels; a linear head. Outputs that are added have their kernels in common, so the kernels have one name
    for the stream of each stage (the first convolution's are those of the first), and one for the inside of
    each block.

    Parameters: `{"stem": ..., "blocks": ({"first", "second", "short"?}, ...), "head": {"weight", "bias"}}`.

    Args:
        outputs: how many logits come out.
        channels: kernels of every stage.
        blocks: how many blocks every stage has.
        width: the share of the kernels that this model has.
        norm: "group", "batch" or "none"; see `ScaledConvolution`, which says when "batch" is legal.
        scaled: whether a convolution is scaled up by the share of kernels that are not there.
        stride: of the first convolution; 2 halves the images, for a quarter of the arithmetic.

    References: K. He et al., Deep residual learning for image recognition, CVPR 2016; E. Diao, J. Ding,
    V. Tarokh, HeteroFL, ICLR 2021.

    Example:
        >>> small = ResNet(channels=(4, 8), blocks=(1, 1), width=0.5)
        >>> shapes = jax.eval_shape(lambda key: small.init(key, (8, 8, 3))[0], jr.key(0))
        >>> shapes["blocks"][1]["short"]["weight"].shape
        (1, 1, 2, 4)
    """

    outputs: int = eqx.field(static=True, default=10)
    channels: tuple[int, ...] = eqx.field(static=True, converter=tuple, default=(64, 128, 256, 512))
    blocks: tuple[int, ...] = eqx.field(static=True, converter=tuple, default=(2, 2, 2, 2))
    width: float = eqx.field(static=True, default=1.0)
    norm: str = eqx.field(static=True, default="group")
    scaled: bool = eqx.field(static=True, default=True)
    stride: int = eqx.field(static=True, default=1)

    def __check_init__(self) -> None:
        check_choice("norm", self.norm, NORMS)
        if self.stride not in (1, 2):
            raise ValueError(f"stride is {self.stride!r}; it must be 1 or 2")
        for count in (self.outputs, *self.channels, *self.blocks):
            check_count("a number of outputs, channels or blocks", count)
        if not self.channels or len(self.channels) != len(self.blocks):
            raise ValueError(
                f"there are {len(self.channels)} numbers of channels and {len(self.blocks)} of blocks; "
                "give one of each for every stage"
            )
        held(1, self.width)

    def _convolution(self, filters: int, **options: Any) -> ScaledConvolution:
        return ScaledConvolution(filters, self.width, norm=self.norm, scaled=self.scaled, **options)

    def _stem(self) -> ScaledConvolution:
        return self._convolution(self.channels[0], stride=self.stride)

    def _blocks(self) -> list[Block]:
        stages = zip(self.channels, self.blocks, strict=True)
        return [
            self._block(stage, place, filters)
            for stage, (filters, count) in enumerate(stages)
            for place in range(count)
        ]

    def _block(self, stage: int, place: int, filters: int) -> Block:
        changes = stage > 0 and place == 0
        stride = 2 if changes else 1
        return Block(
            f"inside{stage}-{place}",
            f"stage{stage}",
            f"stage{stage - 1 if changes else stage}",
            self._convolution(filters, stride=stride),
            self._convolution(filters),
            self._convolution(filters, kernel=1, stride=stride) if changes else None,
        )

    def init(self, key: jax.Array, input_shape: Shape) -> tuple[PyTree, Shape]:
        blocks = self._blocks()
        keys = jr.split(key, len(blocks) + 2)
        stem, shape = self._stem().init(keys[0], image_shape(input_shape, "ResNet"))
        parameters = []
        for block, own_key in zip(blocks, keys[1:-1], strict=True):
            own, shape = block.init(own_key, shape)
            parameters.append(own)
        head, outputs = Dense(self.outputs).init(keys[-1], shape[-1:])
        return {"stem": stem, "blocks": tuple(parameters), "head": head}, outputs

    def __call__(self, parameters: PyTree, inputs: jax.Array) -> jax.Array:
        z = jax.nn.relu(self._stem()(parameters["stem"], inputs))
        for block, own in zip(self._blocks(), parameters["blocks"], strict=True):
            z = block(own, z)
        return Dense(self.outputs)(parameters["head"], jnp.mean(z, axis=(1, 2)))

    def axes(self) -> PyTree:
        return {
            "stem": self._stem().axes(".", "stage0"),
            "blocks": tuple(block.axes() for block in self._blocks()),
            "head": {"weight": f"stage{len(self.channels) - 1} .", "bias": "."},
        }

    def uses(self, input_shape: Shape) -> PyTree:
        stem, blocks = self._stem(), []
        shape: Shape = (*stem.pixels(image_shape(input_shape, "ResNet")), 1)
        for block in self._blocks():
            blocks.append(block.uses(shape))
            shape = (*block.first.pixels(shape), 1)
        return {"stem": stem.uses(input_shape), "blocks": tuple(blocks), "head": {"weight": 1, "bias": 0}}


def ResNet18(outputs: int = 10, width: float = 1.0, norm: str = "group", scaled: bool = True) -> ResNet:
    """ResNet-18 in the form for 32 × 32 images: 11,173,962 parameters with 10 outputs; see `ResNet`.

    Args:
        outputs, width, norm, scaled: as for `ResNet`.
    """
    return ResNet(outputs, width=width, norm=norm, scaled=scaled)
