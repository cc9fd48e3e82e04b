"""Convolutional networks: their layers against XLA's, their start, and derivatives through all of it."""

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
from fedbilevel.problem.convolution import ConvNet, TwoLayerCNN
from fedbilevel.problem.image import group_norm, pool
from fedbilevel.problem.model import Linear
from fedbilevel.problem.oracle import Client
from fedbilevel.problem.representation import Representation
from fedbilevel.tree import dot, normal_like, size, step
from problem.second_order import check_clients_apart, check_second_derivatives
from problem.test_image import of_lax

KEY = jr.key(0)


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


def plain_cnn(parameters, images):
    """The network as it is usually written: XLA's convolution, relu, then XLA's pooling."""
    z = images
    for own in parameters[:2]:
        z = jax.nn.relu(of_lax(z, own["weight"], pad=False) + own["bias"])
        z = jax.lax.reduce_window(z, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    hidden, head = parameters[2:]
    z = jax.nn.relu(z.reshape(len(z), -1) @ hidden["weight"] + hidden["bias"])
    return z @ head["weight"] + head["bias"]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("kernel", "side"), [(5, 17), (3, 10)])
def test_the_two_layer_network_is_that_of_xla(kernel, side):
    model, images = TwoLayerCNN(3, (4, 6), hidden=7, kernel=kernel), jr.normal(KEY, (3, side, side, 2))
    parameters = normal_like(jr.key(1), model.init(KEY, (side, side, 2))[0])
    expected = plain_cnn(parameters, images)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(jax.jit(model)(parameters, images), expected, rtol=1e-10)
    features = TwoLayerCNN(0, (4, 6), hidden=7, kernel=kernel)(parameters[:-1], images)
    assert features.shape == (3, 7)


def test_the_two_layer_network_has_the_papers_size():
    model = TwoLayerCNN()
    parameters = jax.eval_shape(lambda key: model.init(key, (28, 28, 1))[0], KEY)
    dense = 1025 * 2048 + 2049 * 62
    assert size(parameters) == 26 * 32 + (25 * 32 + 1) * 64 + dense
    assert parameters[2]["weight"].shape == (1024, 2048)
    start, shape = TwoLayerCNN(3, (8, 16), hidden=4).init(KEY, (28, 28, 1))
    assert shape == (3,)
    assert np.var(start[1]["weight"]) == pytest.approx(2 / (25 * 8), rel=0.1)
    assert not np.any(start[1]["bias"])


@pytest.mark.usefixtures("float64")
def test_second_derivatives_go_through_the_two_layer_network():
    check_second_derivatives(TwoLayerCNN(3, (2, 4), 6, kernel=3), jr.uniform(jr.key(5), (6, 10, 10, 1)))


@pytest.mark.usefixtures("float64")
def test_clients_with_weights_of_their_own_are_computed_apart():
    check_clients_apart(TwoLayerCNN(3, (2, 4), 6, kernel=3), jr.uniform(jr.key(5), (2, 5, 10, 10, 1)))


REFUSED = {
    "no layers": (lambda: ConvNet(()), "filters is empty; give the channels of every layer"),
    "channels 0": (lambda: ConvNet((8, 0)), "number of channels or groups is 0; it must be a whole number"),
    "groups": (lambda: ConvNet((8, 6), groups=4), r"groups is 4, which does not divide \[6\] of the filters"),
    "no image": (lambda: ConvNet((4,)).init(KEY, (784,)), r"shape \(784,\); a ConvNet needs images"),
    "small image": (
        lambda: ConvNet((4, 4, 4)).init(KEY, (6, 6, 1)),
        r"too small for 3 layers: every layer halves them, and layer 3 would get 1 × 1 pixels",
    ),
    "three convolutions": (lambda: TwoLayerCNN(filters=(8, 8, 8)), r"filters is \(8, 8, 8\); there are two"),
    "even kernel": (lambda: TwoLayerCNN(kernel=4), "size of a kernel is 4; it must be odd"),
    "no filters": (lambda: TwoLayerCNN(filters=(8, 0)), "number of filters is 0"),
    "outputs": (lambda: TwoLayerCNN(-1), "width of a layer is -1"),
    "too small for the second kernel": (
        lambda: TwoLayerCNN().init(KEY, (14, 14, 1)),
        r"images of shape \(5, 5, 32\), too small for a kernel of size 5 .* needs 6 × 6 pixels",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_make_no_network_are_refused(case):
    build, message = REFUSED[case]
    with pytest.raises((ValueError, ProblemError), match=message):
        build()
