"""Clients that hold parts of a ResNet: small models themselves, against the whole model times a mask.

A round of HeteroFL with five clients, one of each width 1, 1/2, 1/4, 1/8 and 1/16, one after another
(`chunk=1`). The small models need 0.27 of the arithmetic.

    python benchmarks/narrow.py
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
from timing import Compute, best_seconds, figure, milliseconds

import fedbilevel as fb
from fedbilevel.fed.ledger import metering
from fedbilevel.problem.submodel import LEVELS, kernels_in

SHAPE, CLASSES, SAMPLES = (32, 32, 3), 10, 10


def main() -> None:
    """Print the ratio."""
    network = fb.ResNet(channels=(64, 128), blocks=(1, 1), outputs=CLASSES)
    problem = fb.Classification(network, inputs=SHAPE, classes=CLASSES)
    fed = fb.Simulator(chunk=1).federation(problem, clients())
    ways = {way: one_round(way == "small") for way in ("masked", "small")}
    best = best_seconds(ways, (fed, jr.key(0)))
    kernels = kernels_in(problem, SHAPE)
    flops = sum(kernels.cost(ratio)["flops"] for ratio in LEVELS) / len(LEVELS) / kernels.cost(1.0)["flops"]
    about = {"milliseconds": {way: milliseconds(own) for way, own in best.items()}}
    figure(
        "a round of HeteroFL with small models, times as fast as with masks",
        best["masked"] / best["small"],
        share_of_the_arithmetic=round(flops, 3),
        **about,
    )


def clients() -> fb.Clients:
    """Noise: how long a step takes does not depend on what it learns."""
    draws = np.random.default_rng(0)
    inputs = draws.random((len(LEVELS), 2 * SAMPLES, *SHAPE), np.float32)
    labels = draws.integers(CLASSES, size=inputs.shape[:2]).astype(np.int32)
    return fb.Clients({"inputs": inputs, "labels": labels}, batch_size=SAMPLES)


def one_round(narrow: bool) -> Compute:
    """`(federation, key) ↦ state` after a round from the start."""
    method: Any = fb.HeteroFL(fb.SGD(0.1), ratios=LEVELS, learn_steps=3, narrow=narrow)

    @eqx.filter_jit
    def compute(fed: Any, key: jax.Array) -> Any:
        with metering():
            return method.step(fed, method.init(fed, key), key)[0]

    return compute


if __name__ == "__main__":
    main()
