"""A small convolutional classifier of four layers, of which clients can hold a part."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.random as jr

from fedbilevel.name import check_choice
from fedbilevel.number import check_count
from fedbilevel.problem.base import ProblemError
from fedbilevel.problem.convolution import image_shape
from fedbilevel.problem.image import pool
from fedbilevel.problem.model import Dense, Shape
from fedbilevel.problem.scaled import NORMS, ScaledConvolution
from fedbilevel.problem.submodel import Sliceable, held
from fedbilevel.tree import PyTree

_SIZES = (3, 3, 3, 2)


class FourLayerCNN(Sliceable):
    """Three convolutions with 3 × 3 kernels and one with 2 × 2, then a linear head on the flattened image.

    The network of FedSep's experiments with compression. The paper gives kernels and, "around 10⁵", the
    number of parameters; the rest is our choice: zeros around the image in the first three layers and none in
    the last (n → n − 1), stride 1, relu, and after the first `pooled` layers the largest of every 2 × 2
    pixels. That is 97,866 parameters for CIFAR-10 (64 kernels, 3 pooled: 32 → 16 → 8 → 4 → 3 pixels), and
    77,034 for MNIST with 32 kernels and 1 pooled (28 → 14 → 14 → 14 → 13).

    Parameters: `{"layers": four of a ScaledConvolution, "head": {"weight", "bias"}}`.

    Args:
        outputs: how many logits come out.
        filters: kernels of every layer.
        pooled: after how many of the first three layers the image is halved.
        width: the share of the kernels that this model has.
        norm: "none", "group" or "batch"; see `ScaledConvolution`.
        scaled: whether a convolution is scaled up by the share of kernels that are not there.

    Reference: J. Li, H. Huang, FedSep, section 5.1.

    Example:
        >>> model = FourLayerCNN(filters=64)
        >>> shapes = jax.eval_shape(lambda key: model.init(key, (32, 32, 3))[0], jr.key(0))
        >>> sum(leaf.size for leaf in jax.tree.leaves(shapes))
        97866
    """

    outputs: int = eqx.field(static=True, default=10)
    filters: int = eqx.field(static=True, default=32)
    pooled: int = eqx.field(static=True, default=3)
    width: float = eqx.field(static=True, default=1.0)
    norm: str = eqx.field(static=True, default="none")
    scaled: bool = eqx.field(static=True, default=True)

    def __check_init__(self) -> None:
        check_count("outputs", self.outputs)
        held(self.filters, self.width)
        check_choice("norm", self.norm, NORMS)
        if self.pooled not in range(4):
            raise ValueError(f"pooled is {self.pooled!r}; it must be 0, 1, 2 or 3: layers with pooling")

    def _layers(self) -> tuple[ScaledConvolution, ...]:
        options = {"width": self.width, "norm": self.norm, "scaled": self.scaled}
        return tuple(ScaledConvolution(self.filters, kernel=size, **options) for size in _SIZES)  # type: ignore[arg-type]

    def _shapes(self, input_shape: Shape) -> list[Shape]:
        """What every layer, and at last the head, gets."""
        shapes: list[Shape] = [image_shape(input_shape, "FourLayerCNN")]
        for place, layer in enumerate(self._layers()):
            height, width = layer.pixels(shapes[-1])
            half = 2 if place < self.pooled else 1
            shapes.append((height // half, width // half, held(self.filters, self.width)))
        if min(shapes[-1]) < 1:
            raise ProblemError(
                f"images of shape {input_shape} are too small for a FourLayerCNN that halves them "
                f"{self.pooled} times: no pixel would be left; take a smaller `pooled`, or larger images"
            )
        return shapes

    def init(self, key: jax.Array, input_shape: Shape) -> tuple[PyTree, Shape]:
        shapes, keys = self._shapes(input_shape), jr.split(key, 5)
        both = zip(self._layers(), keys[:4], shapes[:4], strict=True)
        layers = tuple(layer.init(own, shape)[0] for layer, own, shape in both)
        head, outputs = Dense(self.outputs).init(keys[4], shapes[4])
        return {"layers": layers, "head": head}, outputs

    def __call__(self, parameters: PyTree, inputs: jax.Array) -> jax.Array:
        for place, (layer, own) in enumerate(zip(self._layers(), parameters["layers"], strict=True)):
            z = layer(own, inputs)
            inputs = jax.nn.relu(pool(z) if place < self.pooled else z)
        return Dense(self.outputs)(parameters["head"], inputs)

    def axes(self) -> PyTree:
        names = (".", "first", "second", "third", "fourth")
        layers = [layer.axes(*names[place : place + 2]) for place, layer in enumerate(self._layers())]
        return {"layers": tuple(layers), "head": {"weight": "fourth .", "bias": "."}}

    def uses(self, input_shape: Shape) -> PyTree:
        both = zip(self._layers(), self._shapes(input_shape)[:4], strict=True)
        layers = tuple(layer.uses(shape) for layer, shape in both)
        return {"layers": layers, "head": {"weight": 1, "bias": 0}}
