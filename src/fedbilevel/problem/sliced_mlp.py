"""Dense layers, of whose hidden units clients can hold a part: the quickest model that can be sliced."""

from __future__ import annotations

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.number import check_count
from fedbilevel.problem.model import Dense, Shape
from fedbilevel.problem.submodel import WHOLE, Sliceable, held
from fedbilevel.tree import PyTree


class SlicedMLP(Sliceable):
    """Dense layers with relu between them; the kernels of a layer are its hidden units.

    A unit whose weights are all zero is not there, and the sums of the others are divided by the share of
    those that are (HeteroFL's scaler), so that what the next layer gets is as large as from all units.

    Parameters: a tuple with `{"weight": (inputs, units), "bias": (units,)}` of every layer; they start as
    those of `MLP`.

    Args:
        sizes: numbers of hidden units, and at last of outputs.
        width: the share of the hidden units that this model has, rounded up.
        scaled: whether there is a scaler.

    Reference: E. Diao, J. Ding, V. Tarokh, HeteroFL, ICLR 2021.

    Example:
        >>> small = SlicedMLP((64, 10), width=0.25)
        >>> shapes = jax.eval_shape(lambda key: small.init(key, (28, 28, 1))[0], jr.key(0))
        >>> [layer["weight"].shape for layer in shapes]
        [(784, 16), (16, 10)]
    """

    sizes: tuple[int, ...] = eqx.field(static=True, converter=tuple)
    width: float = eqx.field(static=True, default=1.0)
    scaled: bool = eqx.field(static=True, default=True)

    def __check_init__(self) -> None:
        held(1, self.width)
        for count in self.sizes:
            check_count("a number of units", count)
        if len(self.sizes) < 2:
            raise ValueError(f"sizes is {self.sizes}; it must have a hidden layer, and the outputs")

    def init(self, key: jax.Array, input_shape: Shape) -> tuple[PyTree, Shape]:
        *hidden, outputs = self.sizes
        layers = [Dense(held(units, self.width), "relu") for units in hidden] + [Dense(outputs)]
        parameters, shape = [], input_shape
        for layer, own_key in zip(layers, jr.split(key, len(layers)), strict=True):
            own, shape = layer.init(own_key, shape)
            parameters.append(own)
        return tuple(parameters), shape

    def __call__(self, parameters: PyTree, inputs: jax.Array) -> jax.Array:
        z, last = inputs.reshape(inputs.shape[0], -1), len(self.sizes) - 1
        for place, own in enumerate(parameters[:last]):
            z = jax.nn.relu(z @ own["weight"] * self._factor(place, own["weight"]) + own["bias"])
        return z @ parameters[last]["weight"] + parameters[last]["bias"]

    def _factor(self, place: int, weight: jax.Array) -> jax.Array | float:
        """One over the share of a layer's units that are there."""
        if not self.scaled:
            return 1.0
        there = jnp.sum(jnp.any(weight != 0, axis=0))
        return (self.sizes[place] / jnp.maximum(there, 1)).astype(weight.dtype)

    def axes(self) -> PyTree:
        names = (WHOLE, *(f"hidden{place}" for place in range(len(self.sizes) - 1)), WHOLE)
        pairs = itertools.pairwise(names)
        return tuple({"weight": f"{before} {after}", "bias": after} for before, after in pairs)

    def uses(self, input_shape: Shape) -> PyTree:
        return tuple({"weight": 1, "bias": 0} for _ in self.sizes)
