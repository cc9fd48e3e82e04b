"""Models that can be sliced: sizes, derivatives, and that a small model is the masked large one."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel.problem.base import ProblemError
from fedbilevel.problem.cnn4 import FourLayerCNN
from fedbilevel.problem.image import convolve
from fedbilevel.problem.resnet import ResNet, ResNet18
from fedbilevel.problem.scaled import ScaledConvolution
from fedbilevel.problem.sliced_mlp import SlicedMLP
from fedbilevel.problem.submodel import Kernels
from fedbilevel.tree import all_finite, normal_like, size
from problem.second_order import check_second_derivatives

IMAGES = (5, 8, 8, 2)
TINY = {"channels": (4, 6), "blocks": (1, 1), "outputs": 3}


def shapes_of(model, input_shape):
    return jax.eval_shape(lambda key: model.init(key, input_shape)[0], jr.key(0))


@pytest.mark.parametrize(
    ("model", "input_shape", "parameters"),
    [
        (ResNet18(), (32, 32, 3), 11_173_962),
        (ResNet18(100), (32, 32, 3), 11_220_132),
        (FourLayerCNN(filters=64), (32, 32, 3), 97_866),
        (FourLayerCNN(pooled=1), (28, 28, 1), 77_034),
        (SlicedMLP((64, 10)), (28, 28, 1), 784 * 64 + 64 + 650),
        # Three 3 × 3 layers and a 2 × 2 one, each with a scale and a shift, and 32 · 2 · 2 features.
        (FourLayerCNN(norm="group"), (28, 28, 1), 288 + 2 * 9216 + 4096 + 4 * 64 + 1280 + 10),
    ],
)
def test_numbers_of_parameters(model, input_shape, parameters):
    shapes = shapes_of(model, input_shape)
    assert size(shapes) == parameters
    kernels = Kernels.of(model, shapes, input_shape)
    assert kernels.cost(1.0)["parameters"] == parameters
    assert kernels.cost(1.0)["bytes"] == 4 * parameters


@pytest.mark.parametrize("ratio", [0.5, 0.25, 0.0625])
@pytest.mark.parametrize(("make", "input_shape"), [(ResNet18, (32, 32, 3)), (FourLayerCNN, (28, 28, 1))])
def test_a_narrow_model_is_as_large_as_its_cost_says(make, input_shape, ratio):
    kernels = Kernels.of(make(), shapes_of(make(), input_shape), input_shape)
    narrow = shapes_of(make(width=ratio), input_shape)
    assert size(narrow) == kernels.cost(ratio)["parameters"]
    assert Kernels.of(make(width=ratio), narrow, input_shape).cost(1.0) == kernels.cost(ratio)


def test_flops_are_two_for_each_use_of_a_weight():
    model = FourLayerCNN(filters=4, outputs=3)
    kernels = Kernels.of(model, shapes_of(model, (16, 16, 1)), (16, 16, 1))
    # 16 × 16, 8 × 8 and 4 × 4 pixels with 3 × 3 kernels; 2 × 2 pixels shrink to 1 × 1 with a 2 × 2 kernel.
    uses = 256 * 9 * 4 + 64 * 9 * 16 + 16 * 9 * 16 + 1 * 4 * 16 + 4 * 3
    assert kernels.cost(1.0)["flops"] == 2 * uses
    resnet = Kernels.of(ResNet18(), shapes_of(ResNet18(), (32, 32, 3)), (32, 32, 3))
    assert resnet.cost(1.0)["flops"] == 2 * 555_422_720  # what others' counters of multiplications say
    halved = ResNet(stride=2)
    quarter = Kernels.of(halved, shapes_of(halved, (32, 32, 3)), (32, 32, 3))
    assert quarter.cost(1.0)["flops"] == 2 * ((555_422_720 - 5120) // 4 + 5120)  # but for the head


CASES = {
    "ResNet": (ResNet, TINY | {"stride": 2}),
    "MLP": (SlicedMLP, {"sizes": (6, 4, 3)}),
    "CNN": (FourLayerCNN, {"filters": 4, "outputs": 3, "pooled": 2}),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("case", CASES)
def test_a_small_model_is_the_masked_large_one(case):
    """Whatever kernels it has. And training does not leave it: the slope is zero where the mask is."""
    make, options = CASES[case]
    large, small = make(**options), make(**options, width=0.5)
    images = jr.normal(jr.key(2), IMAGES)
    shapes = shapes_of(large, IMAGES[1:])
    kernels = Kernels.of(large, shapes)
    parameters = jax.jit(normal_like)(jr.key(1), shapes)
    half = [np.arange(n) < n / 2 for n in kernels.sizes]
    keep = [np.random.default_rng(i).permutation(own) for i, own in enumerate(half)]

    @jax.jit
    def compared(parameters, keep):
        mask = kernels.mask(parameters, keep)
        masked = jax.tree.map(jnp.multiply, parameters, mask)
        outputs, pull = jax.vjp(lambda p: large(p, images), masked)
        return outputs, pull(jnp.cos(outputs))[0], mask

    outputs, slope, mask = compared(parameters, keep)
    narrow = jax.jit(small)
    np.testing.assert_allclose(narrow(kernels.extract(parameters, keep), images), outputs, rtol=1e-9)
    assert np.max(np.abs(narrow(kernels.extract(parameters, half), images) - outputs)) > 1e-3
    for own, held in zip(jax.tree.leaves(slope), jax.tree.leaves(mask), strict=True):
        assert np.all(np.where(held == 0, own == 0, True))
        assert np.any(own != 0)


@pytest.mark.usefixtures("float64")
def test_second_derivatives_are_those_of_the_gradient():
    small = ResNet(channels=(2,), blocks=(1,), outputs=3)
    check_second_derivatives(small, jr.normal(jr.key(3), (2, 4, 4, 1)))


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_normalisation_of_one_sample_or_of_all_and_without_contrast(norm):
    layer = ScaledConvolution(2, norm=norm)
    parameters, images = layer.init(jr.key(0), (3, 3, 1))[0], jr.normal(jr.key(1), (4, 3, 3, 1))

    @jax.jit
    def compared(parameters, images):
        slope = jax.grad(lambda p: jnp.sum(layer(p, 0 * images) ** 2))
        derivatives = jax.jvp(slope, (parameters,), (parameters,))
        without = {name: leaf.at[..., 1:].set(0) for name, leaf in parameters.items()}
        first = ScaledConvolution(2, 0.5, norm=norm)({k: v[..., :1] for k, v in parameters.items()}, images)
        gap = jnp.max(jnp.abs(layer(without, images)[..., :1] - first))
        return layer(parameters, images)[:2], layer(parameters, images[:2]), all_finite(derivatives), gap

    together, alone, finite, gap = compared(parameters, images)
    assert bool(finite)
    assert float(gap) < 1e-5  # one kernel alone is as if the other one were not there
    assert np.allclose(together, alone, rtol=1e-5) is (norm == "group")


@pytest.mark.usefixtures("float64")
def test_a_kernel_of_size_two_and_the_scaler():
    layer = ScaledConvolution(4, kernel=2, norm="none")
    images, weight = jr.normal(jr.key(0), (1, 3, 5, 2)), jr.normal(jr.key(1), (2, 2, 2, 4))
    expected = jax.lax.conv_general_dilated(
        images, weight, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    bias = jnp.arange(4.0)
    np.testing.assert_allclose(layer({"weight": weight, "bias": bias}, images), expected + bias, rtol=1e-12)
    # Half of the kernels are gone: the others count twice, but for the bias.
    half = weight.at[..., 2:].set(0)
    scaled = layer({"weight": half, "bias": 0 * bias}, images)[..., :2]
    np.testing.assert_allclose(scaled, 2 * expected[..., :2], rtol=1e-12)
    plain = ScaledConvolution(4, kernel=1, norm="none", scaled=False)
    one = half[:1, :1]
    np.testing.assert_array_equal(plain({"weight": one, "bias": 0 * bias}, images), convolve(images, one))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ResNet(channels=(4,), blocks=(1, 1)), "1 numbers of channels and 2 of blocks"),
        (lambda: ResNet18(norm="bach"), "norm is 'bach'; .*did you mean 'batch'"),
        (lambda: ResNet18(width=1.5), "width ratio is 1.5; it must be above 0 and at most 1"),
        (lambda: ResNet(stride=3), "stride is 3; it must be 1 or 2"),
        (lambda: ResNet18(outputs=0), "is 0; it must be a whole number"),
        (lambda: SlicedMLP((10,)), "it must have a hidden layer"),
        (lambda: FourLayerCNN(pooled=4), "pooled is 4; it must be 0, 1, 2 or 3"),
    ],
)
def test_wrong_settings_are_explained(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_images_that_are_too_small_are_refused():
    with pytest.raises(ProblemError, match="too small for a FourLayerCNN that halves them 3 times"):
        FourLayerCNN().init(jr.key(0), (8, 8, 1))
