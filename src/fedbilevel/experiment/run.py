"""Run an algorithm on a problem: the face of the library."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.random as jr
import numpy as np

from fedbilevel.algorithm.base import Algorithm
from fedbilevel.data.clients import Clients
from fedbilevel.engine.base import Engine
from fedbilevel.engine.mesh.join import together
from fedbilevel.engine.simulator import Simulator
from fedbilevel.experiment.best import Best
from fedbilevel.experiment.diagnose import measured_smoothness, with_smoothness
from fedbilevel.experiment.engines import opened
from fedbilevel.experiment.evaluate import Evaluator
from fedbilevel.experiment.loop import Callback, Run
from fedbilevel.experiment.progress import Tick, progress_bar
from fedbilevel.experiment.record import Result
from fedbilevel.fed.ledger import Ledger
from fedbilevel.number import whole
from fedbilevel.problem.base import Problem
from fedbilevel.tree import all_finite


def solve(
    problem: Problem,
    clients: Clients,
    algorithm: Algorithm[Any],
    steps: int,
    *,
    seed: int | None = None,
    engine: str | Engine = "simulator",
    every: int | None = None,
    measure: Sequence[str] = (),
    best: Best | None = None,
    start: Result | None = None,
    callback: Callback | None = None,
    progress: bool | None = None,
) -> Result:
    """Run `steps` steps of an algorithm and return the solution, its history and its cost.

    Args:
        problem: what to solve.
        clients: the data.
        algorithm: how, for example `FedNest(upper_lr=0.1, lower_lr=0.1)`.
        steps: how many steps (more of them, if `start` is given).
        seed: the same seed gives the same bits; default 0, or that of `start`.
        engine: "simulator", "process", "mesh", "nvflare", or an engine object.
        every: steps between two rows of the history; default: about 20 rows in all.
        measure: built-in measures for the history, on all data, not billed: "hypergradient_norm",
            "adjoint_residual", "lower_distance", "client_drift" (see `fedbilevel.algorithm.measure`).
        best: the point to keep as `result.best`, and when to stop early: `Best("test_accuracy", patience=5)`.
        start: an earlier result of the same algorithm, to go on from.
        callback: called with every new `Evaluation`; the run stops if it returns something true.
        progress: show a bar; default: when standard error is a terminal.

    A NaN or overflow ends the run with `diverged=True`, the last finite state and a `DivergenceWarning`.
    """
    check(problem, clients, algorithm, steps, every)
    steps, every = whole(steps), whole(every)
    if start is not None:
        _check_start(problem, clients, algorithm, start)
    seed = (0 if start is None else start.seed) if seed is None else seed
    _check_whole("seed", seed, 0)
    if best is not None and not isinstance(best, Best):
        raise TypeError(f"best is {best!r}; it must be a point to look for, such as Best('test_accuracy')")
    evaluate = Evaluator(problem, measure)
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(opened(engine))
        algorithm, smoothness, spent = ready(where, problem, clients, algorithm, seed, start)
        session = stack.enter_context(where.connect(problem, clients, algorithm, evaluate.probes))
        run = Run(algorithm, session, evaluate, seed, spent, start, smoothness, best, callback)
        done = 0 if start is None else start.steps
        tick = stack.enter_context(progress_bar(progress, done + steps, done=done))
        run.begin()
        _go(run, steps, every or usual_interval(steps), tick)
        run.warn(clients)
        return run.result()


def usual_interval(steps: int) -> int:
    """Steps between two evaluations, if nobody says: about 20 rows in all."""
    return max(1, -(-steps // 20))


def room(every: int, steps: int) -> int:
    """For how many records a block has room: fewer steps than `every` then compile nothing new."""
    return min(every, max(steps, 1024))


def _go(run: Run, steps: int, every: int, tick: Tick) -> None:
    last = run.step + steps
    while run.step < last and not run.ended:
        now = min(every, last - run.step)
        block = run.session.advance(run.state, run.key, run.step, now, room(every, steps))
        run.take(block)
        tick(block.done, run.rows[-1])


def ready(
    engine: Engine,
    problem: Problem,
    clients: Clients,
    algorithm: Algorithm[Any],
    seed: int,
    start: Result | None = None,
) -> tuple[Algorithm[Any], float | None, Ledger]:
    """The algorithm for these clients and this problem, its measured smoothness, and what has been spent."""
    spent, algorithm = Ledger() if start is None else start.ledger, algorithm.among(clients.n).on(problem)
    smoothness = None if start is None else start.smoothness
    if not (algorithm.needs_smoothness and problem.structure == "bilevel"):
        return algorithm, smoothness, spent
    if smoothness is None:
        smoothness, cost = measured_smoothness(engine, problem, clients, seed, algorithm)
        spent = spent + cost
    return with_smoothness(algorithm, smoothness), smoothness, spent


def check(problem: Problem, clients: Clients, algorithm: Any, steps: int, every: int | None) -> None:
    """Raise an error that explains if these cannot be run together."""
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
    for name, number, least in (("steps", steps, 0), ("every", every, 1)):
        if number is not None or name == "steps":
            _check_whole(name, number, least)
    if not bool(all_finite((problem.x0, problem.y0))):
        raise ValueError("x0 or y0 holds a NaN or an infinity: a run cannot start there")
    cohort = getattr(algorithm, "cohort", None)
    if cohort is not None:
        _check_whole("cohort", cohort, 1)
    if cohort is not None and not 1 <= cohort <= clients.n:
        raise ValueError(f"cohort is {cohort}, but there are {clients.n} clients; None means all of them")
    if cohort is not None and clients.has_weightless:
        raise ValueError("a sampled cohort may consist of clients of weight 0 alone; leave such clients out")
    together(lambda: problem.check(clients))  # in a mesh each process has its own clients' samples


def _check_whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")


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
