"""Small models computed by themselves: the same as the whole one times a mask, with less arithmetic."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import fedbilevel as fb
from fedbilevel.local import Submodel
from fedbilevel.local.narrow import Narrow
from fedbilevel.problem.cnn4 import FourLayerCNN
from fedbilevel.problem.resnet import ResNet
from fedbilevel.problem.submodel import Kernels, kernels_in
from fedbilevel.tree import times
from problem.narrow import INPUTS, clients, problem

pytestmark = pytest.mark.usefixtures("float64")

RATIOS = (1.0, 0.5, 0.25)
LEARN, DISTIL = fb.SGD(0.5, momentum=0.9), fb.SGD(0.3)
PUBLIC = np.random.default_rng(1).normal(size=(7, INPUTS))


def submodel(**options):
    return fb.FedSep(Submodel(RATIOS, mask_steps=3, mask_lr=0.1, **options), LEARN, learn_steps=3)


def learning(make, **fixed):
    return functools.partial(make, LEARN, ratios=RATIOS, learn_steps=3, **fixed)


def distilling(make):
    return functools.partial(make, LEARN, DISTIL, PUBLIC, ratios=RATIOS, learn_steps=3, distil_steps=2)


METHODS = {
    "HeteroFL": learning(fb.HeteroFL),
    "HeteroFL, mean over all": learning(fb.HeteroFL, average="all"),
    "FederatedDropout": learning(fb.FederatedDropout),
    "FedRolex": learning(fb.FedRolex),
    "Homogeneous": lambda **options: fb.Homogeneous(LEARN, 0.25, learn_steps=3, **options),
    "FedSep": submodel,
    "FedSep, mean over holders": functools.partial(submodel, average="holders"),
    "FedSep, full": functools.partial(submodel, full=True),
    "FedDF": distilling(fb.FedDF),
    "DSFL": distilling(fb.DSFL),
    "FedET": distilling(fb.FedET),
}


def solved(method, chunk=None):
    engine = fb.Simulator(chunk=chunk)
    return fb.solve(problem(), clients(), method, 3, every=3, engine=engine, seed=1)


def assert_close(a, b):
    for own, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_a_small_model_learns_what_the_masked_one_does(name):
    masked, narrow = solved(METHODS[name]()), solved(METHODS[name](narrow=True), chunk=1)
    assert_close((narrow.x, narrow.y), (masked.x, masked.y))
    assert narrow.ledger == masked.ledger
    moved = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), narrow.x or narrow.y, problem().y0)
    assert max(map(float, jax.tree.leaves(moved))) > 0.01


def test_under_vmap_it_is_the_same():
    assert_close(
        solved(METHODS["FedRolex"](narrow=True)).y, solved(METHODS["FedRolex"](narrow=True), chunk=1).y
    )


NETWORKS = {
    "group": ResNet(channels=(4, 6), blocks=(1, 1), outputs=3, stride=2),
    "batch": FourLayerCNN(filters=4, outputs=3, norm="batch"),
}


@pytest.mark.parametrize("norm", NETWORKS)
def test_the_slope_of_a_network_is_that_of_its_small_model(norm):
    """With a normalisation, whose statistics are those of the kernels that are there, and a scaler."""
    network, images = NETWORKS[norm], jr.normal(jr.key(2), (4, 16, 16, 1))
    parameters = network.init(jr.key(1), images.shape[1:])[0]
    kernels = Kernels.of(network, parameters)
    keep = [np.random.default_rng(i).permutation(n) < n / 2 for i, n in enumerate(kernels.sizes)]
    part = Narrow(kernels, keep, (1.0, 0.5), 1)
    slope = jax.grad(lambda y: jnp.sum(jnp.cos(network(y, images))))
    mask = kernels.mask(parameters, keep)
    whole, small = jax.jit(lambda y: (slope(times(mask, y)), part.trained(slope, y)))(parameters)
    for own, other in zip(jax.tree.leaves(times(mask, whole)), jax.tree.leaves(small), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-9, atol=1e-9)
    outputs = jax.jit(lambda y: part.small(lambda small: network(small, images), y))(parameters)
    np.testing.assert_allclose(outputs, network(times(mask, parameters), images), rtol=1e-9)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(0, 5))
def test_what_is_gathered_and_scattered_is_what_a_mask_leaves(held, seed):
    network = FourLayerCNN(filters=4, outputs=3, pooled=2)  # the head sees a flattened image
    parameters = network.init(jr.key(0), (16, 16, 1))[0]
    kernels = Kernels.of(network, parameters)
    places = [np.sort(np.random.default_rng(seed).permutation(n)[:held]) for n in kernels.sizes]
    keep = [np.isin(np.arange(n), own) for n, own in zip(kernels.sizes, places, strict=True)]
    small = kernels.gather(parameters, places)
    assert sum(leaf.size for leaf in jax.tree.leaves(small)) == kernels.cost(held / 4)["parameters"]
    assert_close(kernels.scatter(small, places), times(kernels.mask(parameters, keep), parameters))


def test_it_needs_less_arithmetic():
    network = fb.SlicedMLP((64, 64, 10))
    images = jnp.ones((8, 28, 28, 1))
    parameters = network.init(jr.key(0), images.shape[1:])[0]
    kernels = Kernels.of(network, parameters)

    def operations(ratio):
        part = Narrow(kernels, kernels.leading(ratio), (ratio,), 0)
        compute = jax.jit(lambda y: part.small(lambda small: network(small, images), y))
        return compute.lower(parameters).compile().cost_analysis()["flops"]

    shares = [kernels.cost(ratio)["parameters"] / kernels.cost(1.0)["parameters"] for ratio in (0.25, 1.0)]
    assert operations(0.25) < 1.2 * shares[0] * operations(1.0)


def test_single_weights_and_soft_masks_make_no_small_model():
    for make in (fb.ZeroFL, fb.FedDST, fb.Flash):
        with pytest.raises(ValueError, match="narrow is True, but this method holds single weights"):
            make(LEARN, narrow=True)
    with pytest.raises(ValueError, match="with soft masks a client holds all kernels"):
        Submodel(full=True, soft=True, narrow=True)


def test_a_client_holds_its_own_width_only():
    kernels = kernels_in(problem())
    for place, width in enumerate(RATIOS):
        part = Narrow(kernels, kernels.leading(width), RATIOS, place)
        held = part.small(lambda small: jnp.asarray(small["bias"].size), problem().y0)
        assert int(held) == kernels.counts(width)[0]
