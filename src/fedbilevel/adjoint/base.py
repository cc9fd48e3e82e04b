"""Adjoints: solve `H u = ∇_y f` from products `H v` alone.

The same objects work globally, where a product is an exchange with the clients, and locally, where
it is a client's own product: they differ in the `product` and the `loop` they are given.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp

from fedbilevel.tree import PyTree, add, norm, scale, sub

Product: TypeAlias = Callable[[Any, PyTree, PyTree], tuple[PyTree, PyTree]]
"""`(n, v, memo) -> (H v, memo)`: the n-th product of a solve; `memo` is carried along."""

Loop: TypeAlias = Callable[[Any, Callable[[Any, PyTree], PyTree], PyTree], PyTree]
"""`(times, body, carry) -> carry`: `fed.loop` on the server, `repeat` in a local program."""


GROWTH = 1 + 1e-3
"""A term that grows by more than rounding explains belongs to a series that cannot converge."""


class Solved(NamedTuple):
    """The adjoint and what was learnt on the way.

    Attributes:
        u: the approximate solution, like y.
        memo: what the products carried.
        report: scalars that tell whether the solve can be trusted (`adjoint_growth` above 1: the
            series cannot converge; `adjoint_curvature` not above 0: H is not positive definite).
    """

    u: PyTree
    memo: PyTree
    report: dict[str, jax.Array]


class Adjoint(eqx.Module):
    """A way to solve `(H + damping·I) u = b`."""

    @property
    @abc.abstractmethod
    def damping(self) -> Any:
        """Added to the diagonal of H."""

    @abc.abstractmethod
    def solve(self, product: Product, b: PyTree, memo: PyTree, key: jax.Array, loop: Loop) -> Solved:
        """Solve from products `H v`; `key` serves methods that draw their number of terms."""

    @property
    @abc.abstractmethod
    def one_operator(self) -> bool:
        """Whether all products of a solve must be with one symmetric H (one cohort, one batch)."""


def failed(report: dict[str, jax.Array]) -> jax.Array:
    """Whether a solve's report says that it cannot be trusted."""
    growth = report.get("adjoint_growth", jnp.zeros(()))
    return (growth > GROWTH) | (report.get("adjoint_curvature", jnp.ones(())) <= 0)


def relative_residual(hu: PyTree, b: PyTree) -> jax.Array:
    """`‖H u − b‖/‖b‖`; where b is zero, so is the solution, and the residual is the numerator."""
    length = norm(b)
    return norm(sub(hu, b)) / jnp.where(length > 0, length, 1)


def damped(product: Product, damping: Any) -> Product:
    """`v ↦ (H + damping·I) v`: what makes the system solvable when g is not strongly convex."""

    def shifted(index: Any, v: PyTree, memo: PyTree) -> tuple[PyTree, PyTree]:
        hv, memo = product(index, v, memo)
        return add(hv, scale(damping, v)), memo

    return shifted
