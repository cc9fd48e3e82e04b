"""Sub-models: which kernels of a network a client holds, and what they cost.

A client that cannot train a whole model holds some of the kernels (output channels) of every layer. What it
lacks is zero: the kernel, what is added to and multiplied with its output, and what the next layer makes of
that. So a sub-model is the whole model times a mask, which every client can have another one of under `vmap`;
`extract` makes the small model of it, with the same outputs.

Kernels that must be held together, such as those of layers whose outputs are added, have one name.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from fedbilevel.number import known_number
from fedbilevel.problem.base import ProblemError
from fedbilevel.problem.model import Model, Shape
from fedbilevel.tree import PyTree

Keep: TypeAlias = Sequence[Any]
"""For every name a vector with one number for each of its kernels: 1 if it is held, 0 if not."""

LEVELS = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""The width ratios that clients have in the papers' experiments."""

WHOLE = "."
"""The name of an axis that every sub-model holds whole: pixels of a kernel, colours of an image, classes."""


class Sliceable(Model):
    """A model that says which axes of its parameters belong to which kernels."""

    @abc.abstractmethod
    def axes(self) -> PyTree:
        """Like the parameters; a leaf is the names of its axes, such as `". . image stem"`.

        `"."` is an axis that is always held whole. An axis that is t times as long as there are kernels of
        its name is t copies, one after another: a flattened image.
        """

    @abc.abstractmethod
    def uses(self, input_shape: Shape) -> PyTree:
        """Like the parameters; how often one sample uses each weight: the pixels of a convolution's output.

        0 for what is not counted as arithmetic, as is usual: biases and normalisations.
        """


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels of a model: their names, and the axes of the parameters that belong to them.

    Attributes:
        names: of the kernels that are chosen together.
        sizes: how many of each there are.
        shapes, itemsizes: of the leaves of the parameters.
        axes: for every leaf and axis the place of its name in `names`; None: held whole.
        uses: for every leaf, how often a sample uses each number; () if not known.

    Example:
        >>> from fedbilevel.problem.cnn4 import FourLayerCNN
        >>> model = FourLayerCNN(filters=4)
        >>> shapes = jax.eval_shape(lambda key: model.init(key, (28, 28, 1))[0], jax.random.key(0))
        >>> kernels = Kernels.of(model, shapes, (28, 28, 1))
        >>> kernels.names, kernels.counts(0.5)
        (('fourth', 'first', 'second', 'third'), (2, 2, 2, 2))
        >>> kernels.cost(0.5)
        {'parameters': 204, 'bytes': 816, 'flops': 46152}
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    shapes: tuple[Shape, ...]
    itemsizes: tuple[int, ...]
    axes: tuple[tuple[int | None, ...], ...]
    uses: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: Sliceable, parameters: PyTree, input_shape: Shape | None = None) -> Kernels:
        """The kernels of a model with these parameters; with the shape of a sample it can tell FLOPs, too."""
        leaves, spots = jax.tree.leaves(parameters), [text.split() for text in jax.tree.leaves(model.axes())]
        shapes = tuple(tuple(int(n) for n in jnp.shape(leaf)) for leaf in leaves)
        if [len(shape) for shape in shapes] != [len(spot) for spot in spots]:
            raise ProblemError(
                f"{type(model).__name__} names the axes {spots}, but the parameters have the shapes "
                f"{shapes}: they are not those of this model"
            )
        named = [
            (name, n)
            for spot, shape in zip(spots, shapes, strict=True)
            for name, n in zip(spot, shape, strict=True)
        ]
        names = tuple(dict.fromkeys(name for name, _ in named if name != WHOLE))
        # The axis of a flattened image is longer; the kernels themselves are the shortest.
        sizes = tuple(min(n for own, n in named if own == name) for name in names)
        axes = tuple(tuple(None if name == WHOLE else names.index(name) for name in spot) for spot in spots)
        uses = () if input_shape is None else tuple(jax.tree.leaves(model.uses(input_shape)))
        return cls(names, sizes, shapes, tuple(jnp.result_type(leaf).itemsize for leaf in leaves), axes, uses)

    def counts(self, ratio: float) -> tuple[int, ...]:
        """How many kernels of each name a sub-model of this width holds: at least one, rounded up."""
        return tuple(held(size, ratio) for size in self.sizes)

    def leading(self, ratio: float) -> tuple[jax.Array, ...]:
        """The first kernels of every name."""
        return tuple(jnp.arange(n) < k for n, k in zip(self.sizes, self.counts(ratio), strict=True))

    def mask(self, parameters: PyTree, keep: Keep) -> PyTree:
        """Like the parameters: the product of `keep` over the axes of every number; soft if `keep` is."""
        leaves, structure = jax.tree.flatten(parameters)
        masks = [self._mask(place, leaf, keep) for place, leaf in enumerate(leaves)]
        return jax.tree.unflatten(structure, masks)

    def _mask(self, place: int, leaf: Any, keep: Keep) -> jax.Array:
        shape, whole = self.shapes[place], jnp.ones((), jnp.result_type(leaf))
        for axis, name in enumerate(self.axes[place]):
            if name is not None:
                copies = jnp.tile(jnp.asarray(keep[name], whole.dtype), shape[axis] // self.sizes[name])
                whole = whole * copies.reshape(-1, *(1,) * (len(shape) - axis - 1))
        return jnp.broadcast_to(whole, shape)

    def extract(self, parameters: PyTree, keep: Keep) -> PyTree:
        """The parameters of the small model; `keep` must be known, since it decides their shapes."""
        return self.gather(parameters, [np.flatnonzero(np.asarray(own)) for own in keep])

    def gather(self, parameters: PyTree, places: Sequence[Any]) -> PyTree:
        """The parameters of the small model with the kernels at these places of every name."""
        leaves, structure = jax.tree.flatten(parameters)
        for number, leaf in enumerate(leaves):
            for axis, spots in self._spots(number, places):
                leaf = jnp.take(leaf, spots, axis)
            leaves[number] = leaf
        return jax.tree.unflatten(structure, leaves)

    def scatter(self, small: PyTree, places: Sequence[Any]) -> PyTree:
        """The numbers of a small model at their places in the whole one, and zeros elsewhere."""
        leaves, structure = jax.tree.flatten(small)
        for number, leaf in enumerate(leaves):
            for axis, spots in self._spots(number, places):
                whole = jnp.zeros((*leaf.shape[:axis], self.shapes[number][axis], *leaf.shape[axis + 1 :]))
                leaf = whole.astype(leaf.dtype).at[(slice(None),) * axis + (spots,)].set(leaf)
            leaves[number] = leaf
        return jax.tree.unflatten(structure, leaves)

    def _spots(self, number: int, places: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """The axes of a leaf that are not held whole, and where on each of them the kernels are."""
        for axis, name in enumerate(self.axes[number]):
            if name is not None:
                size = self.sizes[name]
                starts = size * np.arange(self.shapes[number][axis] // size)
                yield axis, (starts[:, None] + jnp.asarray(places[name])).ravel()

    def cost(self, keep: Keep | float) -> dict[str, Any]:
        """What a sub-model costs; it depends on how many kernels are held, and not on which.

        Args:
            keep: the kernels, or the width ratio ρ, that is, the first ones of every layer. Soft kernels
                count as much as they are held.

        Returns:
            `parameters`, their `bytes`, and, if the shape of a sample is known, the `flops` of one sample
            forward: two for each use of a weight in a convolution or dense layer.
        """
        soft = not isinstance(keep, int | float)
        counts = [jnp.sum(own) for own in keep] if soft else self.counts(keep)  # type: ignore[arg-type, union-attr]
        numbers = self.numbers(counts)
        total = {
            "parameters": sum(numbers),
            "bytes": sum(n * size for n, size in zip(numbers, self.itemsizes, strict=True)),
        }
        if self.uses:
            total["flops"] = 2 * sum(n * times for n, times in zip(numbers, self.uses, strict=True))
        return total

    def numbers(self, counts: Sequence[Any]) -> list[Any]:
        """How many numbers of every leaf are held, if so many kernels of each name are."""

        def of_axis(n: int, name: int | None) -> Any:
            return n if name is None else counts[name] * (n // self.sizes[name])

        pairs = (zip(shape, axes, strict=True) for shape, axes in zip(self.shapes, self.axes, strict=True))
        return [math.prod(of_axis(n, name) for n, name in pair) for pair in pairs]


def held(size: int, ratio: float) -> int:
    """How many of `size` kernels a ratio of them is: rounded up, so at least one."""
    if not 0 < ratio <= 1:
        raise ValueError(f"a width ratio is {ratio!r}; it must be above 0 and at most 1")
    # Rounded first: 0.07 of 100 kernels are 7, though the product is a little more.
    return max(1, math.ceil(round(ratio * size, 6)))


Ratios: TypeAlias = float | tuple[float, ...] | str
"""Width ratios of clients: one for all, one for each, or "random": each is drawn from `LEVELS`."""


def own_ratio(ratios: Ratios, id: Any, seed: int) -> tuple[tuple[float, ...], Any]:
    """The width ratio of a client: a table of ratios, and its place in the table, perhaps traced."""
    if isinstance(ratios, str):
        return LEVELS, jr.randint(jr.fold_in(jr.key(seed), id), (), 0, len(LEVELS))
    return (ratios, id) if isinstance(ratios, tuple) else ((float(ratios),), 0)


def widths(ratios: Ratios, clients: int, seed: int = 0) -> tuple[float, ...]:
    """One width ratio for each client.

    Args:
        ratios: one for all clients, one for each of them, or "random".
        clients: how many there are.
        seed: draws them.

    Example:
        >>> widths(0.5, 2), widths((1.0, 0.25), 2)
        ((0.5, 0.5), (1.0, 0.25))
    """
    if isinstance(ratios, tuple) and len(ratios) != clients:
        raise ValueError(f"ratios has {len(ratios)} numbers, but there are {clients} clients: one for each")
    with jax.ensure_compile_time_eval():  # a setting, known before anything runs
        pairs = [own_ratio(ratios, id, seed) for id in range(clients)]
        return tuple(float(table[int(place)]) for table, place in pairs)


def described(kernels: Kernels, ratios: Sequence[float]) -> tuple[str, ...]:
    """A line for each width that clients have: how many have it, and what their models cost."""
    return tuple(_line(kernels, own, list(ratios).count(own)) for own in sorted(set(ratios), reverse=True))


def _line(kernels: Kernels, ratio: float, clients: int) -> str:
    cost = kernels.cost(ratio)
    flops = f", {cost['flops'] / 1e6:,.3g} MFLOPs a sample" if "flops" in cost else ""
    numbers = f"{cost['parameters']:,} parameters, {cost['bytes'] / 1e6:,.3g} MB{flops}"
    return f"width {ratio:g}, {clients} clients: {numbers}"


def ratios_setting(value: Any) -> Any:
    """Width ratios as a setting: checked, and a list as a tuple."""
    if isinstance(value, str) and value == "random":
        return value
    several = isinstance(value, list | tuple | np.ndarray) and np.ndim(value) == 1
    numbers = [known_number(own) for own in (value if several else (value,))]
    if None in numbers:
        raise ValueError(f'ratios is {value!r}; it must be numbers of at most 1, or "random"')
    for ratio in numbers:
        held(1, ratio)  # type: ignore[arg-type]
    return tuple(numbers) if several else numbers[0]


def kernels_in(problem: Any, input_shape: Shape | None = None) -> Kernels:
    """The kernels of the model that a problem's y holds, found in its objectives."""
    found = jax.tree.leaves(problem.upper, is_leaf=lambda part: isinstance(part, Sliceable))
    models = [part for part in found if isinstance(part, Sliceable)]
    if not models:
        raise ProblemError(
            "no model that can be sliced was found in the upper objective of the problem. Use one such as "
            "fedbilevel.ResNet18 in a problem of this library, or say which kernels its parameters have: "
            "kernels=Kernels.of(model, parameters)"
        )
    return Kernels.of(models[0], problem.y0, input_shape)
