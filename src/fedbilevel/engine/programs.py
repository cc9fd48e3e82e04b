"""The programs of an algorithm: both ends of a wire find the same list, so no code travels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.data.batches import Samples
from fedbilevel.data.clients import Clients
from fedbilevel.engine.base import Stepper
from fedbilevel.engine.simulator import SimulatedFederation
from fedbilevel.fed.ledger import metering
from fedbilevel.fed.program import Program
from fedbilevel.problem.base import Problem


def programs_of(
    problem: Problem, own: Clients, n: int, stepper: Stepper, probes: Sequence[Stepper] = ()
) -> list[Program]:
    """Every local program that an algorithm may run, in the order in which it first does.

    Found by tracing its start and one step, abstractly: nothing is computed.

    Args:
        problem: what is solved.
        own: the data of any one client (only shapes matter).
        n: how many clients there are.
        stepper: the algorithm.
        probes: what may be asked between its steps.
    """
    found: dict[Any, Program] = {}

    def note(program: Program) -> None:
        found.setdefault(jax.tree.structure(program), program)

    # One client at a time: no batching rule is asked for that a real client would not need.
    fed = SimulatedFederation(problem, _as_if(own, n), chunk=1, observe=note)

    def walk(key: jax.Array) -> Any:
        with metering():
            steppers = [stepper.at(0), *probes]
            return [each.step(fed, each.init(fed, key), key) for each in steppers]

    jax.eval_shape(walk, jax.random.key(0))
    return list(found.values())


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
