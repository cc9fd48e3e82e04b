"""Times side by side, and figures: one line of JSON each.

All ways of doing a thing run in turn in one process, several times, and the best time of each counts: on a
machine that does other things too, only the ratios mean something.
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


def best_seconds(ways: Mapping[str, Compute], arguments: tuple[Any, ...] = (), repeats: int = REPEATS) -> Any:
    """The best time of each way, by name; all run once before, to compile, and then in turn.

    Args:
        ways: what to time, by name.
        arguments: what each is called with.
        repeats: how often.
    """
    for compute in ways.values():
        _seconds(compute, arguments)
    turns = [{name: _seconds(compute, arguments) for name, compute in ways.items()} for _ in range(repeats)]
    return {name: min(turn[name] for turn in turns) for name in ways}


def compare(
    ways: Mapping[str, Compute], arguments: tuple[Any, ...], repeats: int = REPEATS, **about: Any
) -> dict[str, float]:
    """Print a line of JSON for each way: how long it takes, and how many times as fast as the first it is.

    Args:
        ways: what to time, by name.
        arguments: what each is called with.
        repeats: how often.
        **about: what else the lines shall say.

    Returns:
        the best seconds of each way.
    """
    best: dict[str, float] = best_seconds(ways, arguments, repeats)
    base = next(iter(best.values()))
    for name, value in best.items():
        figures = {"milliseconds": round(1e3 * value, 1), "times_as_fast": round(base / value, 2)}
        print(json.dumps(about | {"way": name} | figures), flush=True)
    return best


def figure(
    what: str, value: float, *, at_least: float | None = None, at_most: float | None = None, **about: Any
) -> None:
    """Print a figure as a line of JSON; those with a bound say what it is to be and whether it holds.

    Args:
        what: the figure, in words.
        value: what was measured.
        at_least, at_most: what it should be.
        **about: what else the line shall say: sizes, times, parts.
    """
    line: dict[str, Any] = {"figure": what, "value": float(f"{value:.3g}")}
    if at_least is not None:
        line |= {"target": f"at least {at_least:g}", "met": value >= at_least}
    if at_most is not None:
        line |= {"target": f"at most {at_most:g}", "met": value <= at_most}
    print(json.dumps(line | about), flush=True)


def gain(best: Mapping[str, float], mine: str = "ours") -> float:
    """The best time of all others over the best of those ways whose names begin with `mine`."""
    own = [seconds for name, seconds in best.items() if name.startswith(mine)]
    others = [seconds for name, seconds in best.items() if not name.startswith(mine)]
    return min(others) / min(own)


def milliseconds(seconds: float) -> float:
    """Rounded, for a line."""
    return float(f"{1e3 * seconds:.3g}")


def _seconds(compute: Compute, arguments: tuple[Any, ...]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(compute(*arguments))
    return time.perf_counter() - begin
