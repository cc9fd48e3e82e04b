"""Many runs at once: those that differ in numbers only are one vmapped program."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithm.base import Algorithm
from fedbilevel.data.clients import Clients
from fedbilevel.engine.base import Block, Engine
from fedbilevel.engine.simulator import SimulatedSession, Simulator, simulate
from fedbilevel.experiment.best import Best
from fedbilevel.experiment.engines import opened
from fedbilevel.experiment.evaluate import Evaluator
from fedbilevel.experiment.loop import Callback, Run
from fedbilevel.experiment.progress import Tick, progress_bar
from fedbilevel.experiment.record import Result
from fedbilevel.experiment.run import check, ready, room, solve, usual_interval
from fedbilevel.problem.base import Problem
from fedbilevel.tree import PyTree, row


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a sweep; the fields are arguments of `solve`."""

    problem: Problem
    clients: Clients
    algorithm: Algorithm[Any]
    seed: int = 0
    best: Best | None = None
    start: Result | None = None
    callback: Callback | None = None


def sweep(
    jobs: Sequence[Job],
    steps: int,
    *,
    engine: str | Engine = "simulator",
    every: int | None = None,
    measure: Sequence[str] = (),
    progress: bool | None = None,
) -> list[Result]:
    """The results of all jobs, each as `solve` would give it, to rounding.

    In the simulator, jobs on the same clients whose problems and algorithms differ in numbers only (step
    sizes, starting points, seeds) run together as one compiled, vmapped program; others one by one.

    Example:
        >>> import fedbilevel as fb
        >>> known = fb.Saddle.random(jax.random.key(0), clients=3, d=2)
        >>> problem, clients = known.problem(), known.clients()
        >>> jobs = [Job(problem, clients, fb.FedAvgS(lr, 0.1)) for lr in (0.01, 0.1)]
        >>> [result.steps for result in sweep(jobs, steps=2)]
        [2, 2]
    """
    results: list[Result | None] = [None] * len(jobs)
    with opened(engine) as where:
        groups = list(lanes(jobs)) if isinstance(where, Simulator) else [[i] for i in range(len(jobs))]
        for group in groups:
            found = _together(where, [jobs[i] for i in group], steps, every, measure, progress)
            for place, result in zip(group, found, strict=True):
                results[place] = result
    return [result for result in results if result is not None]


def lanes(jobs: Sequence[Job]) -> Iterator[list[int]]:
    """The places of jobs that can be one program, group by group."""
    left = list(range(len(jobs)))
    while left:
        group = [i for i in left if _alike(jobs[left[0]], jobs[i])]
        yield group
        left = [i for i in left if i not in group]


def _alike(a: Job, b: Job) -> bool:
    """Whether two jobs differ in nothing but numbers."""
    if a.clients is not b.clients or _steps_done(a) != _steps_done(b):
        return False
    return _form((a.problem, a.algorithm)) == _form((b.problem, b.algorithm))


def _steps_done(job: Job) -> int:
    return 0 if job.start is None else job.start.steps


def _form(tree: PyTree) -> Any:
    """Structure, static settings, and shapes and dtypes of the numbers."""
    leaves, structure = jax.tree.flatten(tree)
    shapes = [(np.shape(leaf), jnp.result_type(leaf)) if eqx.is_array_like(leaf) else leaf for leaf in leaves]
    return structure, shapes


# ------------------------------------------------------------------ one group


def _together(
    engine: Engine,
    jobs: list[Job],
    steps: int,
    every: int | None,
    measure: Sequence[str],
    progress: bool | None,
) -> list[Result]:
    if len(jobs) == 1:
        (job,) = jobs
        settings = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
        return [
            solve(**settings, steps=steps, every=every, measure=measure, engine=engine, progress=progress)
        ]
    with contextlib.ExitStack() as stack:
        done = 0 if jobs[0].start is None else jobs[0].start.steps
        tick = stack.enter_context(progress_bar(progress, done + steps, f"{len(jobs)} runs", done))
        runs = [stack.enter_context(_begun(engine, job, steps, every, measure)) for job in jobs]
        _go(runs, steps, every or usual_interval(steps), tick)
        for run, job in zip(runs, jobs, strict=True):
            run.warn(job.clients)
        return [run.result() for run in runs]


@contextlib.contextmanager
def _begun(engine: Engine, job: Job, steps: int, every: int | None, measure: Sequence[str]) -> Iterator[Run]:
    check(job.problem, job.clients, job.algorithm, steps, every)
    algorithm, smoothness, spent = ready(engine, job.problem, job.clients, job.algorithm, job.seed, job.start)
    evaluate = Evaluator(job.problem, measure)
    with engine.connect(job.problem, job.clients, algorithm, evaluate.probes) as session:
        run = Run(
            *(algorithm, session, evaluate, job.seed, spent),
            *(job.start, smoothness, job.best, job.callback),
        )
        run.begin()
        yield run


def _go(runs: list[Run], steps: int, every: int, tick: Tick) -> None:
    """All runs side by side; one that has ended stays in the batch, and its steps are thrown away."""
    step, last = runs[0].step, runs[0].step + steps
    sessions = [run.session for run in runs if isinstance(run.session, SimulatedSession)]
    varying, shared = _separated([(session.federation, session.stepper) for session in sessions])
    keys = jnp.stack([run.key for run in runs])
    while step < last and not all(run.ended for run in runs):
        now, capacity = min(every, last - step), room(every, steps)
        states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(run.state for run in runs))
        times = jnp.asarray(step, int), jnp.asarray(now, int)
        blocks = _advance(varying, shared, states, keys, *times, capacity)
        for lane, run in enumerate(runs):
            if not run.ended:
                run.take(_block_of(run, blocks, lane, now, capacity))
        step += now
        tick(now, runs[0].rows[-1])


def _block_of(run: Run, blocks: Block, lane: int, steps: int, capacity: int) -> Block:
    """One lane's block; a lane that broke is run again alone, which finds its last finite state."""
    if not bool(blocks.finite[lane]):
        return run.session.advance(run.state, run.key, run.step, steps, capacity)
    block = row(blocks, lane)
    return block._replace(done=int(block.done), finite=True)


def _separated(trees: list[PyTree]) -> tuple[PyTree, PyTree]:
    """What differs between the trees, stacked; and the first of them with None in its place."""
    flat = [jax.tree.leaves(tree) for tree in trees]
    differs = [any(not _same(leaf, leaves[0]) for leaf in leaves[1:]) for leaves in zip(*flat, strict=True)]
    mask = jax.tree.unflatten(jax.tree.structure(trees[0]), differs)
    parts = [eqx.filter(tree, mask) for tree in trees]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts), eqx.filter(trees[0], mask, inverse=True)


def _same(a: Any, b: Any) -> bool:
    if not eqx.is_array_like(a):  # a word, or a function
        return bool(a == b)
    return a is b or bool(np.array_equal(np.asarray(a), np.asarray(b)))


@eqx.filter_jit
def _advance(
    varying: PyTree, shared: PyTree, states: PyTree, keys: jax.Array, first: Any, steps: Any, capacity: int
) -> Block:
    def one(varying: PyTree, state: PyTree, key: jax.Array) -> Block:
        fed, stepper = eqx.combine(varying, shared)
        return simulate(fed, stepper, state, key, first, steps, capacity)

    return jax.vmap(one)(varying, states, keys)
