"""The simulator: all clients in one process, the whole step in one compiled program."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from fedbilevel.data.clients import Clients
from fedbilevel.engine.base import Block, Engine, Session, Stepper, check_dropout, check_step
from fedbilevel.engine.conditions import Availability, Conditions, Link, Speed
from fedbilevel.engine.conditions.clock import moment, set_moment
from fedbilevel.engine.conditions.cohort import conditions_of
from fedbilevel.engine.conditions.per_client import Numbers
from fedbilevel.engine.simulated_cohort import SimulatedCohort
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.federation import Federation, choose
from fedbilevel.fed.ledger import Counts, as_arrays, metering
from fedbilevel.fed.loop import repeat, trace_once, zeros
from fedbilevel.fed.place import At, Kept, PlacementError, Published, is_at
from fedbilevel.problem.base import Problem
from fedbilevel.tree import PyTree, all_finite

_tokens = itertools.count()


class Simulator(eqx.Module, Engine):
    """Runs everything in this process, as one XLA program.

    Args:
        chunk: how many clients are computed at once; None: all of a cohort (`vmap`). A small number
            saves memory, and on CPU 1 makes convolutions with per-client weights faster (and
            `Problem(block=8)`, a few samples at a time, faster still).
        dropout: probability that a client does not answer after a local computation.
        availability: who is there in which step: a probability, one for each client, or one of
            `fedbilevel.conditions`, such as `OnOff(leaves=0.1, returns=0.3)`.
        speed: how fast clients compute: seconds of an oracle call, one for each client, or `Speed(...)`.
        link: how fast messages travel: latency in seconds, one for each client, or `Link(...)`.
        deadline: seconds that the server waits for answers in an exchange; None: until all are there.

    With `speed` or `link` the history has a column `simulated_seconds`. An exchange takes as long as the last
    who answers needs to receive, compute and send; until the deadline, if someone does not answer.

    A NaN of one client makes the mean NaN and ends the run as diverged (`Process` leaves that client out).
    """

    chunk: int | None = eqx.field(static=True, default=None)
    dropout: float = eqx.field(static=True, default=0.0)
    availability: Availability | Numbers | None = None
    speed: Speed | Numbers | None = None
    link: Link | Numbers | None = None
    deadline: float | None = None

    def __check_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk is {self.chunk}; it must be at least 1, or None for all at once")
        check_dropout(self.dropout)
        self._conditions()

    @contextlib.contextmanager
    def connect(
        self, problem: Problem, clients: Clients, stepper: Stepper, probes: Sequence[Stepper] = ()
    ) -> Iterator[Session]:
        yield self.federation(problem, clients).compile(stepper)

    def federation(self, problem: Problem, clients: Clients) -> SimulatedFederation:
        """The federation itself, for those who write their own loop around `step`."""
        conditions = self._conditions()
        if conditions is not None:
            conditions.check(clients.n)
        return SimulatedFederation(problem, clients, self.chunk, self.dropout, conditions=conditions)

    def _conditions(self) -> Conditions | None:
        return conditions_of(self.availability, self.speed, self.link, self.deadline)


class SimulatedFederation(eqx.Module, Federation):
    """All clients as rows of arrays. A pytree, so that data are arguments of a compiled program."""

    problem: Problem
    clients: Clients
    chunk: int | None = eqx.field(static=True, default=None)
    dropout: float = eqx.field(static=True, default=0.0)
    conditions: Conditions | None = None

    @property
    def n(self) -> int:  # type: ignore[override]
        return self.clients.n

    @property
    def everyone(self) -> Cohort:
        return self._cohort(jnp.arange(self.n), "everyone", self.clients.weights)

    def _sample(self, key: jax.Array, size: int) -> Cohort:
        ids, weights = choose(key, self.n, size), self.clients.weights
        return self._cohort(ids, f"sample {next(_tokens)}", None if weights is None else weights[ids])

    def _cohort(self, ids: jax.Array, token: str, weights: Any) -> Cohort:
        return SimulatedCohort(self, ids, token, weights)

    def publish(self, value: PyTree, label: str) -> Published:
        return Published(value, jnp.zeros(self.n, bool), label)

    def _keep(self, stacked: PyTree) -> Kept:
        return Kept(jax.tree.map(jnp.asarray, stacked))

    def stacked(self, kept: Kept) -> PyTree:
        return kept.value

    def compile(self, algorithm: Stepper) -> Session:
        return SimulatedSession(self, algorithm)

    def all_finite(self, state: PyTree) -> jax.Array:
        """Whether no number of a state is a NaN or an infinity."""
        return all_finite(state)

    def in_step(self, key: jax.Array, step: Any) -> contextlib.AbstractContextManager[None]:
        """Inside, step number `step` of the run with this key is traced under the federation's conditions.

        Those who write their own loop around `step` open it for each; conditions are not seen outside.
        """
        if self.conditions is None:
            return contextlib.nullcontext()
        return self.conditions.step(self.n, key, step)

    def loop(self, times: Any, body: Callable[[Any, PyTree], PyTree], carry: PyTree) -> PyTree:
        """Client values in the carry become plain arrays for the compiled loop, and client values again."""
        examples, treedef = jax.tree.flatten(carry, is_leaf=is_at)

        def inside(index: Any, carried: PyTree) -> PyTree:
            plain, now = carried
            set_moment(now)
            new = body(index, _placed(plain, treedef, examples))
            found: Any = jax.tree.structure(new, is_leaf=is_at)
            if found != treedef:
                raise TypeError(f"the body of a loop must return what it got, {treedef}; it returned {found}")
            return self._plain(new, examples), moment()

        plain, now = repeat(times, inside, (self._plain(carry, examples), moment()))
        set_moment(now)
        return _placed(plain, treedef, examples)

    def _plain(self, carry: PyTree, examples: list[Any]) -> list[Any]:
        """The leaves of a carry, with `(value, present)` in the place of a client value."""
        leaves = jax.tree.leaves(carry, is_leaf=is_at)
        for leaf, example in zip(leaves, examples, strict=True):
            tokens = [at.cohort if isinstance(at, At) else None for at in (leaf, example)]
            if tokens[0] != tokens[1] or (isinstance(leaf, At) and not leaf.stacked):
                raise PlacementError(
                    "what `fed.loop` carries must stay where it is: a client value of one cohort must come "
                    "out of the body as a client value of that cohort, computed by `run`. Send a server "
                    "value inside the body, and keep what outlives a cohort with `fed.keep`."
                )
        return [self._pair(leaf) if isinstance(leaf, At) else leaf for leaf in leaves]

    def _pair(self, at: At) -> tuple[PyTree, Any]:
        if at.present is not None or (self.dropout == 0 and self.conditions is None):
            return at.value, at.present
        return at.value, jnp.ones(jax.tree.leaves(at.value)[0].shape[0], bool)


class SimulatedSession(Session):
    """An algorithm in a simulator: many steps are one compiled program."""

    def __init__(self, federation: SimulatedFederation, stepper: Stepper) -> None:
        # Step sizes as arrays are arguments of the compiled program: another value needs no compilation.
        self.federation: SimulatedFederation = federation
        self.stepper = jax.tree.map(_array_if_number, stepper)

    def init(self, key: jax.Array) -> tuple[PyTree, Counts]:
        state, counts = _begin(self.federation, self.stepper, key)
        return state, counts

    def advance(self, state: PyTree, key: jax.Array, first: int, steps: int, capacity: int) -> Block:
        block = self._advance(state, key, first, steps, capacity)
        if block.finite:
            return block
        # The same steps again, without the one that broke: cheaper than saving every state.
        before = self._advance(state, key, first, block.done - 1, capacity)
        return block._replace(state=before.state, done=before.done, broken=block.state)

    def ask(self, probe: Stepper, state: PyTree, key: jax.Array) -> dict[str, Any]:
        fed = self.federation
        # All data of all clients at once could be a second copy of everything.
        whole = SimulatedFederation(fed.problem, fed.clients.whole(), fed.chunk or ASKED_AT_ONCE)
        return _answer(whole, probe, state, key)

    def _advance(self, state: PyTree, key: jax.Array, first: int, steps: int, capacity: int) -> Block:
        # The widest integers, so that schedules divide them in the widest floats.
        times = jnp.asarray(first, int), jnp.asarray(steps, int)
        block = _advance(self.federation, self.stepper, state, key, *times, capacity)
        return block._replace(done=int(block.done), finite=bool(block.finite))


def begin(fed: SimulatedFederation, stepper: Stepper, key: jax.Array) -> tuple[PyTree, Counts]:
    """The first state and what it cost."""
    with metering() as meter, fed.in_step(key, 0):
        state = stepper.at(0).init(fed, key)
    return state, as_arrays(meter.counts)


def answer(fed: SimulatedFederation, probe: Stepper, state: PyTree, key: jax.Array) -> dict[str, jax.Array]:
    """What a probe reports at a state; nothing is billed."""
    with metering():
        return probe.step(fed, state, key)[1]


ASKED_AT_ONCE = 16
"""How many clients answer a probe at a time."""


def simulate(
    fed: SimulatedFederation,
    stepper: Stepper,
    state: PyTree,
    key: jax.Array,
    first: Any,
    steps: Any,
    capacity: int,
) -> Block:
    """Many steps as one pure function: what `jax.vmap` over an algorithm's step sizes needs."""

    def one(time: jax.Array, state: PyTree) -> tuple[PyTree, dict[str, jax.Array], Counts, jax.Array]:
        with metering() as meter, fed.in_step(key, time):
            returned = stepper.at(time).step(fed, state, jax.random.fold_in(key, time))
        check_step(stepper, state, returned)
        state, info = returned
        return state, info, as_arrays(meter.counts), fed.all_finite(state)

    state, first = jax.tree.map(jnp.asarray, state), jnp.asarray(first, int)
    staged, (_, info, counts, _) = trace_once(one, first, state)

    def advance(carry: Any) -> Any:
        index, state, _, *records = carry
        state, *new, finite = staged(first + index, state)
        records = [
            jax.tree.map(lambda log, value: log.at[index].set(value), *pair)
            for pair in zip(records, new, strict=True)
        ]
        return index + 1, state, finite, *records

    start = (
        jnp.zeros((), int),
        state,
        jnp.asarray(True),
        zeros(info, capacity),
        zeros(counts, capacity),
    )
    done, state, finite, info, counts = jax.lax.while_loop(lambda c: (c[0] < steps) & c[2], advance, start)
    return Block(state, done, finite, info, counts)


_begin, _answer, _advance = eqx.filter_jit(begin), eqx.filter_jit(answer), eqx.filter_jit(simulate)


def _array_if_number(leaf: Any) -> Any:
    return jnp.asarray(leaf) if isinstance(leaf, float | int) else leaf


def _placed(plain: list[Any], treedef: Any, examples: list[Any]) -> PyTree:
    """The carry of a loop again, from what `_plain` made of it."""
    pairs = zip(plain, examples, strict=True)
    leaves = [
        At(leaf[0], leaf[1], example.cohort) if isinstance(example, At) else leaf for leaf, example in pairs
    ]
    return jax.tree.unflatten(treedef, leaves)
