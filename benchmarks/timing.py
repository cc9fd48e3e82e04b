"""Gradients of clients with weights of their own, computed in several ways, timed side by side.

All ways run in turn in one process, several times, and the best time of each counts: on a machine that does
other things too, only the ratios mean something.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

Loss = Callable[[Any, jax.Array], jax.Array]
Compute = Callable[..., Any]
REPEATS = 5


def together(loss: Loss) -> Compute:
    """The gradients of all clients under `vmap`, each in its own parameters."""
    return jax.jit(jax.vmap(jax.grad(loss)))


def one_by_one(loss: Loss) -> Compute:
    """The same, one client after another, as in `Simulator(chunk=1)`."""
    return jax.jit(lambda *clients: jax.lax.map(lambda own: jax.grad(loss)(*own), clients))


def compare(ways: Mapping[str, Compute], arguments: tuple[Any, ...], **about: Any) -> None:
    """Print a line of JSON for each way: how long it takes, and how many times as fast as the first it is.

    Args:
        ways: what to time, by name.
        arguments: what each is called with.
        **about: what else the lines shall say.
    """
    for compute in ways.values():
        _seconds(compute, arguments)  # compiles
    turns = [{name: _seconds(compute, arguments) for name, compute in ways.items()} for _ in range(REPEATS)]
    best = {name: min(turn[name] for turn in turns) for name in ways}
    base = next(iter(best.values()))
    for name, value in best.items():
        figures = {"milliseconds": round(1e3 * value, 1), "times_as_fast": round(base / value, 2)}
        print(json.dumps(about | {"way": name} | figures), flush=True)


def _seconds(compute: Compute, arguments: tuple[Any, ...]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(compute(*arguments))
    return time.perf_counter() - begin
