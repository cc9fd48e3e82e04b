"""What an engine is: it turns a problem and clients into a federation that can run an algorithm."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self

import jax

from fedbilevel.data.clients import Clients
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.ledger import Counts
from fedbilevel.problem.base import Problem
from fedbilevel.tree import PyTree


def check_dropout(dropout: float) -> None:
    """Raise an error that explains unless `dropout` is a probability below 1."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}; it must be a probability below 1")


class TooFewClientsError(RuntimeError):
    """Not enough clients answered for the run to go on."""


class Stepper(Protocol):
    """Anything that steps on a federation: the part of an algorithm that an engine knows."""

    def init(self, fed: Federation, key: jax.Array) -> Any: ...

    def step(self, fed: Federation, state: Any, key: jax.Array) -> tuple[Any, dict[str, jax.Array]]: ...

    def at(self, time: Any) -> Any: ...

    def on(self, problem: Problem) -> Any: ...

    def made(self) -> PyTree: ...

    def unmade(self) -> Any: ...


class Block(NamedTuple):
    """What a block of steps gave.

    Attributes:
        state: after the last step that gave a finite state.
        done: how many steps did (an integer).
        finite: whether all of them did; if not, the step behind `done` broke and ended the block.
        info: scalars of each step, `(capacity, ...)`, valid up to `done`.
        counts: what each step spent, `(capacity,)`, zero where none was made.
    """

    state: PyTree
    done: Any
    finite: Any
    info: dict[str, Any]
    counts: Counts


class Session(abc.ABC):
    """One algorithm on one federation, ready to run."""

    federation: Federation

    @abc.abstractmethod
    def init(self, key: jax.Array) -> tuple[PyTree, Counts]:
        """The first state and what it cost."""

    @abc.abstractmethod
    def advance(self, state: PyTree, key: jax.Array, first: int, steps: int, capacity: int) -> Block:
        """Steps `first .. first + steps − 1` (at most `capacity`); step t uses `fold_in(key, t)`.

        Stops at the first step whose state is not finite.
        """

    @abc.abstractmethod
    def ask(self, probe: Stepper, state: PyTree, key: jax.Array) -> dict[str, Any]:
        """What one step of a probe reports at `state`, on all of the clients' data.

        It is evaluation, not work: nothing is billed. The probe must be one that the session was
        connected with.
        """

    @property
    def failures(self) -> list[str]:
        """What went wrong at clients so far, one line each."""
        return []


class Engine(abc.ABC):
    """Where a federation runs. As a context manager it keeps its resources for several sessions."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @abc.abstractmethod
    def connect(
        self, problem: Problem, clients: Clients, stepper: Stepper, probes: Sequence[Stepper] = ()
    ) -> contextlib.AbstractContextManager[Session]:
        """A session for one algorithm, and for what is asked on its way; it ends with the `with` block."""
