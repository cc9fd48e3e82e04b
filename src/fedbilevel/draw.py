"""Random integers and orders that compile fast, and run fast on a CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Key


def below(key: Key[Array, ""], shape: tuple[int, ...], limit: Any) -> Int32[Array, ...]:
    """Integers uniform in `0 .. limit − 1`; int32, of the given shape (`limit` broadcasts).

    One 32-bit word each, reduced modulo `limit`: a probability is off by at most `limit/2³²` of
    itself. `jax.random.randint` draws twice, and drawing is most of what a small step compiles.
    """
    words = jax.random.bits(key, shape, jnp.uint32)
    return (words % jnp.asarray(limit).astype(jnp.uint32)).astype(jnp.int32)


_RANDOM_BITS = 20
"""At least so many make an order. Numbers with equal ones stay in their order: of 4,095 eight pairs or so."""


def shuffled(key: Key[Array, ""], size: int, count: Any) -> Int32[Array, " {size}"]:
    """The numbers `0 .. size − 1`: those below `count` in a random order, then the others in theirs.

    Words whose low bits are the number itself are sorted, which is several times faster than to sort numbers
    by words. Where too few bits would stay random, numbers are sorted by words.
    """
    numbers, bits = jnp.arange(size, dtype=jnp.uint32), size.bit_length()
    drawn = jax.random.bits(key, (size,), jnp.uint32)
    words = jnp.where(numbers < jnp.asarray(count).astype(jnp.uint32), drawn, jnp.uint32(0xFFFFFFFF))
    if 32 - bits < _RANDOM_BITS:
        return jnp.argsort(words).astype(jnp.int32)
    low = jnp.uint32((1 << bits) - 1)
    return (jnp.sort((words & ~low) | numbers) & low).astype(jnp.int32)
