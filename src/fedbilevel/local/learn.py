"""Learning: steps of an optimiser on a client's own upper objective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.random as jr

from fedbilevel.fed.loop import repeat
from fedbilevel.local.optimizer import Optimizer
from fedbilevel.local.work import Amount, of_client
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree, times


class Learn(eqx.Module):
    """`y ↦ y`: so many steps of an optimiser on `f_i(x, ·)`, each on a fresh minibatch.

    Where a client holds a part of y only, the others do not move (`held`), and the slope may be taken at
    another point than y, such as its largest entries (`seen`).

    Attributes:
        rule: the optimiser, which starts anew.
        steps: how many; a number, or a tuple with one for each client.
    """

    rule: Optimizer
    steps: Amount = eqx.field(static=True)

    def __call__(
        self,
        me: Client,
        x: PyTree,
        y: PyTree,
        held: PyTree | None = None,
        seen: Callable[[PyTree], PyTree] = lambda y: y,
    ) -> PyTree:
        def body(index: Any, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            slope = me.f_y(x, seen(carry[0]), me.batch("upper", jr.fold_in(me.key, index)))
            return self.rule.step(carry[0], slope if held is None else times(held, slope), carry[1])

        learnt, _ = repeat(of_client(self.steps, me.id), body, (y, self.rule.init(y)))
        return learnt
