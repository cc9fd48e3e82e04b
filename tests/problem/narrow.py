"""A tiny smooth model that can be sliced, a problem and clients for it: quick to compile."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import fedbilevel as fb
from fedbilevel.problem.accuracy import CrossEntropy
from fedbilevel.problem.loss_tuning import OfModel
from fedbilevel.problem.submodel import Sliceable

INPUTS, HIDDEN, CLASSES, SAMPLES = 3, 8, 2, 5


class TwoLayers(Sliceable):
    """`tanh(inputs · first + bias) · second`: the hidden units are its kernels."""

    def init(self, key, input_shape):
        k_first, k_second = jr.split(key)
        first, second = jr.normal(k_first, (INPUTS, HIDDEN)), jr.normal(k_second, (HIDDEN, CLASSES))
        return {"bias": jnp.arange(1.0, HIDDEN + 1) / 10, "first": first, "second": second}, (CLASSES,)

    def __call__(self, parameters, inputs):
        return jnp.tanh(inputs @ parameters["first"] + parameters["bias"]) @ parameters["second"]

    def axes(self):
        return {"bias": "hidden", "first": ". hidden", "second": "hidden ."}

    def uses(self, input_shape):
        return {"bias": 0, "first": 1, "second": 1}


class Sigmoids(TwoLayers):
    """The same with another curve, which is not zero at zero: a unit without weights still has an output."""

    def __call__(self, parameters, inputs):
        return jax.nn.sigmoid(inputs @ parameters["first"] + parameters["bias"]) @ parameters["second"]


class Features(Sliceable):
    """`inputs · weight`: its kernels are the rows of an input axis."""

    def init(self, key, input_shape):
        return {"weight": jr.normal(key, (INPUTS, CLASSES))}, (CLASSES,)

    def __call__(self, parameters, inputs):
        return inputs @ parameters["weight"]

    def axes(self):
        return {"weight": "feature ."}

    def uses(self, input_shape):
        return {"weight": 1}


def problem(model=TwoLayers()):
    """The same loss on both levels, of the model y; x is nothing."""
    loss = CrossEntropy(OfModel(model))
    return fb.Problem(loss, loss, (), model.init(jr.key(0), (INPUTS,))[0])


def clients(count=3, **options):
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(count, SAMPLES, INPUTS))
    labels = draw.integers(0, CLASSES, size=(count, SAMPLES))
    return fb.Clients({"inputs": inputs, "labels": labels}, **options)


def slope(y, client):
    """The gradient of a client's loss, by itself."""
    table = jax.tree.map(
        lambda leaf: leaf.reshape(-1, SAMPLES, *leaf.shape[1:])[client], clients().upper.flat
    )
    return jax.grad(lambda y: CrossEntropy(OfModel(TwoLayers()))((), y, table))(y)
