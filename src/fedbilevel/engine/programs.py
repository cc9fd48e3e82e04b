"""The programs of an algorithm: both ends of a wire find the same list, so no code travels."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp

from fedbilevel.data.batches import Samples
from fedbilevel.data.clients import Clients
from fedbilevel.engine.base import Stepper
from fedbilevel.engine.handle import spec_of, spec_of_rows
from fedbilevel.engine.simulated_cohort import SimulatedCohort
from fedbilevel.engine.simulator import SimulatedFederation
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.ledger import metering
from fedbilevel.fed.place import At
from fedbilevel.fed.program import Program
from fedbilevel.problem.base import Problem
from fedbilevel.tree import PyTree

Shapes: TypeAlias = Callable[[Program, list[PyTree]], PyTree]
"""The shapes of what a program returns at a client, for values of given shapes."""


def programs_of(
    problem: Problem, own: Clients, n: int, stepper: Stepper, probes: Sequence[Stepper], shapes: Shapes
) -> list[Program]:
    """Every local program that an algorithm may run, in the order in which it first does.

    Found by tracing its start and one step, abstractly: nothing is computed.

    Args:
        problem: what is solved.
        own: the data of any one client (only shapes matter).
        n: how many clients there are.
        stepper: the algorithm.
        probes: what may be asked between its steps.
        shapes: traces a program, and may keep the trace for the run.
    """
    found: dict[Any, Program] = {}

    def noted(program: Program, values: list[PyTree]) -> PyTree:
        found.setdefault(jax.tree.structure(program), program)
        return shapes(program, values)

    fed = _Rehearsal(problem, _as_if(own, n), answer=noted)

    def walk(key: jax.Array) -> Any:
        with metering():
            steppers = [stepper.at(0), *probes]
            return [each.step(fed, each.init(fed, key), key) for each in steppers]

    jax.eval_shape(walk, jax.random.key(0))
    return list(found.values())


class _Rehearsal(SimulatedFederation):
    """A federation whose clients compute nothing: what they return has the right shapes, and is zero."""

    answer: Shapes = eqx.field(static=True, kw_only=True)

    def _cohort(self, ids: jax.Array, token: str, weights: Any) -> Cohort:
        return _RehearsalCohort(self, ids, token, weights)


class _RehearsalCohort(SimulatedCohort):
    fed: _Rehearsal

    def _run(self, program: Program, values: tuple[At, ...], key: jax.Array, *, fails: bool) -> At:
        given = [spec_of_rows(v.value) if v.stacked else spec_of(v.value) for v in values]
        out = self.fed.answer(program, given)
        rows = jax.tree.map(lambda leaf: jnp.zeros((self.size, *leaf.shape), leaf.dtype), out)
        return self._own(rows, present=self._present(values, key, 0.0))


def names(programs: list[Program]) -> list[str]:
    """What two ends compare before they work together: class and static settings of each program."""
    return [re.sub(r" at 0x\w+", "", repr(jax.tree.structure(program))) for program in programs]


def _as_if(own: Clients, n: int) -> Clients:
    """One client's data as if all `n` clients had them."""
    lower, upper, test = (_spread(samples, n) for samples in (own.lower, own.upper, own.test))
    return Clients(lower, upper, test=test)


def _spread(s: Samples, n: int) -> Samples:
    start, size = (jnp.broadcast_to(rows, (n,)) for rows in (s.start, s.size))
    return Samples(s.flat, start, size, s.rows, s.batch_size, s.longest, s.smallest)
