"""How close a step of FedNest comes to the speed of matrix products, on this machine.

FLOPs that a hyper-representation step needs (`needed`), per second, over the best FLOP/s of a matrix product
in the same run: of the step's own shapes, and of 2048 × 2048.

    python benchmarks/roofline.py
"""

from __future__ import annotations

from typing import Any

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
from timing import Compute, best_seconds, figure, milliseconds

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
TIMES = 4


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


def flops(shape: tuple[int, int, int]) -> int:
    """Of a matrix product: of `TIMES` of them, as `products` makes them."""
    rows, inner, columns = shape
    return TIMES * 2 * rows * inner * columns


def products(shape: tuple[int, int, int]) -> Compute:
    """Some matrix products in float32 in one program, none of which can be left out."""
    rows, inner, columns = shape
    left, right = jr.normal(jr.key(0), (rows, inner)), jr.normal(jr.key(1), (inner, columns))

    @jax.jit
    def run(left: jax.Array, right: jax.Array) -> jax.Array:
        def shifted(_: Any, shift: jax.Array) -> jax.Array:  # the result shifts what is multiplied next
            return (left @ (right + shift))[0, 0] * 1e-9

        return jax.lax.fori_loop(0, TIMES, shifted, jnp.zeros(()))

    return lambda: run(left, right)


def main() -> None:
    """Print the figures."""
    steps = Steps(problem(), federated(), method())
    shapes = (*OWN_SHAPES, SQUARE)
    best = best_seconds({"step": steps} | {str(shape): products(shape) for shape in shapes}, repeats=15)
    *own, square = (flops(shape) / best[str(shape)] for shape in shapes)
    count = steps.calls("g_yy") / COHORT / STEPS
    speed = needed(count) * STEPS / best["step"]
    speeds = {"step": round(speed / 1e9), "own shapes": round(max(own) / 1e9), "square": round(square / 1e9)}
    about = {
        "step_milliseconds": milliseconds(best["step"] / STEPS),
        "needed_gigaflops": round(needed(count) / 1e9, 2),
        "gigaflops_a_second": speeds,
    }
    figure(
        "FedNest step, FLOP/s over a matrix product's of its shapes", speed / max(own), at_least=0.5, **about
    )
    figure("FedNest step, FLOP/s over a matrix product's of 2048 × 2048", speed / square)


if __name__ == "__main__":
    main()
