"""Operations on images `(samples, height, width, channels)` that stay fast when every client has its weights.

In a federation every client has weights of its own as soon as it has made one step, and a convolution with
another kernel for every client is slow on a CPU: under `vmap` it becomes a grouped convolution.
Here a convolution is shifted copies of the image side by side, times one matrix (*im2col*): under `vmap`
that is a product of stacked matrices. A convolution of every channel by itself is a sum of shifted copies,
each times a number a channel. `benchmarks/convolution.py` and `benchmarks/depthwise.py` measure the gain.
"""

from __future__ import annotations

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
    # The order of the shifts is that of the kernel's first two axes.
    side_by_side = jnp.concatenate(_shifted(images, weight.shape[0], stride, pad), axis=-1)
    return side_by_side @ weight.reshape(-1, weight.shape[-1])


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
    kernel = weight.reshape(-1, weight.shape[-1])
    shifted = _shifted(images, weight.shape[0], stride, pad=True)
    total = shifted[0] * kernel[0]
    for part, own in zip(shifted[1:], kernel[1:], strict=True):
        total = total + part * own
    return total


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
    divides by zero where a compiler has rounded an entry in another way than the maximum. Equal pixels of a
    pair share the gradient.

    Example:
        >>> pool(jnp.arange(20.0).reshape(1, 4, 5, 1)).ravel().tolist()
        [6.0, 8.0, 16.0, 18.0]
    """
    count, height, width, channels = images.shape
    whole = images[:, : height // 2 * 2, : width // 2 * 2]
    squares = whole.reshape(count, height // 2, 2, width // 2, 2, channels)
    rows = jnp.maximum(squares[:, :, 0], squares[:, :, 1])
    return jnp.maximum(rows[:, :, :, 0], rows[:, :, :, 1])


def first_kernel(key: jax.Array, shape: tuple[int, ...], summed: int) -> jax.Array:
    """Normal weights of variance `2/summed` (He), for a relu after them.

    Args:
        key: draws them.
        shape: of the weights.
        summed: how many products add up to one number of the output.
    """
    return (2 / summed) ** 0.5 * jr.normal(key, shape)


def _shifted(images: jax.Array, size: int, stride: int, pad: bool) -> list[jax.Array]:
    """What each of the `size × size` weights of a kernel is multiplied by, row after row of the kernel."""
    if size % 2 == 0 or stride not in (1, 2):
        raise ValueError(
            f"a kernel of size {size} with stride {stride}; the size must be odd, so that the kernel has a "
            "middle, and the stride 1 or 2"
        )
    border = size // 2 if pad else 0
    padded = jnp.pad(images, ((0, 0), (border, border), (border, border), (0, 0)))
    height, width = (n - size + 1 for n in padded.shape[1:3])
    return [
        padded[:, i : i + height : stride, j : j + width : stride] for i in range(size) for j in range(size)
    ]
