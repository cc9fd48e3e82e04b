"""Which are the largest of many numbers: bit by bit (`fedbilevel.selection`) against a sort, on this machine.

ZeroFL, FedDST and Flash choose the largest weights of a layer, ZeroFL in every learning step. Here: a seventh
of the 2.4 million weights of the largest layer of a ResNet-18.

    python benchmarks/selection.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.random as jr
from timing import best_seconds, figure, milliseconds

from fedbilevel.selection import best

SIZE = 3 * 3 * 512 * 512


def by_sort(scores: jax.Array, count: jax.Array) -> jax.Array:
    """The same choice, by the least score that is held."""
    least = jnp.sort(scores)[scores.size - count]
    above, equal = scores > least, scores == least
    return above | (equal & (jnp.cumsum(equal) <= count - jnp.sum(above)))


def main() -> None:
    """Print the ratio."""
    scores, count = jnp.abs(jr.normal(jr.key(0), (SIZE,))), jnp.asarray(SIZE // 7)
    ways = {"bits": jax.jit(best), "sort": jax.jit(by_sort)}
    if not jnp.array_equal(ways["bits"](scores, count), ways["sort"](scores, count)):
        raise SystemExit("the two choices differ")
    times = best_seconds(ways, (scores, count))
    about = {name: milliseconds(seconds) for name, seconds in times.items()}
    what = f"the largest of {SIZE:,} numbers, times as fast as by a sort"
    figure(what, times["sort"] / times["bits"], milliseconds=about)


if __name__ == "__main__":
    main()
