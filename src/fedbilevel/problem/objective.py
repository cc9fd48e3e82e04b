"""Objectives made of others: the parts of problems with a structure, and objectives on features."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp

from fedbilevel.data.batches import Batch, weighted
from fedbilevel.tree import PyTree, sub

Objective: TypeAlias = Callable[[PyTree, PyTree, PyTree], jax.Array]

# These wrap the user's functions as importable classes, so that they can be named on a wire. How a function
# is evaluated on weighted samples stays its own business.


class Negative(eqx.Module):
    """`−f`."""

    f: Objective

    def __call__(self, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
        return -self.f(x, y, samples)

    def on_weighted(self, x: PyTree, y: PyTree, samples: PyTree, weight: jax.Array) -> jax.Array:
        return -weighted(self.f)(x, y, Batch(samples, weight))


class OfLower(eqx.Module):
    """`(x, y) ↦ f(y)`."""

    f: Callable[[PyTree, PyTree], jax.Array]

    def __call__(self, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
        return self.f(y, samples)

    def on_weighted(self, x: PyTree, y: PyTree, samples: PyTree, weight: jax.Array) -> jax.Array:
        return weighted(self.f)(y, Batch(samples, weight))


class OfUpper(eqx.Module):
    """`(x, y) ↦ f(x)`."""

    f: Callable[[PyTree, PyTree], jax.Array]

    def __call__(self, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
        return self.f(x, samples)

    def on_weighted(self, x: PyTree, y: PyTree, samples: PyTree, weight: jax.Array) -> jax.Array:
        return weighted(self.f)(x, Batch(samples, weight))


class HalfDistance(eqx.Module):
    """`½‖y − r(x)‖²`."""

    r: Callable[[PyTree, PyTree], PyTree]

    def __call__(self, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
        gap = sub(y, self.r(x, samples))
        return jnp.asarray(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gap))) / 2


class Nothing(eqx.Module):
    """`0`: there is no lower level."""

    def __call__(self, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
        return jnp.zeros(())


class Separable(abc.ABC):
    """An objective that sees x and the samples through features alone: `F(x, y, s) = G(y, features(x, s))`.

    Where x stays and y makes many steps, features are computed once for every sample.
    """

    @abc.abstractmethod
    def features(self, x: PyTree, samples: PyTree) -> PyTree:
        """What is needed of x and the samples: a tree with the same leading axis."""

    @abc.abstractmethod
    def on_features(self, y: PyTree, features: PyTree) -> jax.Array:
        """The objective, a mean over the samples."""


class OnFeatures(eqx.Module):
    """A separable objective on samples that are features already."""

    function: Separable

    def __call__(self, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
        return self.function.on_features(y, samples)


def is_mean(function: Any) -> bool:
    """Whether a function is a mean over samples, as most are: it does not say what it is on weighted ones."""
    if isinstance(function, Negative | OfLower | OfUpper):
        return is_mean(function.f)
    return not (hasattr(function, "on_weighted") or isinstance(function, HalfDistance))
