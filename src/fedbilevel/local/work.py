"""How much a client works between two exchanges: in steps, or in passes over its data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from fedbilevel.data.batches import Batch
from fedbilevel.fed.loop import repeat
from fedbilevel.number import check_count
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree

Amount: TypeAlias = int | tuple[int, ...]
"""A number for every client, or one number for each of them."""


class Work(eqx.Module):
    """Local work on the data of one level.

    Args:
        level: whose data the batches come from, `"upper"` or `"lower"`.
        steps: τ, the number of steps, each on an independent minibatch.
        epochs: if given, so many shuffled passes over the client's data in the place of `steps`; the
            last, short batch of a pass counts by its size.
        scaled: divide the step size by the client's own number of steps τ_i (the theory's `α/τ_i`).
    """

    level: str = eqx.field(static=True)
    steps: Amount = eqx.field(static=True, default=1)
    epochs: Amount | None = eqx.field(static=True, default=None)
    scaled: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        if self.level not in ("upper", "lower"):
            raise ValueError(f"level is {self.level!r}; it must be 'upper' or 'lower'")

    def run(
        self, me: Client, key: jax.Array, body: Callable[[Batch, Any, PyTree], PyTree], carry: PyTree
    ) -> PyTree:
        """`carry = body(batch, factor, carry)` as often as the work asks; `factor` scales the step."""
        scaling = 1 / jnp.asarray(self.total(me), float) if self.scaled else 1.0

        def on_batch(batch: Batch, carry: PyTree) -> PyTree:
            return body(batch, scaling * batch.share, carry)

        if self.epochs is None:
            return repeat(
                of_client(self.steps, me.id),
                lambda i, carry: on_batch(me.batch(self.level, jr.fold_in(key, i)), carry),
                carry,
            )
        return repeat(
            of_client(self.epochs, me.id),
            lambda i, carry: me.one_pass(self.level, jr.fold_in(key, i), on_batch, carry),
            carry,
        )

    @property
    def single(self) -> bool:
        """Whether it is one step, at every client."""
        return self.epochs is None and self.steps == 1

    def sees_all(self, me: Client) -> bool:
        """Whether the work reads at least as many samples as the largest client has."""
        width, longest = me.largest(self.level)
        least = self.steps if isinstance(self.steps, int) else min(self.steps)
        return self.epochs is not None or least * width >= longest

    def total(self, me: Client) -> Any:
        """τ_i, the number of steps this client makes."""
        if self.epochs is None:
            return of_client(self.steps, me.id)
        return of_client(self.epochs, me.id) * me.batches_in_pass(self.level)


def of_client(amount: Amount, id: Any) -> Any:
    """A client's own number."""
    return amount if isinstance(amount, int) else jnp.asarray(amount, jnp.int32)[id]


def most(amount: Amount) -> int:
    """The largest number of a client."""
    return amount if isinstance(amount, int) else max(amount)


def amount(value: Any) -> Any:
    """A setting as an `Amount`: lists and vectors of whole numbers become tuples, which are hashable."""
    if isinstance(value, list | tuple | np.ndarray):
        return tuple(int(number) if isinstance(number, np.integer) else number for number in value)
    return int(value) if isinstance(value, np.integer) else value


def check_amounts(settings: Any, *names: str) -> None:
    """Check the named fields of an algorithm: a number, one for each client, or None."""
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, tuple):
            for client, number in enumerate(value):
                check_count(f"{name} of client {client}", number)
        elif value is not None:
            check_count(name, value)
