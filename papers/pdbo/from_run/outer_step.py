"""PDBO: M rounds of hypergradient push and a step of every x, from where the inner steps of a run have led.

    python papers/pdbo/from_run/outer_step.py runs/pdbo/hundred-nodes/pdbo-da-fc/seed-0 [terms] [share]

In the paper an outer step is T inner steps, then M rounds, then a step of x. Here a run begins with T inner
steps, and its steps end with T new ones. This takes the first checkpoint of a run's folder, after T inner
steps, makes the rounds (`terms` of them, or as many as the run has; with `share` of its step size) and the
step of x, and leaves it there: the paper's outer step, without the T inner steps of its next one. Prints
how long it took, how much longer the last term of the series was than the first, and how far x went.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time
import warnings
from typing import Any

import numpy as np

import fedbilevel as fb
from fedbilevel.experiment import AdjointWarning
from fedbilevel.experiment.build import build
from fedbilevel.experiment.config import plans


def outer_step(folder: pathlib.Path, terms: int | None = None, share: float = 1.0) -> tuple[fb.Result, Any]:
    """The result of a step with a single inner step, and the α of its series, a share of the run's."""
    (plan,) = plans(
        folder / "config.toml", changes={} if terms is None else {"algorithm.adjoint.terms": terms}
    )
    built, start = build(plan), fb.load(min(folder.glob("checkpoint-*.npz")))
    lr = share * float(built.algorithm.at(0).adjoint_rate())  # of all inner steps, of which one is left
    method = dataclasses.replace(built.algorithm, lower_steps=1, adjoint_lr=lr)
    with warnings.catch_warnings(action="ignore", category=AdjointWarning):  # the growth is printed
        result = fb.solve(built.problem, built.clients, method, 1, start=start, engine=built.engine)
    return result, lr


def growth(result: fb.Result) -> float:
    """How much longer the last term is than the first; infinite where the step is not finite."""
    return float("inf") if result.diverged else result.history[-1]["push_growth"]


def main(folder: str, terms: str | None = None, share: str = "1") -> None:
    """Print what came of it."""
    begin = time.perf_counter()
    result, lr = outer_step(pathlib.Path(folder), None if terms is None else int(terms), float(share))
    minutes = (time.perf_counter() - begin) / 60
    moved = np.asarray(result.x)
    print(f"α = {lr:.4g}; {minutes:.1f} minutes, compilation included")
    print(f"the last term is {growth(result):.3g} times the first")
    print(f"x: {moved.shape}, |x| from {np.abs(moved).min():.4g} to {np.abs(moved).max():.4g}")
    print(result.ledger)


if __name__ == "__main__":
    main(*sys.argv[1:])
