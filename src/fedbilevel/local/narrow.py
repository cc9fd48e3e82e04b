"""The small model itself, in the place of the whole one times a mask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from fedbilevel.fed.loop import branch
from fedbilevel.problem.submodel import Keep, Kernels
from fedbilevel.tree import PyTree


class Narrow(eqx.Module):
    """The kernels that a client holds, as a small model to compute with.

    Shapes must be known beforehand, so there is one branch of the program for every width. A client that is
    computed by itself runs its own branch only, with about ρ² of the arithmetic of the whole model. Under
    `vmap` all branches are computed for everybody, and a mask is quicker.

    The model must take its widths from its parameters, as those of this library do.

    Attributes:
        kernels: of the whole model.
        keep: the kernels that are held, as many as the client's width says.
        ratios: the widths that there are.
        place: where in `ratios` the client's is; may be traced.
    """

    kernels: Kernels = eqx.field(static=True)
    keep: Keep
    ratios: tuple[float, ...] = eqx.field(static=True)
    place: Any

    def small(self, compute: Callable[[PyTree], PyTree], y: PyTree) -> PyTree:
        """`compute(the small model of y)`, whose result has one form for all widths."""
        return self._at_own_width(lambda places: compute(self.kernels.gather(y, places)))

    def trained(self, compute: Callable[[PyTree], PyTree], y: PyTree) -> PyTree:
        """What `compute` makes of the small model of y, as a part of the whole one: zeros elsewhere."""
        gather, scatter = self.kernels.gather, self.kernels.scatter
        return self._at_own_width(lambda places: scatter(compute(gather(y, places)), places))

    def _at_own_width(self, compute: Callable[[list[Any]], PyTree]) -> PyTree:
        levels = sorted(set(self.ratios))
        level = jnp.asarray([levels.index(ratio) for ratio in self.ratios])[self.place]
        return branch(level, [functools.partial(self._at, compute, ratio) for ratio in levels])

    def _at(self, compute: Callable[[list[Any]], PyTree], ratio: float) -> PyTree:
        counts = self.kernels.counts(ratio)
        pairs = zip(self.keep, counts, strict=True)
        return compute([jnp.nonzero(own, size=number)[0] for own, number in pairs])
