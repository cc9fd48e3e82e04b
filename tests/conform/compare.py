"""Runs of conformance cases, and what equal means."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

import fedbilevel as fb
from conform.cases import CASES

STEPS = 20
FEW = 8
"""Steps in double precision: it has digits enough that a difference shows at once."""


@functools.cache
def simulated(name: str, x64: bool, dropout: float = 0.0, steps: int = STEPS) -> fb.Result:
    with jax.enable_x64(x64):
        return run(name, fb.Simulator(dropout=dropout), steps)


def run(name: str, engine: Any, steps: int = STEPS, seed: int = 7) -> fb.Result:
    case = CASES[name]
    problem, clients = case.make()
    # One number of rows for all, so that one compiled program serves any number of steps.
    return fb.solve(problem, clients, case.algorithm(), steps, engine=engine, every=STEPS, seed=seed)


def close(a: fb.Result, b: fb.Result, tolerance: float) -> None:
    for p, q in zip(jax.tree.leaves((a.x, a.y)), jax.tree.leaves((b.x, b.y)), strict=True):
        assert p.dtype == q.dtype
        np.testing.assert_allclose(p, q, rtol=tolerance, atol=tolerance * float(np.abs(q).max(initial=0)))
