"""A cohort under conditions: clients are away, late or slow, as the clock of the step says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.engine.conditions.clock import Conditions, ticking
from fedbilevel.fed.codec import Codec, message_size
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.ledger import Counts
from fedbilevel.fed.place import At
from fedbilevel.tree import PyTree


class ConditionedCohort(Cohort):
    """The part of a simulated cohort that knows of conditions. Without a clock it does nothing.

    A client that is away gets no message, so it has no value to compute with and answers nothing; it can
    compute with what it keeps. A late one has computed: it keeps what it keeps, and is billed for its calls;
    only its answer is thrown away, and not billed.
    """

    def _there(self) -> Any:
        clock = ticking()
        return None if clock is None else clock.there(self.ids)

    def _arriving(self, whole: int, codec: Codec | None = None, who: Any = None) -> None:
        if (clock := ticking()) is not None:
            size = message_size(codec, whole, self.ids)
            clock.arrive(self.ids, size if who is None else size * who)

    def _computed(self, spent: Counts, present: Any) -> None:
        """Clients, or those who are present, computed what they spent, `(size,)` counts."""
        if (clock := ticking()) is not None:
            clock.compute(self.ids, spent, present)

    def _awaited(
        self, rows: PyTree, able: jax.Array, whole: int, codec: Codec | None
    ) -> tuple[PyTree, jax.Array]:
        if (clock := ticking()) is None:
            return rows, able
        answered = clock.answer(self.ids, message_size(codec, whole, self.ids), able)
        return (rows, able) if answered is able else self._gather(self._own(rows, present=answered))

    def _heard(self, value: At, answered: jax.Array) -> At:
        may_be_silent = ticking() is not None
        return self._own(value.value, present=answered) if may_be_silent else value

    def _delivered(self, weights: jax.Array, size: int) -> None:
        if (clock := ticking()) is not None:
            clock.deliver(self.ids, (weights != 0) & ~jnp.eye(self.size, dtype=bool), size)


def conditions_of(*settings: Any) -> Conditions | None:
    """The conditions that settings describe; None if there are none."""
    return None if all(setting is None for setting in settings) else Conditions(*settings)
