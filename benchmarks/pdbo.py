"""How much an outer step of PDBO takes beyond its own gradients and Hessian-vector products, on this machine.

Times of one step (hypergradient push with reduced variance, Adam, stochastic gradient push) over links that
come and go, and of the same programs where nodes neither send nor hear: `PDBO(local=True)`. The ratio of the
two is to be at most 1.3.

    python benchmarks/pdbo.py [samples] [hidden] [lower_steps] [terms]
"""

from __future__ import annotations

import sys
from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
from timing import Compute, compare, figure

import fedbilevel as fb
from fedbilevel.fed.ledger import metering

NODES = (20, 100)
INPUTS, CLASSES = (28, 28, 1), 10


def nodes(count: int, samples: int) -> fb.Clients:
    """Nodes with a batch of noise each: how long a step takes does not depend on what it learns."""
    draws = np.random.default_rng(0)
    return fb.Clients([_drawn(draws, 2 * samples) for _ in range(count)], batch_size=samples)


def _drawn(draws: np.random.Generator, samples: int) -> dict[str, Any]:
    inputs = draws.random((samples, *INPUTS), np.float32)
    return {"inputs": inputs, "labels": draws.integers(CLASSES, size=samples).astype(np.int32)}


def method(count: int, lower_steps: int, terms: int, *, local: bool) -> Any:
    """PDBO over so many nodes; `local`: without any exchange."""
    links, upper = fb.links.Stochastic(), fb.Adam(0.1)
    return fb.PDBO(links, 0.05, lower_steps, upper, terms, local=local).among(count)


def outer_step(pdbo: Any) -> Compute:
    """`(federation, state, key) ↦ state`, compiled."""

    @eqx.filter_jit
    def step(fed: Any, state: Any, key: jax.Array) -> Any:
        with metering():
            return pdbo.step(fed, state, key)[0]

    return step


@eqx.filter_jit
def begun(pdbo: Any, fed: Any, key: jax.Array) -> Any:
    """The state that both ways step from."""
    with metering():
        return pdbo.init(fed, key)


def main(samples: int = 32, hidden: int = 32, lower_steps: int = 20, terms: int = 5) -> None:
    """Print the times and ratios."""
    problem = fb.ClassWeights(fb.MLP((hidden, CLASSES)), inputs=INPUTS, classes=CLASSES)
    for count in NODES:
        ways = {
            name: method(count, lower_steps, terms, local=local)
            for name, local in (("over links that come and go", False), ("without communication", True))
        }
        fed = fb.Simulator().federation(problem, nodes(count, samples))
        state = begun(next(iter(ways.values())), fed, jr.key(0))
        steps = {name: outer_step(pdbo) for name, pdbo in ways.items()}
        about = {"nodes": count, "samples": samples, "lower_steps": lower_steps, "terms": terms}
        linked, alone = compare(steps, (fed, state, jr.key(1)), **about).values()
        figure(f"PDBO step of {count} nodes over the same without communication", linked / alone, at_most=1.3)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
