"""FedNest's hyper-representation experiment as the benchmarks run it: 784-200-10, 10 of 100 clients a round.

Each client has 300 training and 300 validation samples, batches of 64, five local epochs on the head, one
local step on the hidden layer, five terms of the series. Inputs are noise: how long a step takes does not
depend on what it learns.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.random as jr
import numpy as np

import fedbilevel as fb

INPUTS, HIDDEN, CLASSES = 784, 200, 10
CLIENTS, COHORT, SAMPLES, BATCH, EPOCHS, TERMS = 100, 10, 300, 64, 5, 5
UPPER_LR, LOWER_LR, SMOOTHNESS, PENALTY = 0.01, 0.1, 10.0, 0.01
STEPS = 10
"""In a timed block: enough for the random number of products to be close to its mean."""


def table(clients: int, samples: int, seed: int) -> dict[str, Any]:
    """Noise as `(clients, samples, 784)` and labels."""
    draws = np.random.default_rng(seed)
    inputs = draws.random((clients, samples, INPUTS), np.float32)
    return {"inputs": inputs, "labels": draws.integers(CLASSES, size=(clients, samples)).astype(np.int32)}


def federated(clients: int = CLIENTS) -> fb.Clients:
    """The clients' data, training and validation."""
    return fb.Clients(table(clients, SAMPLES, 0), table(clients, SAMPLES, 1), batch_size=BATCH)


def problem() -> fb.Problem:
    """The hidden layer is x, the head y."""
    backbone = fb.MLP((HIDDEN,), output_activation="relu")
    return fb.HyperRepresentation(
        backbone, fb.Linear(CLASSES), inputs=(INPUTS,), classes=CLASSES, penalty=PENALTY
    )


def method() -> fb.FedNest:
    """FedNest with the paper's settings."""
    return fb.FedNest(
        UPPER_LR, LOWER_LR, lower_epochs=EPOCHS, terms=TERMS, smoothness=SMOOTHNESS, cohort=COHORT
    )


class Steps:
    """Blocks of steps in the simulator, as `solve` runs them: always the same ones, from the first state."""

    def __init__(self, problem: fb.Problem, clients: fb.Clients, method: Any, steps: int = STEPS) -> None:
        self.session = fb.Simulator().federation(problem, clients).compile(method)
        self.start, _ = self.session.init(jr.key(0))
        self.steps = steps

    def block(self) -> Any:
        """The block: the last state, and what each step cost."""
        return self.session.advance(self.start, jr.key(1), 0, self.steps, self.steps)

    def __call__(self) -> Any:
        return jax.block_until_ready(self.block().state)

    def calls(self, kind: str) -> int:
        """How many calls of an oracle a block makes, at all clients."""
        counts = self.block().counts
        return sum(int(np.sum(times)) for entry, times in counts.items() if entry[:2] == ("call", kind))
