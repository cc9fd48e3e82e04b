"""The extreme eigenvalues of H from products `H v`, by the Lanczos process.

It uses the same products as power iteration and finds both ends of the spectrum at once, in far
fewer of them; all vectors are kept and orthogonalised twice, so no spurious eigenvalue appears.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.adjoint.base import Loop, Product
from fedbilevel.tree import PyTree, dot, norm, scale, step


class Tridiagonal(NamedTuple):
    """The Lanczos matrix: `diagonal (k,)`, `off (k,)` where `off[j]` couples j and j + 1."""

    diagonal: jax.Array
    off: jax.Array


class Spectrum(NamedTuple):
    """Both ends of the spectrum; the true ones lie within `low_error`, `high_error` of an eigenvalue."""

    low: float
    high: float
    low_error: float
    high_error: float


def lanczos(
    product: Product, start: PyTree, memo: PyTree, iterations: int, loop: Loop
) -> tuple[Tridiagonal, PyTree]:
    """`iterations` products from the direction `start`."""
    first = scale(1 / norm(start), start)
    rows = jax.tree.map(lambda leaf: jnp.zeros((iterations, *leaf.shape), leaf.dtype), first)
    numbers = jnp.zeros(iterations, norm(start).dtype)

    def advance(index: Any, carry: Any) -> Any:
        basis, v, diagonal, off, memo = carry
        basis = jax.tree.map(lambda rows, leaf: rows.at[index].set(leaf), basis, v)
        w, memo = product(index, v, memo)
        diagonal = diagonal.at[index].set(dot(v, w))
        w = _orthogonal(basis, _orthogonal(basis, w))
        length = norm(w)
        # A direction of rounding errors only: the space is exhausted, and what follows is ignored.
        exhausted = length <= 100 * jnp.finfo(length.dtype).eps * jnp.max(jnp.abs(diagonal))
        length = jnp.where(exhausted, 0, length)
        v = scale(jnp.where(exhausted, 0, 1 / jnp.where(exhausted, 1, length)), w)
        return basis, v, diagonal, off.at[index].set(length), memo

    _, _, diagonal, off, memo = loop(iterations, advance, (rows, first, numbers, numbers, memo))
    return Tridiagonal(diagonal, off), memo


def spectrum(matrix: Tridiagonal) -> Spectrum:
    """The extreme eigenvalues of H that a Lanczos matrix shows, with their error bounds. On the host."""
    diagonal, off = np.asarray(matrix.diagonal, float), np.asarray(matrix.off, float)
    ends = np.flatnonzero(off == 0)
    size = int(ends[0]) + 1 if ends.size else len(off)
    inner = off[: size - 1]
    values, vectors = np.linalg.eigh(np.diag(diagonal[:size]) + np.diag(inner, 1) + np.diag(inner, -1))
    errors = abs(off[size - 1] * vectors[-1])
    return Spectrum(float(values[0]), float(values[-1]), float(errors[0]), float(errors[-1]))


def _orthogonal(basis: PyTree, w: PyTree) -> PyTree:
    """`w` without its parts along the rows of `basis` (rows of zeros take nothing away)."""
    parts = jax.tree.map(lambda rows, leaf: jnp.tensordot(rows, leaf, axes=leaf.ndim), basis, w)
    sizes = sum(jax.tree.leaves(parts))
    return step(w, 1, jax.tree.map(lambda rows: jnp.tensordot(sizes, rows, axes=1), basis))
