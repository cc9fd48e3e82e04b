"""Rounds of anchored local descent: FedInn on y, with what may ride in its messages, and FedOut on x."""

from __future__ import annotations

from typing import Any

import jax
import jax.random as jr

from fedbilevel.algorithm.exchange import Point
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.place import At
from fedbilevel.fed.program import Program
from fedbilevel.local.descent import Descent
from fedbilevel.local.gradients import LowerGradient
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree


class Along(Program):
    """`(x, y, *vectors) ↦ (main(x, y), rider(x, y, *vectors))`: two answers in one message.

    Each draws batches of its own.
    """

    main: Program
    rider: Program

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y, *vectors = values
        return self.main(me.rekeyed(0), x, y), self.rider(me.rekeyed(1), x, y, *vectors)


def lower_round(
    cohort: Cohort,
    descent: Descent,
    x: At,
    y: PyTree,
    key: jax.Array,
    *vectors: PyTree,
    anchored: bool,
    rider: Program | None = None,
) -> tuple[PyTree, PyTree]:
    """`y⁺ = FedInn(x, y)`, and the mean of what rides along: an answer about `(x, y)`, y before the round.

    Args:
        cohort: the clients of the round.
        descent: their local steps on y.
        x: at the clients.
        y: at the server.
        key: of the round.
        *vectors: what the rider needs; they go down with y.
        anchored: the steps are corrected by `q = mean ∇_y g_i(x, y)`.
        rider: what else clients answer in their first message of the round; None: nothing.

    Returns:
        `y⁺`, and the mean of the rider's answers; () without one.

    Cost: with an anchor two exchanges of d_y scalars each way, without one; what rides adds scalars only.

    Reference: FedNest, algorithms 4 (anchored) and 6.
    """
    k_anchor, k_steps = jr.split(key)
    there = cohort.send(y, "y")
    sent = [cohort.send(vector, "u") for vector in vectors]

    def first(program: Program, label: str, key: jax.Array) -> tuple[PyTree, PyTree]:
        if rider is None:
            return cohort.mean(cohort.run(program, x, there, key=key), label), ()
        both: tuple[PyTree, PyTree] = cohort.mean(
            cohort.run(Along(program, rider), x, there, *sent, key=key), f"{label}u"
        )
        return both

    if not anchored:
        return first(descent, "y", k_steps)
    q, answer = first(LowerGradient(), "q", k_anchor)
    steps = cohort.run(descent, x, there, cohort.send(q, "q"), key=k_steps)
    return cohort.mean(steps, "y"), answer


def upper_round(cohort: Cohort, descent: Descent, point: Point, h: PyTree, key: jax.Array) -> PyTree:
    """`x⁺`: local steps on x, corrected by the hypergradient h. One exchange of d_x scalars each way.

    Reference: FedNest, algorithm 2.
    """
    x, y, _ = point.read(cohort)
    return cohort.mean(cohort.run(descent, x, y, cohort.send(h, "h"), key=key), "x")
