"""Random integers that compile fast."""

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
