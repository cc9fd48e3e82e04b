"""How close a step of FedNest comes to the speed of matrix products, on this machine.

FLOPs that a hyper-representation step needs (`needed`), per second, over the best FLOP/s of a matrix product
in the same run: of the step's own shapes, and of 2048 × 2048.

    python benchmarks/roofline.py
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import jax.random as jr
from representation import (
    BATCH,
    CLASSES,
    COHORT,
    EPOCHS,
    HIDDEN,
    INPUTS,
    SAMPLES,
    STEPS,
    Steps,
    federated,
    method,
    problem,
)
from timing import best_seconds, figure, milliseconds

LAYER = 2 * INPUTS * HIDDEN
"""FLOPs of the hidden layer for one sample, or of the gradient in its weights."""
HEAD = 2 * HIDDEN * CLASSES
"""Likewise of the head; or of a gradient in its inputs."""

OWN_SHAPES = (
    (COHORT * SAMPLES, INPUTS, HIDDEN),  # the features of all training samples
    (COHORT * BATCH, INPUTS, HIDDEN),  # of the cohort's batches
    (INPUTS, COHORT * BATCH, HIDDEN),  # the gradient in the hidden layer's weights
)
SQUARE = (2048, 2048, 2048)


def needed(products: float) -> float:
    """FLOPs of the matrix products that a step cannot do without, all clients of the cohort together.

    FedInn: one gradient of the head on a batch; then features once for every sample, and in every epoch two
    gradients of the head, each of two products. FedIHGP: one gradient of the head, and products with its
    Hessian (logits, their change, and back), each on a new batch. FedOut: the gradient of f in the hidden
    layer, forth and back; and J u, which carries the change of the logits along. The local step on x is the
    first one at x: its two gradients cancel, so that it needs none.

    Args:
        products: N', how many products with the Hessian.
    """
    inner = BATCH * (LAYER + 2 * HEAD) + SAMPLES * (LAYER + EPOCHS * 2 * 2 * HEAD)
    adjoint = BATCH * (LAYER + 2 * HEAD) + products * BATCH * (LAYER + 3 * HEAD)
    outer = BATCH * (2 * LAYER + 2 * HEAD) + BATCH * (2 * LAYER + 4 * HEAD)
    return COHORT * (inner + adjoint + outer)


def product_speed(rows: int, inner: int, columns: int, times: int = 20) -> float:
    """The best FLOP/s of a matrix product in float32: many of them in one program, each with its own data."""
    left = jr.normal(jr.key(0), (rows, inner))
    right = jr.normal(jr.key(1), (inner, columns))

    @jax.jit
    def run(left: jax.Array, right: jax.Array) -> jax.Array:
        # The result shifts what is multiplied next, so that no product can be left out.
        return jax.lax.fori_loop(
            0, times, lambda _, shift: (left @ (right + shift))[0, 0] * 1e-9, jnp.zeros(())
        )

    seconds = best_seconds({"": run}, (left, right))[""]
    return times * 2 * rows * inner * columns / seconds


def main() -> None:
    """Print the figures."""
    own = max(itertools.starmap(product_speed, OWN_SHAPES))
    square = product_speed(*SQUARE, times=2)
    steps = Steps(problem(), federated(), method())
    products = steps.calls("g_yy") / COHORT / STEPS
    seconds = best_seconds({"": steps})[""] / STEPS
    speed = needed(products) / seconds
    about = {
        "step_milliseconds": milliseconds(seconds),
        "needed_gigaflops": round(needed(products) / 1e9, 2),
        "gigaflops_per_second": {
            "step": round(speed / 1e9),
            "own": round(own / 1e9),
            "square": round(square / 1e9),
        },
    }
    figure(
        "FedNest step, FLOP/s over a matrix product's of its own shapes", speed / own, at_least=0.5, **about
    )
    figure("FedNest step, FLOP/s over a matrix product's of 2048 × 2048", speed / square)


if __name__ == "__main__":
    main()
