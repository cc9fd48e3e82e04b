"""The largest of many numbers, without a sort, which is slow on a CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Real


def best(scores: Real[Array, " n"], count: Any) -> Bool[Array, " n"]:
    """Which are the `count` largest scores, the first of equals; `count` may be known at run time only.

    A NaN counts as −∞. Cost: a pass over the scores for each of their 32 or 64 bits
    (`benchmarks/selection.py` measures it).

    Example:
        >>> best(jnp.array([1.0, 3.0, 3.0, 2.0]), 1).tolist()
        [False, True, False, False]
    """
    return _chosen(_words(jnp.asarray(scores)), count)


@jax.jit
def _chosen(words: jax.Array, count: Any) -> jax.Array:
    least = _largest_of_rank(words, count)
    above, equal = words > least, words == least
    room = count - jnp.sum(above)
    # Of equals there are seldom more than there is room for, and counting them costs as much as all the rest.
    crowded = jnp.sum(equal) > room
    return above | jax.lax.cond(crowded, lambda: equal & (jnp.cumsum(equal) <= room), lambda: equal)


def _largest_of_rank(words: jax.Array, rank: Any) -> jax.Array:
    """The `rank`-th largest word, bit by bit from the first: a bit is set if so many words reach that far."""
    bits, word = words.dtype.itemsize * 8, words.dtype.type

    def settle(index: jax.Array, known: jax.Array) -> jax.Array:
        higher = known | (word(1) << (bits - 1 - index).astype(words.dtype))
        return jnp.where(jnp.sum(words >= higher) >= rank, higher, known)

    return jax.lax.fori_loop(0, bits, settle, jnp.zeros((), words.dtype))


def _words(scores: jax.Array) -> jax.Array:
    """Unsigned integers in the order of the scores, by their bits: those of negative floats count down."""
    if jnp.issubdtype(scores.dtype, jnp.unsignedinteger):
        return scores
    kind = jnp.dtype(f"uint{scores.dtype.itemsize * 8}")
    sign = kind.type(1) << kind.type(scores.dtype.itemsize * 8 - 1)
    if not jnp.issubdtype(scores.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(scores, kind) ^ sign
    plain = jnp.where(jnp.isnan(scores), -jnp.inf, jnp.where(scores == 0, 0, scores))  # −0 equals 0
    words = jax.lax.bitcast_convert_type(plain, kind)
    return jnp.where(words >= sign, ~words, words | sign)
