"""The clock of a step: what conditions make of the messages and computations of clients."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from fedbilevel.engine.conditions.availability import Availability, Bernoulli
from fedbilevel.engine.conditions.per_client import Numbers, checked
from fedbilevel.engine.conditions.timing import Link, Seconds, Speed
from fedbilevel.fed.ledger import SECONDS, Counts, count


class Conditions(eqx.Module):
    """Under which conditions a federation is simulated. None: no such condition.

    Args:
        availability: who is there; a number or numbers are the probabilities of `Bernoulli`.
        speed: how fast clients compute; a number or numbers are the seconds of an oracle call.
        link: how fast messages travel; a number or numbers are latencies in seconds.
        deadline: seconds after which the server waits no longer for an answer.
    """

    availability: Availability | None
    speed: Speed | None
    link: Link | None
    deadline: Any

    def __init__(
        self,
        availability: Availability | Numbers | None = None,
        speed: Speed | Numbers | None = None,
        link: Link | Numbers | None = None,
        deadline: float | None = None,
    ) -> None:
        self.availability = _made(Bernoulli, Availability, availability, "availability")
        self.speed, self.link = _made(Speed, Speed, speed, "speed"), _made(Link, Link, link, "link")
        self.deadline = None if deadline is None else _deadline(deadline)
        if deadline is not None and not self.timed:
            raise ValueError(
                f"deadline is {deadline} s, but nobody can be late: say how long things take with "
                "speed= or link="
            )

    @property
    def timed(self) -> bool:
        """Whether there is a model of time."""
        return self.speed is not None or self.link is not None

    def check(self, n: int) -> None:
        """Raise an error that explains unless these can be the conditions of n clients."""
        for part in (self.availability, self.speed, self.link):
            if part is not None:
                part.check(n)

    @contextlib.contextmanager
    def step(self, n: int, key: Key[Array, ""], step: Any) -> Iterator[None]:
        """Inside, one step of n clients is traced under these conditions.

        Args:
            n: how many clients there are.
            key: of the run.
            step: the number of the step.
        """
        clock = Clock(self, n, jax.random.fold_in(key, _OWN), jnp.asarray(step, jnp.int32))
        token = _open.set(clock)
        try:
            yield
            clock.finish()
        finally:
            _open.reset(token)


_OWN = 0x71CC
"""Folded into the key of a run: conditions draw from a key that no algorithm has."""

_open: contextvars.ContextVar[Clock | None] = contextvars.ContextVar("clock", default=None)


def ticking() -> Clock | None:
    """The clock of the step that is traced; None if there are no conditions."""
    return _open.get()


def moment() -> Any:
    """What a compiled loop has to carry for the clock of the step that is traced, if there is one."""
    clock = ticking()
    return () if clock is None else clock.moment


def set_moment(moment: Any) -> None:
    """Set the clock of the step that is traced, if there is one, to what a loop has carried."""
    if (clock := ticking()) is not None:
        clock.moment = moment


class Clock:
    """The clients' time since the last exchange, while one step is traced.

    What clients are sent and compute adds up to their own time; when they are read, the exchange takes as
    long as the last of those who answer in time, and their own times begin again.

    Attributes:
        moment: `(own, exchange)`: every client's seconds, `(n,)`, and the number of exchanges so far. What
            a compiled loop has to carry.
    """

    def __init__(self, conditions: Conditions, n: int, key: Key[Array, ""], step: Int[Array, ""]) -> None:
        self.conditions, self.key, self.step = conditions, key, step
        self.moment = jnp.zeros(n, jnp.float32), jnp.zeros((), jnp.int32)
        self._everyone = self._drawn(jnp.arange(n))  # once a step, and not once an exchange

    def there(self, ids: Int[Array, " size"]) -> Bool[Array, " size"] | None:
        """Who of a cohort is there; all of them where nobody would be; None: nobody can be away."""
        return self._everyone if ids.shape == self.moment[0].shape else self._drawn(ids)

    def _drawn(self, ids: Int[Array, " size"]) -> Bool[Array, " size"] | None:
        if self.conditions.availability is None:
            return None
        there = self.conditions.availability.there(self.key, self.step, ids)
        return there | ~jnp.any(there)

    # --------------------------------------------------------------- clients

    def arrive(self, ids: Int[Array, " size"], size: Any) -> None:
        """Messages of `size` bytes, one number or one each, go down to clients."""
        if self.conditions.link is not None:
            there = self.there(ids)
            seconds = self.conditions.link.receiving(self._exchange_key(), ids, size)
            self._add(ids, seconds if there is None else jnp.where(there, seconds, 0))

    def compute(self, ids: Int[Array, " size"], spent: Counts, present: Any) -> None:
        """Clients compute; `spent` has `(size,)` counts, `present` those who do, None: all."""
        if self.conditions.speed is not None:
            key = jax.random.fold_in(self._exchange_key(), 3)
            seconds = self.conditions.speed.seconds(key, ids, spent)
            self._add(ids, seconds if present is None else jnp.where(present, seconds, 0))

    def _add(self, ids: Int[Array, " size"], seconds: Seconds) -> None:
        own, exchange = self.moment
        self.moment = own.at[ids].add(seconds.astype(own.dtype)), exchange

    # ------------------------------------------------------------- exchanges

    def answer(self, ids: Int[Array, " size"], size: Any, able: Bool[Array, " size"]) -> Bool[Array, " size"]:
        """Who of a cohort answers; the time that it takes is booked.

        Where nobody would answer in time the server waits on, until all have answered who can.

        Args:
            ids: of the cohort, all of whom are asked.
            size: bytes of an answer, one number or one each.
            able: who has one.
        """
        there = self.there(ids)
        if there is not None:
            able = jnp.where(jnp.any(able & there), able & there, able)
        if not self.conditions.timed:
            return able
        own = self.moment[0][ids]
        if self.conditions.link is not None:
            own = own + self.conditions.link.there_and_back(self._exchange_key(), ids, size)
        answered = self._in_time(able, own)
        self._end(ids, self._waited(answered, own))
        return answered

    def deliver(self, ids: Int[Array, " size"], edges: Bool[Array, "size size"], size: int) -> None:
        """A cohort sends to each other, `edges[i, j]`: j to i; it takes as long as the last message.

        Nobody gives up: the deadline is the server's.
        """
        if not self.conditions.timed:
            return
        own, there, link = self.moment[0][ids], self.there(ids), self.conditions.link
        last = jnp.max(own if there is None else jnp.where(there, own, 0))
        if link is not None:
            last = jnp.maximum(last, link.over_edges(self._exchange_key(), ids, own, edges, size))
        self._end(ids, last)

    def finish(self) -> None:
        """The end of a step: what is still under way is waited for, no longer than the deadline."""
        if self.conditions.timed:
            last, deadline = jnp.max(self.moment[0]), self.conditions.deadline
            count(SECONDS, last if deadline is None else jnp.minimum(last, deadline))

    def _in_time(self, able: Bool[Array, " size"], own: Seconds) -> Bool[Array, " size"]:
        if self.conditions.deadline is None:
            return able
        in_time = able & (own <= self.conditions.deadline)
        return jnp.where(jnp.any(in_time), in_time, able)

    def _waited(self, answered: Bool[Array, " size"], own: Seconds) -> jax.Array:
        """Until the last answer; until the deadline if one is missing."""
        last = jnp.max(jnp.where(answered, own, 0))
        if self.conditions.deadline is None:
            return last
        return jnp.where(jnp.all(answered), last, jnp.maximum(last, self.conditions.deadline))

    def _end(self, ids: Int[Array, " size"], seconds: jax.Array) -> None:
        """An exchange with some clients is over: their own times begin again, also of those who were late."""
        own, exchange = self.moment
        self.moment = own.at[ids].set(0), exchange + 1
        count(SECONDS, seconds)

    def _exchange_key(self) -> jax.Array:
        own = jax.random.fold_in(self.key, self.step)
        return jax.random.fold_in(own, self.moment[1])


def _made(make: Any, kind: type, given: Any, name: str) -> Any:
    """What was given, or what its numbers are short for."""
    if given is None or isinstance(given, kind):
        return given
    numbers = isinstance(given, int | float | Sequence) and not isinstance(given, str)
    if not (numbers or eqx.is_array(given)):
        raise TypeError(
            f"{name} is {given!r}; it must be a number, one for each client, or one of "
            f"fedbilevel.conditions, such as {make.__name__}(...)"
        )
    return make(checked(given, name, 0.0, float("inf")))


def _deadline(value: Any) -> jax.Array:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"deadline is {value!r}; it must be a number of seconds above 0")
    return jnp.asarray(value, jnp.float32)
