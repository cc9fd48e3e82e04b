"""What an engine is: it turns a problem and clients into a federation that can run an algorithm."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp

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


class StepError(TypeError):
    """What a step of an algorithm returned cannot be stepped on from."""


def check_step(stepper: Stepper, before: PyTree, returned: Any) -> None:
    """Raise an error that explains unless a step returned `(state, info)`, the state like the one before."""
    name, like = f"{type(stepper).__name__}.step", "must return a state like the one it got"
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise StepError(
            f"{name} must return (state, info), where info is a dict of numbers for the history, or {{}}; "
            f"it returned {_parts(returned)}"
        )
    old, new = (dict(jax.tree_util.tree_leaves_with_path(state)) for state in (before, returned[0]))
    for path in [*old, *(path for path in new if path not in old)]:
        kinds = [_seen(leaves[path]) if path in leaves else "not there" for leaves in (old, new)]
        if kinds[0] != kinds[1]:
            raise StepError(
                f"{name} {like}: state{jax.tree_util.keystr(path)} was {kinds[0]} and is {kinds[1]}"
            )
    structures: list[Any] = [jax.tree.structure(state) for state in (before, returned[0])]
    if structures[0] != structures[1]:
        raise StepError(f"{name} {like}, {structures[0]}; it returned {structures[1]}")


def _parts(returned: Any) -> str:
    """What a step returned, for an error; of a plain tuple each part."""
    plain = type(returned) is tuple
    return f"({', '.join(map(_seen, returned))})" if plain else _seen(returned)


def _seen(value: Any) -> str:
    """What something is, for an error: the dtype and shape of an array, the type of anything else."""
    if hasattr(value, "shape") or isinstance(value, int | float):
        return f"{jnp.result_type(value)}{list(jnp.shape(value))}"
    return type(value).__name__


class Block(NamedTuple):
    """What a block of steps gave.

    Attributes:
        state: after the last step that gave a finite state.
        done: how many steps did (an integer).
        finite: whether all of them did; if not, the step behind `done` broke and ended the block.
        info: scalars of each step, `(capacity, ...)`, valid up to `done` and for the step that broke.
        counts: what each step spent, `(capacity,)`, zero where none was made.
        broken: the state that is not finite, in which one may look for the cause; None if there is none.
    """

    state: PyTree
    done: Any
    finite: Any
    info: dict[str, Any]
    counts: Counts
    broken: PyTree = None


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
