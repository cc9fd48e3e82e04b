"""How much memory a run takes beyond its data, model and cohort, and whether it grows with the steps.

A process of its own runs FedNest on hyper-representations: the peak of its memory above what it had before
there were data, over the bytes of data, model and what a cohort reads in a step. Then 10,000 steps of a small
problem, by `solve`: what the process holds after them over what it holds after the first 1,000.

    python benchmarks/memory.py
"""

from __future__ import annotations

import json
import pathlib
import resource
import subprocess
import sys
from typing import Any

import jax
import jax.random as jr
from representation import BATCH, COHORT, SAMPLES, Steps, federated, method, problem
from timing import figure

import fedbilevel as fb
from fedbilevel.tree import nbytes

FIRST, LAST = 1_000, 10_000


def resident() -> int:
    """Bytes of memory that this process holds now."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def highest() -> int:
    """The most bytes that this process ever held."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak() -> dict[str, Any]:
    """The peak of a run above what the process held before, and what its parts take."""
    _warm()
    before = resident()
    clients, start = federated(), problem()
    Steps(start, clients, method())()
    data, model = nbytes((clients.lower.flat, clients.upper.flat)), nbytes((start.x0, start.y0))
    # Every client has a model of its own after a local step, and reads its training samples.
    sample = data // (2 * clients.n * SAMPLES)
    cohort = COHORT * (model + (SAMPLES + BATCH) * sample)
    return {"above": highest() - before, "data": data, "model": model, "cohort": cohort}


def growth() -> dict[str, Any]:
    """What the process holds after the first steps and after many."""
    quadratic = fb.Quadratic.random(jr.key(0), 20, 10, 20)
    task, clients = quadratic.problem(), quadratic.clients()
    fednest = fb.FedNest(0.01, 0.05, lower_steps=5, terms=5, smoothness=50.0, cohort=5)
    first = fb.solve(task, clients, fednest, steps=FIRST, every=100)
    held = {str(FIRST): resident()}
    fb.solve(task, clients, fednest, steps=LAST - FIRST, every=100, start=first)
    return held | {str(LAST): resident()}


def _warm() -> None:
    """Load what a first compiled program loads."""
    jax.block_until_ready(jax.jit(lambda v: v @ v)(jr.normal(jr.key(0), (64, 64))))


def measured(what: str) -> Any:
    """What a process of its own prints."""
    command = [sys.executable, __file__, what]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Print the figures."""
    parts = measured("peak")
    above = parts.pop("above")
    sizes = {name: round(count / 2**20, 1) for name, count in parts.items()}
    about: dict[str, Any] = {"mebibytes": sizes | {"peak": round(above / 2**20, 1)}}
    figure("peak of memory over data, model and cohort", above / sum(parts.values()), **about)
    held = measured("growth")
    about = {"mebibytes": {f"{steps} steps": round(count / 2**20, 1) for steps, count in held.items()}}
    what = f"memory after {LAST:,} steps over that after {FIRST:,}"
    figure(what, held[str(LAST)] / held[str(FIRST)], at_most=1.02, **about)


if __name__ == "__main__":
    print(json.dumps({"peak": peak, "growth": growth}[sys.argv[1]]())) if len(sys.argv) > 1 else main()
