"""What a run will take, from one step of it."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedbilevel.experiment.build import build
from fedbilevel.experiment.config import Plan
from fedbilevel.experiment.evaluate import Evaluator
from fedbilevel.experiment.loop import Run
from fedbilevel.experiment.run import check, ready, room
from fedbilevel.fed.ledger import Ledger

LONG = 120.0
"""Seconds: a first step that took longer is not made a second time to see it without compilation."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What one step took here, and the whole run therefore will.

    Attributes:
        preparation: seconds for data, compilation and the first evaluation.
        step, evaluation: seconds of one.
        spent: of one step.
        before: spent before the first one: for measuring the smoothness, for first momenta.
        diverged: whether already the first step gave no finite numbers.
        steps, evaluations: how many there will be.
        memory: the largest this process has been so far, in bytes.
        once: whether the step was so long that it was made once only: its time has compilation in it.
        remarks: what the method says of itself (`Algorithm.remarks`).
    """

    preparation: float
    step: float
    evaluation: float
    spent: Ledger
    before: Ledger
    diverged: bool
    steps: int
    evaluations: int
    memory: int
    once: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        return self.preparation + self.steps * self.step + self.evaluations * self.evaluation

    def __str__(self) -> str:
        sent = self.before.bytes + self.steps * self.spent.bytes
        rounds = self.before.rounds + self.steps * self.spent.rounds
        return (
            f"{self.steps:,} steps: {self._about} {duration(self.seconds)}, {sent / 1e6:,.1f} MB sent in "
            f"{rounds:,} rounds, {self.memory / 2**30:.2f} GiB of memory{self._trouble}\n"
            f"  one step{self._compiled} {self.step * 1e3:,.1f} ms, "
            f"an evaluation {self.evaluation * 1e3:,.1f} ms, "
            f"preparation {self.preparation:.1f} s" + "".join(f"\n  {remark}" for remark in self.remarks)
        )

    @property
    def _about(self) -> str:
        return "at most" if self.once else "about"

    @property
    def _compiled(self) -> str:
        return " with its compilation" if self.once else ""

    @property
    def _trouble(self) -> str:
        return "; the first step already DIVERGES" if self.diverged else ""


class _Trial(NamedTuple):
    """What one step took, in seconds: to compile it, to make it, to evaluate where it led; and its cost."""

    compilation: float = 0.0
    step: float = 0.0
    evaluation: float = 0.0
    spent: Ledger = Ledger()
    once: bool = False


def estimate(plan: Plan) -> Estimate:
    """Build a run, do one step (a short one twice: the first time it is compiled) and evaluate it.

    A run of no steps is only begun. Writes nothing.
    """
    began = time.perf_counter()
    with jax.enable_x64(plan.config["precision"] == "float64"):
        built, steps, every = build(plan), int(plan.config["steps"]), int(plan.config["every"])
        problem, clients, algorithm, engine, best = built
        check(problem, clients, algorithm, steps, every)
        evaluate = Evaluator(problem, plan.config.get("measure", ()))
        algorithm, _, cost = ready(engine, problem, clients, algorithm, plan.seed)
        with engine.connect(problem, clients, algorithm, evaluate.probes) as session:
            run = Run(algorithm, session, evaluate, plan.seed, cost, best=best)
            run.begin()
            before, preparation = run.ledger, time.perf_counter() - began
            trial = _tried(run, room(every, steps)) if steps else _Trial()
    return Estimate(
        *(preparation + trial.compilation, trial.step, trial.evaluation, trial.spent, before, run.diverged),
        *(steps, -(-steps // every), _memory(), trial.once, built.algorithm.remarks(problem, clients)),
    )


def _tried(run: Run, capacity: int) -> _Trial:
    """The first step of a run, made and evaluated."""
    state = run.state
    first, block = _timed(lambda: run.session.advance(state, run.key, 0, 1, capacity))
    evaluation, _ = _timed(lambda: run.take(block))
    spent = Ledger.from_counts(block.counts)
    if first > LONG:
        return _Trial(0.0, first, evaluation, spent, once=True)
    step, _ = _timed(lambda: run.session.advance(state, run.key, 0, 1, capacity))
    return _Trial(first, step, evaluation, spent)


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """How many seconds it takes, and what comes out."""
    start = time.perf_counter()
    out = jax.block_until_ready(work())
    return time.perf_counter() - start, out


def _memory() -> int:
    """The largest resident size so far; Linux counts it in kilobytes, macOS in bytes."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size


def duration(seconds: float) -> str:
    """Seconds as people say them.

    Example:
        >>> duration(12), duration(150), duration(9000)
        ('12 s', '2.5 min', '2.5 h')
    """
    for size, name in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} s"
