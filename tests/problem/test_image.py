"""Operations on images against those of XLA, with their gradients."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel.problem.image import convolve, convolve_depthwise, group_norm, pool

KEY = jr.key(0)
NAMES = ("NHWC", "HWIO", "NHWC")


def of_lax(images, weight, stride=1, pad=True, **options):
    """The convolution of XLA, with as many zeros on one side of the image as on the other."""
    border = weight.shape[0] // 2 if pad else 0
    return jax.lax.conv_general_dilated(
        images, weight, (stride, stride), [(border, border)] * 2, dimension_numbers=NAMES, **options
    )


def depthwise_of_lax(images, weight, stride=1):
    return of_lax(images, weight[:, :, None], stride, feature_group_count=weight.shape[-1])


def assert_same_with_gradients(ours, theirs, *arguments):
    along = jr.normal(jr.key(2), jax.eval_shape(theirs, *arguments).shape)
    (found, slopes), (expected, their_slopes) = (
        jax.jit(lambda *given, function=function: with_gradients(function, along, *given))(*arguments)
        for function in (ours, theirs)
    )
    np.testing.assert_allclose(found, expected, atol=1e-12)
    for own, other in zip(slopes, their_slopes, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-11)


def with_gradients(function, along, *arguments):
    value, vjp = jax.vjp(function, *arguments)
    return value, vjp(along)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("sides", [(8, 8), (5, 7), (1, 2)])
def test_the_usual_convolution_is_that_of_xla(sides):
    images, weight = jr.normal(KEY, (3, *sides, 2)), jr.normal(jr.key(1), (3, 3, 2, 4))
    assert_same_with_gradients(convolve, of_lax, images, weight)
    assert convolve(images, weight).shape == (3, *sides, 4)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize(("stride", "pad"), [(1, False), (2, True), (2, False)])
def test_so_are_those_of_other_sizes_and_strides(size, stride, pad):
    """Height 6 is even and width 7 odd: a stride of 2 ends differently in them."""
    images, weight = jr.normal(KEY, (2, 6, 7, 2)), jr.normal(jr.key(1), (size, size, 2, 3))
    assert_same_with_gradients(
        lambda *given: convolve(*given, stride, pad),
        lambda *given: of_lax(*given, stride, pad),
        images,
        weight,
    )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [3, 5])
def test_the_depthwise_convolution_is_the_grouped_one_of_xla(size, stride):
    images, weight = jr.normal(KEY, (2, 6, 7, 4)), jr.normal(jr.key(1), (size, size, 4))
    assert_same_with_gradients(
        lambda *given: convolve_depthwise(*given, stride),
        lambda *given: depthwise_of_lax(*given, stride),
        images,
        weight,
    )


@pytest.mark.usefixtures("float64")
def test_clients_with_weights_of_their_own_are_computed_apart():
    images, weights = jr.normal(KEY, (2, 3, 4, 4, 1)), jr.normal(jr.key(1), (2, 3, 3, 1, 5))
    together = jax.vmap(convolve)(images, weights)
    np.testing.assert_allclose(together[1], of_lax(images[1], weights[1]), atol=1e-13)
    depthwise = jax.vmap(convolve_depthwise)(images, weights[..., 0, :1])
    np.testing.assert_allclose(depthwise[1], depthwise_of_lax(images[1], weights[1, ..., 0, :1]), atol=1e-13)


@pytest.mark.parametrize(("size", "stride"), [(4, 1), (3, 3)])
def test_kernels_without_a_middle_and_other_strides_are_refused(size, stride):
    with pytest.raises(ValueError, match=f"size {size} with stride {stride}; the size must be odd"):
        convolve(jnp.ones((1, 8, 8, 1)), jnp.ones((size, size, 1, 1)), stride)


@pytest.mark.usefixtures("float64")
def test_pooling_takes_the_largest_of_four_and_leaves_out_what_is_odd():
    images = jr.normal(KEY, (2, 5, 7, 3))
    expected = jax.lax.reduce_window(images, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    assert expected.shape == (2, 2, 3, 3)
    np.testing.assert_array_equal(pool(images), expected)


@pytest.mark.usefixtures("float64")
def test_group_norm_is_that_of_every_sample_and_group_alone():
    images = 3 + 2 * jr.normal(KEY, (2, 4, 4, 6))
    found = group_norm(images, 3)
    for sample in range(2):
        for first in (0, 2, 4):
            part = np.asarray(images[sample, :, :, first : first + 2])
            expected = (part - part.mean()) / np.sqrt(part.var() + 1e-5)
            np.testing.assert_allclose(found[sample, :, :, first : first + 2], expected, atol=1e-12)


def test_an_image_without_contrast_has_finite_derivatives():
    slope = jax.grad(lambda z: jnp.sum(group_norm(z, 1) ** 2))(jnp.ones((1, 2, 2, 2)))
    assert np.all(np.isfinite(slope))


@pytest.mark.parametrize("pixel", range(4))
def test_pooling_shows_a_nan_wherever_it_is(pixel: int) -> None:
    image = jnp.arange(4.0).at[pixel].set(jnp.nan)
    assert bool(jnp.isnan(pool(image.reshape(1, 2, 2, 1))).all())
