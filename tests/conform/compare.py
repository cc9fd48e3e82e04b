"""Runs of conformance cases, and what equal means."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

import fedbilevel as fb
from conform.cases import CASES

STEPS = 8


@functools.cache
def simulated(name: str, x64: bool, dropout: float = 0.0) -> fb.Result:
    with jax.enable_x64(x64):
        return run(name, fb.Simulator(dropout=dropout))


def run(name: str, engine: Any, seed: int = 7) -> fb.Result:
    case = CASES[name]
    problem, clients = case.make()
    return fb.solve(problem, clients, case.algorithm(), STEPS, engine=engine, every=STEPS, seed=seed)


def close(a: fb.Result, b: fb.Result, tolerance: float) -> None:
    for p, q in zip(jax.tree.leaves((a.x, a.y)), jax.tree.leaves((b.x, b.y)), strict=True):
        assert p.dtype == q.dtype
        np.testing.assert_allclose(p, q, rtol=tolerance, atol=tolerance * float(np.abs(q).max(initial=0)))
