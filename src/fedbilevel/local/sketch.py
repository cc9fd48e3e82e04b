"""Random linear maps `S: R^d → R^p` that everybody makes from one agreed number, the seed.

All are scaled so that `E‖Sθ‖² = (p/d)‖θ‖²`. None needs a matrix of `p·d` entries in memory.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from fedbilevel.number import check_count, whole
from fedbilevel.tree import PyTree

_BLOCK = 2**20
"""How many entries of a matrix are drawn at a time: 4 MiB."""


class Operator(NamedTuple):
    """A linear map and its transpose, as functions.

    Example:
        >>> import jax.numpy as jnp
        >>> matrix = jnp.arange(6.0).reshape(2, 3)
        >>> Operator.of(matrix).T.forward(jnp.ones(2)).tolist()
        [3.0, 5.0, 7.0]
    """

    forward: Callable[[jax.Array], jax.Array]
    adjoint: Callable[[jax.Array], jax.Array]

    @classmethod
    def of(cls, matrix: Float[Array, "p d"]) -> Operator:
        """That of a matrix."""
        return cls(lambda theta: matrix @ theta, lambda omega: omega @ matrix)

    @property
    def T(self) -> Operator:
        """The transpose."""
        return Operator(self.adjoint, self.forward)

    def only(self, mask: Any) -> Operator:
        """`S_A`: the map with all columns outside of the mask set to zero."""
        return Operator(
            lambda theta: self.forward(jnp.where(mask, theta, 0)),
            lambda omega: jnp.where(mask, self.adjoint(omega), 0),
        )


class Sketch(eqx.Module):
    """A random linear map `S: R^d → R^p`, the same wherever it is made from the same seed.

    Attributes:
        size: p.
        seed: an integer.

    All methods take an `id`: None for the map that everybody shares, a client's number for its own.
    `stored` is what `stored(d)` returns.
    """

    size: eqx.AbstractVar[int]
    seed: eqx.AbstractVar[int]

    def __check_init__(self) -> None:
        check_count("size", self.size)
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed!r}; it must be a whole number from 0 to 2³² − 1")

    @abc.abstractmethod
    def stored(self, d: int, dtype: Any = jnp.float32, id: Any = None) -> PyTree:
        """The arrays that are kept between two products, for vectors of that dtype; () if there are none."""

    @abc.abstractmethod
    def apply(self, theta: Float[Array, " d"], stored: PyTree, id: Any = None) -> Float[Array, " p"]:
        """`Sθ`."""

    @abc.abstractmethod
    def adjoint(
        self, omega: Float[Array, " p"], d: int, stored: PyTree, id: Any = None
    ) -> Float[Array, " d"]:
        """`Sᵀω`."""

    @abc.abstractmethod
    def norm_squared(self, d: int, stored: PyTree, dtype: Any = jnp.float32, id: Any = None) -> jax.Array:
        """`‖S‖²`, the largest eigenvalue of `SSᵀ`: a scalar."""

    def operator(self, d: int, stored: PyTree, id: Any = None) -> Operator:
        """S with its dimension and arrays filled in."""
        return Operator(
            lambda theta: self.apply(theta, stored, id),
            lambda omega: self.adjoint(omega, d, stored, id),
        )

    def key(self, id: Any = None) -> jax.Array:
        """What all entries are drawn from."""
        key = jr.key(self.seed)
        return key if id is None else jr.fold_in(key, id)

    def check(self, d: int) -> None:
        """Raise an error that explains unless S maps to fewer dimensions, or as many."""
        if self.size > d:
            raise ValueError(
                f"a sketch of size {self.size} of a vector of {d} numbers would be larger than the vector; "
                f"give a size of at most {d}"
            )

    def by_power_iteration(self, d: int, stored: PyTree, dtype: Any, id: Any) -> jax.Array:
        """`‖S‖²` from products alone."""
        start = jr.normal(jr.key(0), (self.size,), dtype)
        return power_iteration(self.operator(d, stored, id), start)


def power_iteration(operator: Operator, start: Float[Array, " p"], iterations: int = 30) -> jax.Array:
    """`‖S‖²` from below: `‖Sᵀv‖²` for the unit vector v that so many products with `SSᵀ` lead to.

    At the edge of a random matrix's spectrum 30 iterations leave an error of a few per cent.
    """

    def advance(_: Any, v: jax.Array) -> jax.Array:
        return operator.forward(operator.adjoint(v / jnp.linalg.norm(v)))

    v = jax.lax.fori_loop(0, iterations, advance, start)
    return jnp.sum(operator.adjoint(v / jnp.linalg.norm(v)) ** 2)


class Gaussian(Sketch):
    """A dense matrix with independent entries `N(0, 1/d)`; `‖S‖² ≈ (1 + √(p/d))²`.

    Row r is drawn, in float32, from the key `(seed, r)`, so that any block of rows can be made at any time.
    A matrix that does not fit into `memory` is made anew, block by block, in every product: little
    memory, much time (about p·d draws a product).

    Args:
        size: p.
        seed: of all entries.
        memory: bytes that may be kept; the matrix takes `p·d` times the vectors' itemsize.
    """

    size: int = eqx.field(static=True, converter=whole)
    seed: int = eqx.field(static=True, converter=whole, default=0)
    memory: int = eqx.field(static=True, converter=whole, default=2**30)

    def stored(self, d: int, dtype: Any = jnp.float32, id: Any = None) -> PyTree:
        self.check(d)
        if self.size * d * jnp.dtype(dtype).itemsize > self.memory:
            return ()
        blocks, count = self._blocks(d)

        def fill(block: Any, matrix: jax.Array) -> jax.Array:
            # The last block may begin early: it writes the same entries again.
            first = jnp.minimum(block * count, self.size - count)
            rows = self._rows(first, count, d, id).astype(dtype)
            return jax.lax.dynamic_update_slice_in_dim(matrix, rows, first, 0)

        return jax.lax.fori_loop(0, blocks, fill, jnp.zeros((self.size, d), dtype))

    def apply(self, theta: Float[Array, " d"], stored: PyTree, id: Any = None) -> Float[Array, " p"]:
        if not isinstance(stored, tuple):
            return stored @ theta
        blocks, count = self._blocks(theta.size)

        def product(block: jax.Array) -> jax.Array:
            return self._rows(block * count, count, theta.size, id).astype(theta.dtype) @ theta

        return jax.lax.map(product, jnp.arange(blocks)).reshape(-1)[: self.size]

    def adjoint(
        self, omega: Float[Array, " p"], d: int, stored: PyTree, id: Any = None
    ) -> Float[Array, " d"]:
        if not isinstance(stored, tuple):
            return omega @ stored
        blocks, count = self._blocks(d)
        parts = jnp.pad(omega, (0, blocks * count - self.size)).reshape(blocks, count)

        def grow(block: Any, total: jax.Array) -> jax.Array:
            return total + parts[block] @ self._rows(block * count, count, d, id).astype(omega.dtype)

        return jax.lax.fori_loop(0, blocks, grow, jnp.zeros(d, omega.dtype))

    def norm_squared(self, d: int, stored: PyTree, dtype: Any = jnp.float32, id: Any = None) -> jax.Array:
        """`‖S‖²` by power iteration, or where products are dear its limit `(1 + √(p/d))²` for large d."""
        if isinstance(stored, tuple):
            return jnp.asarray((1 + math.sqrt(self.size / d)) ** 2, dtype)
        return self.by_power_iteration(d, stored, dtype, id)

    def _blocks(self, d: int) -> tuple[int, int]:
        """How many blocks there are, and how many rows each has."""
        count = min(self.size, max(1, _BLOCK // d))
        return -(-self.size // count), count

    def _rows(self, first: Any, count: int, d: int, id: Any) -> jax.Array:
        """`(count, d)`: so many rows of S."""
        key = self.key(id)

        def row(index: jax.Array) -> jax.Array:
            return jr.normal(jr.fold_in(key, index), (d,), jnp.float32)

        return jax.vmap(row)(first + jnp.arange(count)) / math.sqrt(d)


class SRHT(Sketch):
    """Subsampled randomised Hadamard transform: `S = P H Σ/√d`, in `O(d log d)`.

    Σ has random signs, H is the Hadamard matrix (entries ±1) of d rounded up to a power of two, D, and P
    picks p of its rows without repetition. Where d = D the rows are orthogonal: `SSᵀ = I`; otherwise, with p
    near d, they may depend on each other, and not every ω is an Sθ. Kept: d signs and p places.

    Reference: N. Ailon, B. Chazelle, The fast Johnson–Lindenstrauss transform, SIAM J. Comput. 39, 2009;
    J. A. Tropp, Improved analysis of the subsampled randomized Hadamard transform, 2011.
    """

    size: int = eqx.field(static=True, converter=whole)
    seed: int = eqx.field(static=True, converter=whole, default=0)

    def stored(self, d: int, dtype: Any = jnp.float32, id: Any = None) -> PyTree:
        self.check(d)
        k_signs, k_rows = jr.split(self.key(id))
        signs = jr.rademacher(k_signs, (d,), jnp.int8)
        return signs, jr.choice(k_rows, _power_of_two(d), (self.size,), replace=False).astype(jnp.int32)

    def apply(self, theta: Float[Array, " d"], stored: PyTree, id: Any = None) -> Float[Array, " p"]:
        (signs, rows), d = stored, theta.size
        padded = jnp.pad(signs * theta, (0, _power_of_two(d) - d))
        return walsh_hadamard(padded)[rows] / math.sqrt(d)

    def adjoint(
        self, omega: Float[Array, " p"], d: int, stored: PyTree, id: Any = None
    ) -> Float[Array, " d"]:
        signs, rows = stored
        spread = jnp.zeros(_power_of_two(d), omega.dtype).at[rows].set(omega)
        return signs * walsh_hadamard(spread)[:d] / math.sqrt(d)

    def norm_squared(self, d: int, stored: PyTree, dtype: Any = jnp.float32, id: Any = None) -> jax.Array:
        return self.by_power_iteration(d, stored, dtype, id)


def walsh_hadamard(vector: Float[Array, " D"]) -> Float[Array, " D"]:
    """`Hv` with the Hadamard matrix of entries ±1; D must be a power of two.

    Example:
        >>> import jax.numpy as jnp
        >>> walsh_hadamard(jnp.array([1.0, 2.0, 3.0, 4.0])).tolist()
        [10.0, -2.0, -4.0, 0.0]
    """
    size, half = vector.size, 1
    while half < size:
        pairs = vector.reshape(-1, 2, half)
        vector = jnp.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
        half *= 2
    return vector.reshape(size)


def _power_of_two(d: int) -> int:
    """d rounded up to a power of two."""
    return 1 << (d - 1).bit_length()
