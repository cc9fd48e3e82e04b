"""Small models as pure functions of their parameters: a backbone, a head, a classifier.

A model is a frozen description. `init(key, input_shape)` draws its parameters, a plain pytree, and says
what shape comes out; `model(parameters, inputs)` maps inputs with a leading axis of samples. Which
parameters are x and which are y is the problem's business, so a model never holds them.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from fedbilevel.name import check_choice
from fedbilevel.number import check_count
from fedbilevel.tree import PyTree

Shape: TypeAlias = tuple[int, ...]
"""The shape of one sample, without the axis of samples."""

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "identity": lambda z: z,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "tanh": jnp.tanh,
}


class Model(eqx.Module):
    """A family of functions `inputs ↦ outputs`, one for each value of the parameters."""

    @abc.abstractmethod
    def init(self, key: jax.Array, input_shape: Shape) -> tuple[PyTree, Shape]:
        """Random parameters for samples of this shape, and the shape of the outputs."""

    @abc.abstractmethod
    def __call__(self, parameters: PyTree, inputs: jax.Array) -> jax.Array:
        """Outputs `(samples, ...)` of inputs `(samples, *input_shape)`."""


class Dense(Model):
    """`a(inputs · W + b)`; inputs of any shape are flattened. Parameters: `{"weight", "bias"}`.

    The bias starts at zero, the weights are normal and independent with variance `2/inputs` (He) before a
    relu, and `2/(inputs + outputs)` (Glorot) otherwise: signals neither vanish nor explode at the start.

    Args:
        outputs: how many numbers come out.
        activation: a; one of "identity", "relu", "sigmoid", "softplus", "tanh".

    References: X. Glorot, Y. Bengio, AISTATS 2010; K. He et al., ICCV 2015.

    Example:
        >>> layer = Dense(10)
        >>> parameters, shape = layer.init(jr.key(0), (28, 28, 1))
        >>> parameters["weight"].shape, shape, layer(parameters, jnp.ones((3, 28, 28, 1))).shape
        ((784, 10), (10,), (3, 10))
    """

    outputs: int = eqx.field(static=True)
    activation: str = eqx.field(static=True, default="identity")

    def __check_init__(self) -> None:
        check_count("the width of a layer", self.outputs)
        check_choice("the activation", self.activation, _ACTIVATIONS)

    def init(self, key: jax.Array, input_shape: Shape) -> tuple[PyTree, Shape]:
        inputs = int(np.prod(input_shape))
        variance = 2 / inputs if self.activation == "relu" else 2 / (inputs + self.outputs)
        weight = variance**0.5 * jr.normal(key, (inputs, self.outputs))
        return {"weight": weight, "bias": jnp.zeros(self.outputs)}, (self.outputs,)

    def __call__(self, parameters: PyTree, inputs: jax.Array) -> jax.Array:
        flat = inputs.reshape(inputs.shape[0], -1)
        return _ACTIVATIONS[self.activation](flat @ parameters["weight"] + parameters["bias"])


class Chain(Model):
    """Models one after another. Parameters: a tuple with those of every model."""

    models: tuple[Model, ...]

    def init(self, key: jax.Array, input_shape: Shape) -> tuple[PyTree, Shape]:
        parameters, shape = [], input_shape
        for model, own_key in zip(self.models, jr.split(key, len(self.models)), strict=True):
            own, shape = model.init(own_key, shape)
            parameters.append(own)
        return tuple(parameters), shape

    def __call__(self, parameters: PyTree, inputs: jax.Array) -> jax.Array:
        for model, own in zip(self.models, parameters, strict=True):
            inputs = model(own, inputs)
        return inputs


def MLP(sizes: Sequence[int], activation: str = "relu", output_activation: str = "identity") -> Chain:
    """A multilayer perceptron: `Dense` layers of these widths.

    Args:
        sizes: widths of the layers, the last one included.
        activation: after every layer but the last.
        output_activation: after the last: "identity" for a classifier; for a backbone, whose head
            follows, the same as `activation`.

    Example:
        >>> backbone = MLP((200,), output_activation="relu")
        >>> parameters, shape = backbone.init(jr.key(0), (28, 28, 1))
        >>> sum(leaf.size for leaf in jax.tree.leaves(parameters)), shape
        (157000, (200,))
    """
    if not sizes:
        raise ValueError("sizes is empty; give the width of every layer, for example (200, 10)")
    kinds = [activation] * (len(sizes) - 1) + [output_activation]
    return Chain(tuple(Dense(width, kind) for width, kind in zip(sizes, kinds, strict=True)))


def Linear(outputs: int) -> Dense:
    """A linear head: one `Dense` layer without activation."""
    return Dense(outputs)
