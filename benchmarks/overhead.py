"""What the library costs on top of the mathematics: a step of FedNest over the same written by hand in JAX.

Both make the same draws; their iterates are compared before they are timed. What the library does more: it
checks after every step that the state is finite, and counts every message, call and sample.

    python benchmarks/overhead.py
"""

from __future__ import annotations

from typing import Any

import by_hand
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from representation import CLIENTS, SAMPLES, STEPS, Steps, federated, method, problem, table
from timing import best_seconds, figure, milliseconds


def both() -> tuple[Any, Any]:
    """The same steps, of the library and by hand."""
    ours = Steps(problem(), federated(), method())
    data = by_hand.Data(*(tuple(map(jnp.asarray, table(CLIENTS, SAMPLES, seed).values())) for seed in (0, 1)))
    run = jax.jit(by_hand.steps)
    start = ours.start.x[0], ours.start.y  # the backbone is a chain of one layer

    def written() -> Any:
        return run(data, *start, jr.key(1), STEPS)

    return ours, written


def check_alike(ours: Any, written: Any) -> None:
    """The two must be the same iteration."""
    x, y = written()
    pairs = zip(jax.tree.leaves((ours().x[0], ours().y)), jax.tree.leaves((x, y)), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def main() -> None:
    """Print the ratio."""
    ours, written = both()
    check_alike(ours, written)
    best = best_seconds({"ours": ours, "by hand": written}, repeats=10)
    about = {name: milliseconds(seconds / STEPS) for name, seconds in best.items()}
    what = "FedNest step of the library over the same written by hand in JAX"
    figure(what, best["ours"] / best["by hand"], at_most=1.1, step_milliseconds=about)


if __name__ == "__main__":
    main()
