"""MobileNetV2: its size, its blocks against XLA's convolutions, and derivatives through all of it."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel.problem.base import ProblemError
from fedbilevel.problem.image import group_norm
from fedbilevel.problem.mobilenet import InvertedResidual, MobileNetV2
from fedbilevel.problem.model import Chain
from fedbilevel.tree import normal_like, size
from problem.second_order import check_clients_apart, check_second_derivatives
from problem.test_image import depthwise_of_lax, of_lax

KEY = jr.key(0)
TINY = ((2, 8, 1, 1),)
"""One block with all three convolutions and the sum: enough to differentiate through, quick to compile."""


def tiny(outputs=3):
    return MobileNetV2(outputs, width=0.25, stages=TINY, features=16)


def shapes_of(model, input_shape):
    """The parameters' shapes without computing any, and the shape of the outputs."""
    outputs = []

    def init(key):
        parameters, shape = model.init(key, input_shape)
        outputs.append(shape)
        return parameters

    return jax.eval_shape(init, KEY), outputs[0]


@pytest.mark.parametrize(("classes", "count"), [(0, 2_223_872), (10, 2_236_682), (100, 2_351_972)])
def test_the_whole_network_has_as_many_parameters_as_the_papers(classes, count):
    """3,504,872 with 1000 classes, as is well known of the paper's: 2,223,872 + 1281 · 1000."""
    parameters, shape = shapes_of(MobileNetV2(classes), (32, 32, 3))
    assert size(parameters) == count
    assert shape == ((classes,) if classes else (1280,))


SIDES = {
    # The first convolution; 1 + 2 blocks of the first two stages; 3, 4 + 3 and 3 + 1; the last convolution.
    "small": [32] * 4 + [16] * 3 + [8] * 7 + [4] * 4 + [4],
    "paper": [16] * 2 + [8] * 2 + [4] * 3 + [2] * 7 + [1] * 4 + [1],
}


@pytest.mark.parametrize("strides", SIDES)
def test_images_of_32_pixels_become_4_or_1_and_blocks_17(strides):
    model = MobileNetV2(strides=strides)
    sides, shape = [], (32, 32, 3)
    for part in model.models[:-2]:
        shape = shapes_of(part, shape)[1]
        sides.append(shape[0])
    blocks = [part for part in model.models if isinstance(part, InvertedResidual)]
    assert len(blocks) == 17
    assert sides == SIDES[strides]


@pytest.mark.parametrize(
    ("strides", "side", "millions"), [("small", 32, 88), ("paper", 32, 6), ("paper", 224, 300)]
)
def test_what_a_sample_costs(strides, side, millions):
    """In the paper's own size 300 million multiplications, as its table 4 says."""
    count, shape = 0, (side, side, 3)
    for part in MobileNetV2(0, strides=strides).models[:-1]:
        for convolution in part._branch(shape[-1]).models if isinstance(part, InvertedResidual) else [part]:
            weights, shape = shapes_of(convolution, shape)
            count += shape[0] * shape[1] * weights["weight"].size
    assert count == pytest.approx(1e6 * millions, rel=0.02)


@pytest.mark.parametrize(
    ("width", "first", "last"), [(1.0, 16, 320), (0.25, 8, 80), (0.5, 8, 160), (1.4, 24, 448)]
)
def test_widths_are_rounded_to_multiples_of_8(width, first, last):
    blocks = [part for part in MobileNetV2(width=width).models if isinstance(part, InvertedResidual)]
    assert (blocks[0].channels, blocks[-1].channels) == (first, last)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("channels", "expansion", "stride"), [(8, 3, 1), (8, 3, 2), (12, 3, 1), (8, 1, 1)])
def test_a_block_is_three_convolutions_and_a_sum_where_shapes_agree(channels, expansion, stride):
    block, images = InvertedResidual(channels, expansion, stride, groups=2), jr.normal(KEY, (2, 5, 6, 8))
    start, shape = block.init(KEY, (5, 6, 8))
    parameters = normal_like(jr.key(1), start)
    *expand, depthwise, project = parameters
    z = images
    for own in expand:
        z = jnp.clip(normalised(own, of_lax(z, own["weight"])), 0, 6)
    z = jnp.clip(normalised(depthwise, depthwise_of_lax(z, depthwise["weight"], stride)), 0, 6)
    z = normalised(project, of_lax(z, project["weight"]))
    assert len(expand) == (expansion > 1)
    assert z.shape[1:] == shape
    expected = images + z if (channels, stride) == (8, 1) else z
    np.testing.assert_allclose(jax.jit(block)(parameters, images), expected, atol=1e-12)


def normalised(own, z):
    return group_norm(z, 2) * own["scale"] + own["shift"]


def test_a_single_pixel_is_not_added_after_a_stride():
    block = InvertedResidual(8, 1, 2, groups=2)
    parameters, _ = block.init(KEY, (1, 1, 8))
    images = jnp.ones((1, 1, 1, 8))
    closed = jax.tree.map(jnp.zeros_like, parameters)
    np.testing.assert_array_equal(block(closed, images), 0 * images)


@pytest.mark.usefixtures("float64")
def test_the_head_sees_the_mean_over_the_pixels():
    images = jr.uniform(KEY, (2, 6, 6, 3))
    parameters, _ = tiny().init(KEY, (6, 6, 3))
    parts = tiny().models
    z = jax.jit(Chain(parts[:-2]))(parameters[:-2], images)
    assert z.shape == (2, 6, 6, 16)
    features = np.asarray(z).mean(axis=(1, 2))
    expected = features @ np.asarray(parameters[-1]["weight"]) + np.asarray(parameters[-1]["bias"])
    np.testing.assert_allclose(jax.jit(tiny())(parameters, images), expected, atol=1e-12)
    assert tiny(0).models == parts[:-1]


def test_the_start_is_that_of_he_and_every_block_has_draws_of_its_own():
    parameters, _ = MobileNetV2(stages=((6, 64, 3, 1),)).init(KEY, (4, 4, 3))
    second = parameters[2]
    assert np.var(second[0]["weight"]) == pytest.approx(2 / 64, rel=0.05)
    assert np.var(second[1]["weight"]) == pytest.approx(2 / 9, rel=0.1)
    assert np.all(second[1]["scale"] == 1)
    assert not np.any(second[1]["shift"])
    assert not np.allclose(parameters[3][2]["weight"], second[2]["weight"])


@pytest.mark.usefixtures("float64")
def test_second_derivatives_go_through_all_of_it():
    check_second_derivatives(tiny(), jr.uniform(jr.key(5), (4, 6, 6, 3)))


@pytest.mark.usefixtures("float64")
def test_clients_with_weights_of_their_own_are_computed_apart():
    check_clients_apart(tiny(), jr.uniform(jr.key(5), (2, 3, 6, 6, 3)))


REFUSED = {
    "width": ({"width": 0.0}, "width is 0.0; it must be a factor above 0"),
    "groups": ({"groups": 3}, "groups is 3 and features is 1280; groups must divide"),
    "groups of features": ({"features": 6}, "groups is 4 and features is 6; groups must divide"),
    "features": ({"features": 0}, "features is 0; it must be a whole number of at least 1"),
    "short stage": ({"stages": ((1, 16, 1),)}, r"a stage is \(1, 16, 1\); it must be \(expansion, channels"),
    "no blocks": ({"stages": ((1, 16, 0, 1),)}, r"a number of the stage \(1, 16, 0, 1\) is 0"),
    "stride": ({"stages": ((1, 16, 1, 3),)}, r"stride of the stage \(1, 16, 1, 3\) is 3; it must be 1 or 2"),
    "strides": ({"strides": "papers"}, "strides is 'papers'; .* did you mean 'paper'"),
    "outputs": ({"outputs": False}, "width of a layer is False"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_make_no_network_are_refused(case):
    settings, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        MobileNetV2(**settings)


def test_what_is_no_image_is_refused():
    with pytest.raises(ProblemError, match=r"shape \(784,\); a MobileNetV2 needs images"):
        MobileNetV2().init(KEY, (784,))
