"""Run an algorithm on a problem: the face of the library."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from rich.console import Console
from rich.progress import Progress

from fedbilevel.adjoint.base import GROWTH
from fedbilevel.algorithm.base import Algorithm
from fedbilevel.data.clients import Clients
from fedbilevel.engine.base import Block, Engine, Session
from fedbilevel.engine.simulator import Simulator
from fedbilevel.experiment.diagnose import measured_smoothness, with_smoothness
from fedbilevel.experiment.engines import opened
from fedbilevel.experiment.record import History, Result, Row
from fedbilevel.fed.ledger import Ledger
from fedbilevel.fed.place import Kept, map_kept
from fedbilevel.problem.base import Problem
from fedbilevel.tree import PyTree, all_finite


class AdjointWarning(UserWarning):
    """The adjoint system was not solved: the hypergradients of the run cannot be trusted."""


class Evaluation(NamedTuple):
    """What a callback sees: the new row of the history and the variables."""

    row: Row
    x: PyTree
    y: PyTree


def solve(
    problem: Problem,
    clients: Clients,
    algorithm: Algorithm[Any],
    steps: int,
    *,
    seed: int | None = None,
    engine: str | Engine = "simulator",
    every: int | None = None,
    start: Result | None = None,
    callback: Callable[[Evaluation], Any] | None = None,
    progress: bool | None = None,
) -> Result:
    """Run `steps` steps of an algorithm and return the solution, its history and its cost.

    Args:
        problem: what to solve.
        clients: the data.
        algorithm: how, for example `FedNest(upper_lr=0.1, lower_lr=0.1)`.
        steps: how many steps (more of them, if `start` is given).
        seed: the same seed gives the same bits; default 0, or that of `start`.
        engine: "simulator", "process", or an engine object.
        every: steps between two rows of the history; default: about 20 rows in all.
        start: an earlier result of the same algorithm, to go on from.
        callback: called with every new `Evaluation`; the run stops if it returns something true.
        progress: show a bar; default: when standard error is a terminal.

    A NaN or overflow ends the run with `diverged=True` and the last finite state.
    """
    _check(problem, clients, algorithm, steps, every)
    if start is not None:
        _check_start(problem, clients, algorithm, start)
    seed = (0 if start is None else start.seed) if seed is None else seed
    spent = Ledger() if start is None else start.ledger
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(opened(engine))
        smoothness = None if start is None else start.smoothness
        if getattr(algorithm, "needs_smoothness", False) and problem.structure == "bilevel":
            if smoothness is None:
                smoothness, cost = measured_smoothness(where, problem, clients, seed, algorithm)
                spent = spent + cost
            algorithm = with_smoothness(algorithm, smoothness)
        session = stack.enter_context(where.connect(problem, clients, algorithm))
        tick = stack.enter_context(_bar(progress, steps))
        run = _Run(problem, algorithm, session, seed, spent, callback, start, smoothness)
        run.go(steps, every or max(1, -(-steps // 20)), tick)
        return run.result()


class _Run:
    """One call of `solve`: the state between two evaluations."""

    def __init__(
        self,
        problem: Problem,
        algorithm: Algorithm[Any],
        session: Session,
        seed: int,
        ledger: Ledger,
        callback: Callable[[Evaluation], Any] | None,
        start: Result | None,
        smoothness: float | None,
    ) -> None:
        self.problem, self.algorithm, self.session = problem, algorithm, session
        self.seed, self.ledger, self.callback = seed, ledger, callback
        self.smoothness = smoothness
        k_init, self.key = jr.split(jr.key(seed))
        self.step, self.diverged, self.stopped = 0, False, False
        self.rows: list[Row] = []
        self.trouble: dict[str, float] = {}
        self.earlier = start
        if start is None:
            self.state, counts = session.init(k_init)
            self.ledger = self.ledger + Ledger.from_counts(counts)
            self._evaluate({})
        else:
            self.state = map_kept(lambda kept: session.federation.keep(kept.value), start.state)
            self.step, self.rows = start.steps, list(start.history)

    def go(self, steps: int, every: int, tick: Callable[[int], None]) -> None:
        last = self.step + steps
        room = min(every, max(steps, 1024))  # so that fewer steps than `every` compile nothing new
        while self.step < last and not (self.diverged or self.stopped):
            now = min(every, last - self.step)
            block = self.session.advance(self.state, self.key, self.step, now, room)
            self._take(block)
            tick(block.done)

    def _take(self, block: Block) -> None:
        self.state, self.diverged = block.state, not block.finite
        self.step += block.done
        self.ledger = self.ledger + Ledger.from_counts(block.counts)
        info = {name: np.asarray(values)[: block.done] for name, values in block.info.items()}
        for kind, worst in _suspicions(info).items():
            pick = min if kind == "curvature" else max
            self.trouble[kind] = pick(self.trouble.get(kind, worst), worst)
        self._evaluate({name: float(values[-1]) for name, values in info.items() if len(values)})

    def _evaluate(self, info: Row) -> None:
        x, y = self._solution()
        metrics = {name: float(value) for name, value in _metrics(self.problem, x, y).items()}
        row: Row = {"step": self.step} | metrics | info | self.ledger.columns()
        self.rows.append(row)
        if self.callback is not None:
            self.stopped = bool(self.callback(Evaluation(row, x, y)))

    def _solution(self) -> tuple[PyTree, PyTree]:
        x, y = self.algorithm.solution(self.state)
        return map_kept(self.session.federation.stacked, x), map_kept(self.session.federation.stacked, y)

    def result(self) -> Result:
        notes = tuple(_NOTES[kind].format(worst) for kind, worst in self.trouble.items())
        for note in notes:
            warnings.warn(note, AdjointWarning, stacklevel=3)
        before = ((), ()) if self.earlier is None else (self.earlier.failures, self.earlier.notes)
        x, y = self._solution()
        state = map_kept(lambda kept: Kept(self.session.federation.stacked(kept)), self.state)
        return Result(
            x,
            y,
            History(tuple(self.rows)),
            self.ledger,
            self.diverged,
            self.step,
            self.seed,
            state,
            (*before[0], *self.session.failures),
            (*before[1], *notes),
            self.smoothness,
        )


@eqx.filter_jit
def _metrics(problem: Problem, x: PyTree, y: PyTree) -> dict[str, jax.Array]:
    values = {}
    for name, metric in problem.metrics.items():
        try:
            values[name] = jnp.asarray(metric(x, y)).reshape(())
        except (TypeError, ValueError, jax.errors.JAXTypeError) as error:
            raise ValueError(
                f"the metric {name!r} must be a JAX function of (x, y) that returns one number; it failed "
                f"with {type(error).__name__}: {error}"
            ) from error
    return values


_NOTES = {
    "growth": (
        "a term of the Neumann series grew (by {:.3g} at worst): ‖I − H/ℓ‖ > 1, so the series cannot "
        "converge. Raise `smoothness` above the largest eigenvalue of H, or add `damping` if H has negative "
        'eigenvalues; `fedbilevel.diagnose` measures both, `smoothness="auto"` the first.'
    ),
    "curvature": (
        "conjugate gradients met negative curvature ({:.3g} at worst): g is not strongly convex in y there. "
        "Add `damping` above the most negative eigenvalue; `fedbilevel.diagnose` measures it."
    ),
    "failed": (
        "the clients' own adjoints failed at up to {:.0%} of the clients: their Hessians have eigenvalues "
        'above `smoothness` (`smoothness="auto"` measures a bound) or below zero (add `damping`).'
    ),
}


def _suspicions(info: dict[str, Any]) -> dict[str, float]:
    """What the adjoint's reports say of some steps: a kind of trouble and its worst number."""
    growth = np.max(info.get("adjoint_growth", 0.0), initial=0.0)
    curvature = np.min(info.get("adjoint_curvature", 1.0), initial=1.0)
    share = np.max(info.get("adjoint_failed", 0.0), initial=0.0)
    found = (("growth", growth, growth > GROWTH), ("curvature", curvature, curvature <= 0))
    return {kind: float(worst) for kind, worst, bad in (*found, ("failed", share, share > 0)) if bad}


def _check(problem: Problem, clients: Clients, algorithm: Any, steps: int, every: int | None) -> None:
    kinds = (
        ("problem", problem, Problem),
        ("clients", clients, Clients),
        ("algorithm", algorithm, Algorithm),
    )
    for name, value, kind in kinds:
        if not isinstance(value, kind):
            raise TypeError(
                f"`{name}` is {repr(value)[:80]}; it must be a {kind.__name__}. "
                "The call is solve(problem, clients, algorithm, steps)."
            )
    if steps < 0 or (every is not None and every < 1):
        raise ValueError(f"steps is {steps} and every is {every}; they must be at least 0 and 1")
    if not bool(all_finite((problem.x0, problem.y0))):
        raise ValueError("x0 or y0 holds a NaN or an infinity: a run cannot start there")
    taken = sorted({*Ledger().columns(), "step"} & set(problem.metrics))
    if taken:
        raise ValueError(f"the metrics {taken} have the names of columns that every history has; rename them")
    if getattr(algorithm, "cohort", None) is not None and clients.has_weightless:
        raise ValueError("a sampled cohort may consist of clients of weight 0 alone; leave such clients out")
    problem.check(clients)


def _check_start(problem: Problem, clients: Clients, algorithm: Algorithm[Any], start: Result) -> None:
    """Raise an error that explains if a result's state is not one of this algorithm and problem."""
    fed = Simulator().federation(problem, clients)
    needed = jax.eval_shape(lambda key: algorithm.at(0).init(fed, key), jr.key(0))
    shapes = [(jax.tree.structure(t), list(map(np.shape, jax.tree.leaves(t)))) for t in (needed, start.state)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"`start` is a result of another algorithm or problem: its state is {shapes[1]}, "
            f"and this run needs {shapes[0]}"
        )


@contextlib.contextmanager
def _bar(progress: bool | None, steps: int) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    shown = sys.stderr.isatty() if progress is None else progress
    with Progress(console=console, disable=not shown) as bar:
        task = bar.add_task("steps", total=steps)
        yield lambda done: bar.advance(task, done)
