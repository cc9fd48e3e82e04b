"""How much an outer step of PDBO takes beyond its own gradients and Hessian-vector products, on this machine.

Times of one step (hypergradient push with reduced variance, Adam, stochastic gradient push) over links that
come and go, and of the same programs where nodes neither send nor hear: `PDBO(local=True)`. The ratio of the
two is to be at most 1.3. Two networks: the `TwoLayerCNN` of PDBO's experiments, one node after another, and
a small MLP, all nodes at once, where an exchange of a parameter costs almost as much as learning it: with n
nodes and batches of b samples about n/(3b) of a gradient's arithmetic.

    python benchmarks/pdbo.py [cnn | mlp]
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
from timing import Compute, compare, figure

import fedbilevel as fb
from fedbilevel.fed.ledger import metering
from fedbilevel.problem.model import Model

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


class Setting(NamedTuple):
    """A network, and how large a step with it is."""

    model: Model
    samples: int
    lower_steps: int
    terms: int
    chunk: int | None


SETTINGS = {
    "cnn": Setting(fb.TwoLayerCNN(CLASSES), samples=32, lower_steps=4, terms=1, chunk=1),
    "mlp": Setting(fb.MLP((32, CLASSES)), samples=128, lower_steps=20, terms=5, chunk=None),
}


def main(*names: str) -> None:
    """Print the times and ratios."""
    for name in names or SETTINGS:
        for count in NODES:
            ratio(name, count, SETTINGS[name])


def ratio(name: str, count: int, setting: Setting) -> None:
    """Print the times with and without communication, and their ratio."""
    problem = fb.ClassWeights(setting.model, inputs=INPUTS, classes=CLASSES)
    ways = {
        way: method(count, setting.lower_steps, setting.terms, local=local)
        for way, local in (("over links that come and go", False), ("without communication", True))
    }
    fed = fb.Simulator(chunk=setting.chunk).federation(problem, nodes(count, setting.samples))
    state = begun(next(iter(ways.values())), fed, jr.key(0))
    steps = {way: outer_step(pdbo) for way, pdbo in ways.items()}
    about = {"nodes": count, "network": name}
    linked, alone = compare(steps, (fed, state, jr.key(1)), repeats=3, **about).values()
    what = f"PDBO step of {count} nodes ({name}) over the same without communication"
    seconds = {"linked": round(linked, 3), "alone": round(alone, 3)}
    figure(what, linked / alone, at_most=1.3, seconds=seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
