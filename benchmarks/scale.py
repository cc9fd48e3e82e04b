"""How a step's time and a run's memory depend on the number of clients, the cohort being the same.

FedNest on hyper-representations, 10 clients a round, 100 samples a client kept as bytes: steps a second with
10,000 clients over steps a second with 100; and the most memory that a process with 10,000 clients took, the
interpreter and its libraries included.

    python benchmarks/scale.py
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

import jax
import numpy as np
from representation import BATCH, CLASSES, COHORT, HIDDEN, INPUTS, PENALTY, STEPS, Steps, method
from timing import best_seconds, figure, milliseconds

import fedbilevel as fb
from fedbilevel.problem.model import Chain, Model

SAMPLES, MANY, FEW = 100, 10_000, 100


class Pixels(Model):
    """Bytes as numbers from 0 to 1: only the batches are ever numbers of four bytes."""

    def init(self, key: jax.Array, input_shape: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
        return (), input_shape

    def __call__(self, parameters: Any, inputs: jax.Array) -> jax.Array:
        return inputs / 255


def federated(clients: int) -> fb.Clients:
    """Bytes of noise: one half of a client's samples to train on, the other to validate with."""
    draws = np.random.default_rng(0)
    total = clients * SAMPLES
    data = {
        "inputs": draws.integers(256, size=(total, INPUTS), dtype=np.uint8),
        "labels": draws.integers(CLASSES, size=total).astype(np.int32),
    }
    rows = np.arange(total, dtype=np.int32).reshape(clients, 2, SAMPLES // 2)
    return fb.Clients.indexed(data, list(rows[:, 0]), list(rows[:, 1]), batch_size=BATCH // 2)


def steps(clients: int) -> Steps:
    """Steps with so many clients."""
    backbone = Chain((Pixels(), *fb.MLP((HIDDEN,), output_activation="relu").models))
    problem = fb.HyperRepresentation(
        backbone, fb.Linear(CLASSES), inputs=(INPUTS,), classes=CLASSES, penalty=PENALTY
    )
    return Steps(problem, federated(clients), method())


def alone(clients: int) -> None:
    """A run with so many clients in this process; prints its peak of memory in bytes."""
    steps(clients)()
    print(json.dumps({"peak": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))


def peak(clients: int) -> int:
    """The most memory that a process of its own took."""
    command = [sys.executable, __file__, str(clients)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(json.loads(done.stdout)["peak"])


def main() -> None:
    """Print the figures."""
    best = best_seconds({str(count): steps(count) for count in (FEW, MANY)}, repeats=10)
    about = {f"{name} clients": milliseconds(seconds / STEPS) for name, seconds in best.items()}
    sizes: dict[str, Any] = {"cohort": COHORT, "samples": SAMPLES, "step_milliseconds": about}
    what = f"steps a second with {MANY:,} clients over those with {FEW}"
    figure(what, best[str(FEW)] / best[str(MANY)], at_least=0.8, **sizes)
    what = f"GiB at most in a process with {MANY:,} clients of {SAMPLES} × {INPUTS} bytes"
    figure(what, peak(MANY) / 2**30, at_most=2, data_gibibytes=round(MANY * SAMPLES * INPUTS / 2**30, 2))


if __name__ == "__main__":
    alone(int(sys.argv[1])) if len(sys.argv) > 1 else main()
