"""The convolutional network: its parts against others' convolutions, and derivatives through all of it."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from fedbilevel.data.batches import Batch
from fedbilevel.data.clients import Clients
from fedbilevel.problem.accuracy import CrossEntropy
from fedbilevel.problem.base import Problem, ProblemError
from fedbilevel.problem.convolution import ConvNet, convolve, group_norm, pool
from fedbilevel.problem.model import Linear
from fedbilevel.problem.oracle import Client
from fedbilevel.problem.representation import Representation
from fedbilevel.tree import dot, normal_like, size, step

KEY = jr.key(0)


def of_lax(images, weight):
    """The convolution of XLA."""
    names = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, weight, (1, 1), "SAME", dimension_numbers=names)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("sides", [(8, 8), (5, 7), (1, 2)])
def test_the_convolution_is_that_of_xla_with_its_gradients(sides):
    images, weight = jr.normal(KEY, (3, *sides, 2)), jr.normal(jr.key(1), (3, 3, 2, 4))
    ours, vjp = jax.vjp(convolve, images, weight)
    theirs, their_vjp = jax.vjp(of_lax, images, weight)
    np.testing.assert_allclose(ours, theirs, atol=1e-13)
    along = jr.normal(jr.key(2), ours.shape)
    for own, other in zip(vjp(along), their_vjp(along), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_clients_with_weights_of_their_own_are_computed_apart():
    images, weights = jr.normal(KEY, (2, 3, 4, 4, 1)), jr.normal(jr.key(1), (2, 3, 3, 1, 5))
    together = jax.vmap(convolve)(images, weights)
    np.testing.assert_allclose(together[1], of_lax(images[1], weights[1]), atol=1e-13)


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


@pytest.mark.usefixtures("float64")
def test_the_network_is_its_layers_one_after_another():
    """Relu before the pooling, as networks are usually written, gives the same numbers."""
    model, images = ConvNet((4, 6), groups=2), jr.uniform(KEY, (3, 8, 8, 1))
    parameters = normal_like(jr.key(1), model.init(KEY, (8, 8, 1))[0])  # so that biases and shifts are seen
    z = images
    for own in parameters:
        z = group_norm(of_lax(z, own["weight"]) + own["bias"], 2) * own["scale"] + own["shift"]
        z = pool(jax.nn.relu(z))
    found = jax.jit(model)(parameters, images)
    np.testing.assert_allclose(found, z.reshape(3, -1), atol=1e-12)


def test_shapes_and_start():
    parameters, shape = ConvNet((32, 32, 32, 64)).init(KEY, (28, 28, 1))
    assert shape == (64,)
    assert size(parameters) == 9 * 32 * (1 + 32 + 32 + 64) + 3 * (32 + 32 + 32 + 64)
    assert np.var(parameters[2]["weight"]) == pytest.approx(2 / (9 * 32), rel=0.05)
    assert not np.any(parameters[0]["bias"])
    assert not np.any(parameters[0]["shift"])
    assert np.all(parameters[0]["scale"] == 1)
    assert not np.allclose(parameters[1]["weight"], parameters[2]["weight"])
    assert ConvNet([8, 8]) == ConvNet((8, 8)), "an experiment file has lists"


@pytest.fixture
def client():
    """A client with a head on two layers, in double precision, and where x and y are."""
    with jax.enable_x64(True):
        model, head = ConvNet((2, 4), groups=2), Linear(3)
        k_x, k_y, k_samples = jr.split(KEY, 3)
        x, features = model.init(k_x, (8, 8, 1))
        y, _ = head.init(k_y, features)
        samples = {"inputs": jr.uniform(k_samples, (6, 8, 8, 1)), "labels": jnp.arange(6) % 3}
        lower = CrossEntropy(Representation(model, head), 0.1)
        problem = Problem(lower, lower, x, y)
        stacked = jax.tree.map(lambda leaf: leaf[None], samples)
        yield Client(problem, Clients(stacked), 0, 0, KEY), problem, Batch(samples)


def test_second_derivatives_go_through_pooling_and_normalisation(client):
    """`H v` and `⟨J v, w⟩` against differences of gradients of g, and the other order of derivatives."""
    me, problem, batch = client
    v, w = normal_like(jr.key(1), problem.y0), normal_like(jr.key(2), problem.x0)

    def slope(x, y):
        return ravel_pytree(jax.grad(problem.lower, 1)(x, y, batch.samples))[0]

    @jax.jit
    def exact(x, y):
        jv, forward = me.g_xy(x, y, v, batch), jax.jvp(lambda x: slope(x, y), (x,), (w,))[1]
        return ravel_pytree(me.g_yy(x, y, v, batch))[0], dot(jv, w), forward @ ravel_pytree(v)[0]

    @jax.jit
    def differences(x, y, small):
        along_y, along_x = (
            (slope(*ahead) - slope(*behind)) / (2 * small)
            for ahead, behind in (
                ((x, step(y, -small, v)), (x, step(y, small, v))),
                ((step(x, -small, w), y), (step(x, small, w), y)),
            )
        )
        return along_y, along_x @ ravel_pytree(v)[0]

    (hv, jvw, other_order), (near_hv, near_jvw) = (
        exact(problem.x0, problem.y0),
        differences(problem.x0, problem.y0, 1e-6),
    )
    np.testing.assert_allclose(hv, near_hv, rtol=1e-6, atol=1e-8)
    assert float(jvw) == pytest.approx(float(near_jvw), rel=1e-6)
    assert float(jvw) == pytest.approx(float(other_order), rel=1e-10)
    assert abs(float(jvw)) > 1e-3, "or the test would show nothing"


REFUSED = {
    "no layers": (lambda: ConvNet(()), "filters is empty; give the channels of every layer"),
    "channels 0": (lambda: ConvNet((8, 0)), "number of channels or groups is 0; it must be a whole number"),
    "groups": (lambda: ConvNet((8, 6), groups=4), r"groups is 4, which does not divide \[6\] of the filters"),
    "no image": (lambda: ConvNet((4,)).init(KEY, (784,)), r"shape \(784,\); a ConvNet needs images"),
    "small image": (
        lambda: ConvNet((4, 4, 4)).init(KEY, (6, 6, 1)),
        r"too small for 3 layers: every layer halves them, and layer 3 would get 1 × 1 pixels",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_make_no_network_are_refused(case):
    build, message = REFUSED[case]
    with pytest.raises((ValueError, ProblemError), match=message):
        build()
