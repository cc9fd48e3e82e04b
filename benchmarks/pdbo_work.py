"""The matrix products that an outer step of PDBO on the `TwoLayerCNN` cannot do without: how many, how fast.

A convolution is a product too, of what the kernel sees at every place. No step that makes all of these
products can be faster than they are by themselves, one after another in their own shapes, with nothing in
between: no pooling, no steps on weights, no exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.random as jr
from timing import Compute, best_seconds

CLASSES, SAMPLES = 62, 32


class Layer(NamedTuple):
    """A matrix of weights, the places at which each sample is multiplied by it, and how often it is.

    Attributes:
        places: rows for one sample.
        inputs, outputs: of the matrix.
        in_gradient: products forth, back to the weights, back to the inputs, in a gradient.
        in_term: likewise in two products with the Hessian, of which each needs two for every one of a
            gradient's. The network forth, and back to the inputs of the layers above the second, they share.
    """

    places: int
    inputs: int
    outputs: int
    in_gradient: tuple[int, int, int] = (1, 1, 1)
    in_term: tuple[int, int, int] = (5, 4, 5)

    @property
    def flops(self) -> int:
        """Of one product on a batch."""
        return 2 * SAMPLES * self.places * self.inputs * self.outputs


LAYERS = (
    Layer(24**2, 25, 32, (1, 1, 0), (3, 2, 0)),  # images do not change: one forth and one back for a vector
    Layer(8**2, 25 * 32, 64, in_term=(5, 4, 4)),  # nobody asks how g changes with the first layer's slope
    Layer(1, 1024, 2048),
    Layer(1, 2048, CLASSES),
)


def counts(layer: Layer, lower_steps: int, terms: int) -> Iterator[int]:
    """How often a node multiplies forth, back to weights and back to inputs in an outer step."""
    for gradient, term in zip(layer.in_gradient, layer.in_term, strict=True):
        yield (lower_steps + 1) * gradient + terms * term


def needed(nodes: int, lower_steps: int, terms: int) -> int:
    """FLOPs of the matrix products of an outer step, all nodes together."""
    return nodes * sum(layer.flops * sum(counts(layer, lower_steps, terms)) for layer in LAYERS)


def seconds_alone(nodes: int, lower_steps: int, terms: int) -> float:
    """How long these products take by themselves: the best time of each kind, times how often it is made."""
    total = 0.0
    for layer in LAYERS:
        best = best_seconds({str(kind): product(layer, kind, nodes) for kind in range(3)})
        total += sum(
            times * seconds
            for times, seconds in zip(counts(layer, lower_steps, terms), best.values(), strict=True)
        )
    return total


def product(layer: Layer, kind: int, nodes: int) -> Compute:
    """One product forth (0), back to weights (1) or back to inputs (2), for each of the nodes in turn."""
    rows = SAMPLES * layer.places
    shapes = (rows, layer.inputs), (layer.inputs, layer.outputs), (rows, layer.outputs)
    seen, weights, slope = (jr.normal(jr.key(i), (nodes, *shape)) for i, shape in enumerate(shapes))
    multiply, arguments = (
        (lambda seen, weights: seen @ weights, (seen, weights)),
        (lambda seen, slope: seen.T @ slope, (seen, slope)),
        (lambda slope, weights: slope @ weights.T, (slope, weights)),
    )[kind]
    every = jax.jit(lambda *own: jax.lax.map(_read(multiply), own))
    return lambda: every(*arguments)


def _read(multiply: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """One number of a product, all of which is computed: what a loop returns is copied, which takes time."""
    return lambda own: jax.lax.optimization_barrier(multiply(*own))[0, 0]
