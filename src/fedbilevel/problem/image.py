"""Operations on images `(samples, height, width, channels)` that stay fast when every client has its weights.

In a federation every client has weights of its own as soon as it has made one step, and a convolution with
another kernel for every client is slow on a CPU: under `vmap` it becomes a grouped convolution.
Here a convolution is shifted copies of the image side by side, times one matrix (*im2col*): under `vmap`
that is a product of stacked matrices. A convolution of every channel by itself is a sum of shifted copies,
each times a number a channel. `benchmarks/convolution.py` and `benchmarks/depthwise.py` measure the gain.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

_SMALL = 1e-5
"""Added to a variance: an image without any contrast has none."""


def convolve(
    images: Float[Array, "samples height width channels"],
    weight: Float[Array, "size size channels filters"],
    stride: int = 1,
    pad: bool = True,
) -> Float[Array, "samples new_height new_width filters"]:
    """Cross-correlation with square kernels of odd size: what networks call a convolution.

    Args:
        images: what is seen through the kernels.
        weight: the kernels.
        stride: how many pixels each result lies after the last: 1 or 2.
        pad: with zeros around the image, `(size − 1)/2` on each side, so that stride 1 keeps height and
            width, and stride 2 halves them, rounded up. Without, only whole kernels count: n → n − size + 1.

    Example:
        >>> image = jnp.arange(4.0).reshape(1, 2, 2, 1)
        >>> middle = jnp.zeros((3, 3, 1, 1)).at[1, 1].set(2.0)
        >>> convolve(image, middle).ravel().tolist()
        [0.0, 2.0, 4.0, 6.0]
    """
    seen = _patches(images, weight.shape[0], stride, pad)
    # A product of two matrices: with more axes XLA would copy the transpose of one of them for the gradient.
    flat = seen.reshape(-1, seen.shape[-1]) @ weight.reshape(-1, weight.shape[-1])
    return flat.reshape(*seen.shape[:3], -1)


def convolve_depthwise(
    images: Float[Array, "samples height width channels"],
    weight: Float[Array, "size size channels"],
    stride: int = 1,
) -> Float[Array, "samples new_height new_width channels"]:
    """Every channel convolved with a kernel of its own, zeros around the image; arguments as for `convolve`.

    Example:
        >>> image = jnp.arange(4.0).reshape(1, 1, 2, 2)
        >>> middle = jnp.zeros((3, 3, 2)).at[1, 1].set(jnp.array([1.0, 10.0]))
        >>> convolve_depthwise(image, middle).ravel().tolist()
        [0.0, 10.0, 2.0, 30.0]
    """
    size = weight.shape[0]
    rows = _shifted(_bordered(images, size, stride, pad=True), 1, size, stride)
    parts = [
        part * own
        for row, kernels in zip(rows, weight, strict=True)
        for part, own in zip(_shifted(row, 2, size, stride), kernels, strict=True)
    ]
    return functools.reduce(operator.add, parts)


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

    By pairs of a reshaped array: the gradient of a maximum over axes looks for the entries that equal it, and
    divides by zero where a compiler has rounded an entry in another way than the maximum. Of equal pixels the
    first gets the gradient.

    Example:
        >>> pool(jnp.arange(20.0).reshape(1, 4, 5, 1)).ravel().tolist()
        [6.0, 8.0, 16.0, 18.0]
    """
    count, height, width, channels = images.shape
    whole = images[:, : height // 2 * 2, : width // 2 * 2]
    squares = whole.reshape(count, height // 2, 2, width // 2, 2, channels)
    rows = _larger(squares[:, :, 0], squares[:, :, 1])
    return _larger(rows[:, :, :, 0], rows[:, :, :, 1])


def first_kernel(key: jax.Array, shape: tuple[int, ...], summed: int) -> jax.Array:
    """Normal weights of variance `2/summed` (He), for a relu after them.

    Args:
        key: draws them.
        shape: of the weights.
        summed: how many products add up to one number of the output.
    """
    return (2 / summed) ** 0.5 * jr.normal(key, shape)


def _larger(a: jax.Array, b: jax.Array) -> jax.Array:
    """`max(a, b)`; the gradient of `jnp.maximum` divides, to share it among equal entries: half as fast."""
    return jnp.where((a >= b) | jnp.isnan(a), a, b)  # a NaN is no number to lose sight of, in a or in b


def _patches(images: jax.Array, size: int, stride: int, pad: bool) -> jax.Array:
    """What a kernel sees at every place, side by side, in the order of the kernel's first three axes.

    First what it sees in a row, then in all rows: the gradient adds twice `size` arrays, not `size²`.
    """
    rows = jnp.concatenate(_shifted(_bordered(images, size, stride, pad), 2, size, stride), axis=-1)
    return jnp.concatenate(_shifted(rows, 1, size, stride), axis=-1)


def _bordered(images: jax.Array, size: int, stride: int, pad: bool) -> jax.Array:
    """Images with half a kernel of zeros around them, if there shall be any."""
    if size % 2 == 0 or stride not in (1, 2):
        raise ValueError(
            f"a kernel of size {size} with stride {stride}; the size must be odd, so that the kernel has a "
            "middle, and the stride 1 or 2"
        )
    border = size // 2 if pad else 0
    return jnp.pad(images, ((0, 0), (border, border), (border, border), (0, 0)))


def _shifted(images: jax.Array, axis: int, size: int, stride: int) -> list[jax.Array]:
    """What each of the weights of a kernel is multiplied by, along one axis."""
    end = images.shape[axis] - size + 1
    return [jax.lax.slice_in_dim(images, i, i + end, stride, axis) for i in range(size)]
