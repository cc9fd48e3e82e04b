"""A convolution that may hold only some of its kernels: its outputs do not depend on the others."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedbilevel.name import check_choice
from fedbilevel.problem.convolution import image_shape
from fedbilevel.problem.image import convolve, first_kernel
from fedbilevel.problem.model import Model, Shape
from fedbilevel.problem.submodel import held
from fedbilevel.tree import PyTree

NORMS = ("group", "batch", "none")
_SMALL = 1e-5


class ScaledConvolution(Model):
    """`norm(inputs * W / s) · scale + shift`, s the share of the kernels that are there (HeteroFL's scaler).

    A kernel whose weights are all zero is not there: it adds nothing to the statistics, and the others are
    scaled up by 1/s, so that what comes out is as large as from all kernels. With a normalisation after it,
    the scaler changes nothing but the tiny constant beside the variance.

    Parameters: `{"weight": (kernel, kernel, in, out), "scale", "shift"}`, without a normalisation
    `{"weight", "bias"}`. Weights are normal with variance `2/(kernel² in)` (He), scales start at one, shifts
    and biases at zero.

    Args:
        filters: kernels of the whole model.
        width: the share of them that this model has, rounded up.
        kernel: side of the kernels: odd, with zeros around the image; or 2, without (n → n − 1).
        stride: 1, or 2 to halve height and width, rounded up.
        norm: "group": mean and variance over all pixels and all kernels that are there, of one sample (one
            group: others would depend on which kernels a client holds). "batch": of every kernel's output,
            over the pixels of all samples of the batch, in training and in test ("static": no running
            statistics). Then the loss is no mean over samples: that is legal only where all batches are
            full and of one size (clients of one size that the batch size divides, or batches smaller than
            every client), is a biased estimate on a part of the data, and its second derivatives are those
            of the batch. "none": nothing, and a bias.
        scaled: whether there is a scaler.

    References: E. Diao, J. Ding, V. Tarokh, HeteroFL, ICLR 2021 (scaler, static batch normalisation); Y. Wu,
    K. He, Group normalization, ECCV 2018.
    """

    filters: int = eqx.field(static=True)
    width: float = eqx.field(static=True, default=1.0)
    kernel: int = eqx.field(static=True, default=3)
    stride: int = eqx.field(static=True, default=1)
    norm: str = eqx.field(static=True, default="group")
    scaled: bool = eqx.field(static=True, default=True)

    def __check_init__(self) -> None:
        check_choice("norm", self.norm, NORMS)

    def init(self, key: jax.Array, input_shape: Shape) -> tuple[PyTree, Shape]:
        channels, filters = image_shape(input_shape, "convolution")[-1], held(self.filters, self.width)
        weight = first_kernel(key, (self.kernel, self.kernel, channels, filters), self.kernel**2 * channels)
        rest = {"bias": jnp.zeros(filters)}
        if self.norm != "none":
            rest = {"scale": jnp.ones(filters), "shift": jnp.zeros(filters)}
        return {"weight": weight} | rest, (*self.pixels(input_shape), filters)

    def pixels(self, input_shape: Shape) -> tuple[int, int]:
        """Height and width of what comes out."""
        lost = 1 if self.kernel == 2 else 0
        height, width = (-(-(n - lost) // self.stride) for n in input_shape[:2])
        return height, width

    def axes(self, inputs: str, outputs: str) -> dict[str, str]:
        """The names of the parameters' axes, if these are those of the channels."""
        rest = ("bias",) if self.norm == "none" else ("scale", "shift")
        return {"weight": f". . {inputs} {outputs}"} | dict.fromkeys(rest, outputs)

    def uses(self, input_shape: Shape) -> dict[str, int]:
        """How often one sample uses each number."""
        height, width = self.pixels(input_shape)
        return dict.fromkeys(self.axes(".", "."), 0) | {"weight": height * width}

    def __call__(self, parameters: PyTree, inputs: jax.Array) -> jax.Array:
        weight = parameters["weight"]
        there = jnp.any(weight != 0, axis=(0, 1, 2))
        if self.scaled:  # the weights, which are fewer than what comes out
            weight = weight * (self.filters / jnp.maximum(jnp.sum(there), 1)).astype(weight.dtype)
        z = self._convolve(inputs, weight)
        if self.norm == "none":
            return z + parameters["bias"]
        normal = _within_batch(z) if self.norm == "batch" else _within_sample(z, there)
        return normal * parameters["scale"] + parameters["shift"]

    def _convolve(self, inputs: jax.Array, weight: jax.Array) -> jax.Array:
        if self.kernel % 2:
            return convolve(inputs, weight, self.stride)
        # A kernel of size 2 is one of size 3 whose last row and column are zero.
        end = (0, 1)
        images = jnp.pad(inputs, ((0, 0), end, end, (0, 0)))
        return convolve(images, jnp.pad(weight, (end, end, (0, 0), (0, 0))), self.stride, pad=False)


def _within_sample(
    z: Float[Array, "samples height width channels"], there: Bool[Array, " channels"]
) -> Float[Array, "samples height width channels"]:
    """Mean zero and variance one over the pixels and the channels that are there; the others stay zero."""
    counted = there.astype(z.dtype)
    number = z.shape[1] * z.shape[2] * jnp.maximum(jnp.sum(counted), 1)
    # Counted in the sum, too: their zeros would still have a slope.
    centred = (z - jnp.sum(z * counted, axis=(1, 2, 3), keepdims=True) / number) * counted
    variance = jnp.sum(centred**2, axis=(1, 2, 3), keepdims=True) / number
    return centred * jax.lax.rsqrt(variance + _SMALL)


def _within_batch(z: Float[Array, "samples height width channels"]) -> jax.Array:
    centred = z - jnp.mean(z, axis=(0, 1, 2))
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=(0, 1, 2)) + _SMALL)
