"""Hashing: every entry of a vector goes, with a random sign, to a few places of a small table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int8, Int32

from fedbilevel.draw import below
from fedbilevel.local.sketch import Sketch
from fedbilevel.number import check_count, whole
from fedbilevel.tree import PyTree


class Hashes(NamedTuple):
    """Where every entry goes: one place in each of s parts of a flat table, with a sign."""

    places: Int32[Array, "s d"]
    signs: Int8[Array, "s d"]

    @classmethod
    def draw(cls, key: jax.Array, d: int, bounds: Sequence[int]) -> Hashes:
        """For d entries; part j of the table is `bounds[j] .. bounds[j + 1] − 1`."""
        k_places, k_signs = jr.split(key)
        starts, shape = jnp.asarray(bounds, jnp.int32), (len(bounds) - 1, d)
        places = starts[:-1, None] + below(k_places, shape, jnp.diff(starts)[:, None])
        return cls(places, jr.rademacher(k_signs, shape, jnp.int8))

    def sums(self, vector: Float[Array, " d"], size: int) -> Float[Array, " size"]:
        """The table: at every place the signed sum of what goes there."""
        return jnp.zeros(size, vector.dtype).at[self.places].add(self.signs * vector)

    def read(self, table: Float[Array, " size"]) -> Float[Array, "s d"]:
        """What the table has at the places of every entry, with the signs taken back."""
        return self.signs * table[self.places]


class SparseJL(Sketch):
    """A sparse matrix: every column has s entries `±√(p/(d s))`, one in each of s blocks of rows.

    A product takes `O(d s)`. Kept: d·s places and signs.

    Args:
        size: p.
        seed: of places and signs.
        nonzeros: s.

    Reference: D. M. Kane, J. Nelson, Sparser Johnson–Lindenstrauss transforms, J. ACM 61, 2014.
    """

    size: int = eqx.field(static=True, converter=whole)
    seed: int = eqx.field(static=True, converter=whole, default=0)
    nonzeros: int = eqx.field(static=True, converter=whole, default=4)

    def __check_init__(self) -> None:
        check_count("nonzeros", self.nonzeros)
        if self.nonzeros > self.size:
            raise ValueError(
                f"nonzeros is {self.nonzeros}, but a column has only {self.size} rows; "
                f"give at most {self.size}"
            )

    def stored(self, d: int, dtype: Any = jnp.float32, id: Any = None) -> PyTree:
        self.check(d)
        bounds = [part * self.size // self.nonzeros for part in range(self.nonzeros + 1)]
        return Hashes.draw(self.key(id), d, bounds)

    def apply(self, theta: Float[Array, " d"], stored: PyTree, id: Any = None) -> Float[Array, " p"]:
        return self._entry(theta.size) * Hashes(*stored).sums(theta, self.size)

    def adjoint(
        self, omega: Float[Array, " p"], d: int, stored: PyTree, id: Any = None
    ) -> Float[Array, " d"]:
        return self._entry(d) * jnp.sum(Hashes(*stored).read(omega), axis=0)

    def norm_squared(self, d: int, stored: PyTree, dtype: Any = jnp.float32, id: Any = None) -> jax.Array:
        return self.by_power_iteration(d, stored, dtype, id)

    def _entry(self, d: int) -> float:
        return math.sqrt(self.size / (d * self.nonzeros))


class CountSketch(eqx.Module):
    """A table from which a vector's largest entries can be read: linear, and small.

    Row j of the table has at column c the sum of all `s_j(i) v_i` with `h_j(i) = c`, for random hashes h_j
    and signs s_j. Every row gives an unbiased estimate of every entry, with variance at most `‖v‖²/columns`;
    the median of the rows is rarely far off.

    Args:
        rows: how many independent rows; odd numbers have a median of their own.
        columns: how many sums in each.
        seed: of hashes and signs: tables of one seed add up.

    Example:
        >>> import jax.numpy as jnp
        >>> sketch, vector = CountSketch(rows=3, columns=20), jnp.zeros(100).at[7].set(5.0)
        >>> values, places = sketch.heavy(sketch.sketch(vector), 100, k=1)
        >>> float(values[0]), int(places[0])
        (5.0, 7)

    Reference: M. Charikar, K. Chen, M. Farach-Colton, Finding frequent items in data streams, 2002.
    """

    rows: int = eqx.field(static=True, converter=whole)
    columns: int = eqx.field(static=True, converter=whole)
    seed: int = eqx.field(static=True, converter=whole, default=0)

    def __check_init__(self) -> None:
        check_count("rows", self.rows)
        check_count("columns", self.columns)

    def sketch(self, vector: Float[Array, " d"]) -> Float[Array, "rows columns"]:
        """The table of a vector."""
        sums = self._hashes(vector.size).sums(vector, self.rows * self.columns)
        return sums.reshape(self.rows, self.columns)

    def estimate(self, table: Float[Array, "rows columns"], d: int) -> Float[Array, " d"]:
        """Every entry of the vector of d numbers: the median over the rows."""
        return jnp.median(self._hashes(d).read(table.reshape(-1)), axis=0)

    def heavy(
        self, table: Float[Array, "rows columns"], d: int, k: int
    ) -> tuple[Float[Array, " k"], Int32[Array, " k"]]:
        """The k entries of largest estimated magnitude: values and places, as `TopK` sends them."""
        estimate = self.estimate(table, d)
        _, places = jax.lax.top_k(jnp.abs(estimate), k)
        return estimate[places], places.astype(jnp.int32)

    def _hashes(self, d: int) -> Hashes:
        bounds = range(0, self.rows * self.columns + 1, self.columns)
        return Hashes.draw(jr.key(self.seed), d, bounds)
