"""One run: what it takes until the mean of `‖∇h(x)‖²` is at most ε."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
from theorems import Setting

import fedbilevel as fb
from fedbilevel.algorithm.base import Algorithm, Info
from fedbilevel.engine.base import Session
from fedbilevel.engine.simulator import Simulator
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.ledger import Ledger
from fedbilevel.problem.nonconvex import Nonconvex
from fedbilevel.tree import PyTree

KINDS: Mapping[str, tuple[str, ...]] = {
    "∇f": ("f_x", "f_y"),
    "∇g": ("g_y",),
    "Jv": ("g_xy",),
    "Hv": ("g_yy",),
}
"""Derivatives that a client takes, each of one sample, and the oracles that add up to them."""

COSTS = ("rounds", *KINDS)
CAPACITY = 128
"""Steps in a compiled block."""


class Watched(Algorithm[Any]):
    """A method that reports `‖∇h(x)‖²` after every round."""

    method: Algorithm[Any]
    known: Nonconvex

    def init(self, fed: Federation, key: jax.Array) -> PyTree:
        return self.method.init(fed, key)

    def step(self, fed: Federation, state: PyTree, key: jax.Array) -> tuple[PyTree, Info]:
        state, _ = self.method.step(fed, state, key)
        return state, {"stationarity": self.known.stationarity(self.solution(state)[0])}

    def solution(self, state: PyTree) -> tuple[PyTree, PyTree]:
        return self.method.solution(state)


class Spent(NamedTuple):
    """What one run took until it was there.

    Attributes:
        costs: by the names of `COSTS`, a client's; empty if it did not get there.
        steps: how many steps of the method it made, of I local steps each.
        floor: the mean of `‖∇h(x)‖²` over the last quarter of the rounds, over ε.
    """

    costs: Mapping[str, float]
    steps: int
    floor: float


def spend(known: Nonconvex, setting: Setting, epsilon: float, seed: int, most: int) -> Spent:
    """Run until the mean of `‖∇h(x)‖²` over the iterates is at most ε, for at most so many steps."""
    clients = clients_of(known, setting)
    first = float(known.stationarity(known.problem().x0))
    with Simulator().connect(known.problem(), clients, Watched(setting.algorithm, known)) as session:
        begun, seen, ledger = _advance(session, first, epsilon, seed, most)
    floor = float(np.mean(seen[3 * len(seen) // 4 :])) / epsilon
    reached = np.mean(seen[:-1]) <= epsilon
    costs = _costs(begun, ledger, setting, known.n) if reached else {}
    return Spent(costs, len(seen) - 1, floor)


def clients_of(known: Nonconvex, setting: Setting) -> fb.Clients:
    """Noisy clients with more samples than any batch, which is then drawn with replacement."""
    samples = 2 * max(setting.lower_batch, setting.first_batch, 512)
    clients = known.clients(samples=samples, noise=0.5, batch_size=setting.batch)
    lower = dataclasses.replace(clients.lower, batch_size=setting.lower_batch)
    return eqx.tree_at(lambda c: c.lower, clients, lower)


def _advance(
    session: Session, first: float, epsilon: float, seed: int, most: int
) -> tuple[Ledger, list[float], Ledger]:
    """What the start and the rounds cost, and `‖∇h(x)‖²` at the start and after every round."""
    k_begin, key = jr.split(jr.key(seed))
    state, counts = session.init(k_begin)
    begun, ledger, seen = Ledger.from_counts(counts), Ledger(), [first]
    while len(seen) <= most:
        block = session.advance(state, key, len(seen) - 1, min(CAPACITY, most + 1 - len(seen)), CAPACITY)
        state, found = block.state, np.asarray(block.info["stationarity"])[: block.done].tolist()
        there = _first_time(seen, found, epsilon)
        seen += found[:there]
        ledger += Ledger.from_counts({entry: np.asarray(n)[:there] for entry, n in block.counts.items()})
        if there is not None or not block.finite:
            break
    return begun, seen, ledger


def _first_time(seen: Sequence[float], found: Sequence[float], epsilon: float) -> int | None:
    """After how many more rounds the mean over the points where a round began is at most ε."""
    means = np.cumsum([*seen, *found])[len(seen) - 1 : -1] / np.arange(len(seen), len(seen) + len(found))
    places = np.flatnonzero(means <= epsilon)
    return int(places[0]) + 1 if len(places) else None


def _costs(begun: Ledger, ledger: Ledger, setting: Setting, clients: int) -> dict[str, float]:
    """Exchanges, and derivatives of single samples that a client takes: calls times samples in a batch."""

    def derivatives(kind: str) -> float:
        batch = setting.batch if kind.startswith("f") else setting.lower_batch
        parts = ((begun, setting.first_batch), (ledger, batch))
        return sum(part.calls.get(kind, 0) * size for part, size in parts) / clients

    counted = {name: sum(map(derivatives, kinds)) for name, kinds in KINDS.items()}
    return {"rounds": float(ledger.rounds)} | counted
