"""What an algorithm is: a pure server-side program on a federation."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import equinox as eqx
import jax
import numpy as np

from fedbilevel.fed.federation import Federation
from fedbilevel.fed.links import Complete
from fedbilevel.fed.network_check import check_links
from fedbilevel.fed.place import Kept
from fedbilevel.problem.server_model import shows_x
from fedbilevel.schedule import Schedule
from fedbilevel.tree import PyTree, size

State = TypeVar("State")
Info: TypeAlias = dict[str, jax.Array]


class CannotRunError(ValueError):
    """A method cannot run over these links, however it is set: no mistake, but an "n/a" in a table."""


class Variables(NamedTuple):
    """The state of methods that carry nothing but the two variables."""

    x: PyTree
    y: PyTree


class Algorithm(eqx.Module, Generic[State]):
    """A method: its fields are its settings (floats are leaves of its tree, the rest is static).

    `step` is written against the verbs of a cohort only; it names no engine, message or byte.
    """

    @abc.abstractmethod
    def init(self, fed: Federation, key: jax.Array) -> State:
        """The state before the first step."""

    @abc.abstractmethod
    def step(self, fed: Federation, state: State, key: jax.Array) -> tuple[State, Info]:
        """One step: the new state, and scalars for the history."""

    @abc.abstractmethod
    def solution(self, state: State) -> tuple[PyTree, PyTree]:
        """The variables `(x, y)` of a state."""

    def remarks(self, problem: Any, clients: Any) -> tuple[str, ...]:
        """Lines that a user may want to read before a run; none unless a method says so."""
        return ()

    def findings(self, state: State, read: Callable[[Kept], PyTree]) -> dict[str, float]:
        """Numbers for the history that only clients know: what they keep, which `read` gives, a row each.

        Not part of a step: looked at where a run is evaluated, like metrics, and like them not billed.
        """
        return {}

    @property
    def needs_smoothness(self) -> bool:
        """Whether ℓ has still to be measured before a bilevel problem can be solved."""
        return False

    @property
    def inverts_own_hessians(self) -> bool:
        """Whether ℓ must bound every client's own Hessian, not only their mean."""
        return False

    @property
    def local_lower_steps(self) -> int:
        """How many steps on y a client makes between two averages: in the theory each is so much shorter."""
        return 1

    def among(self, n: int) -> Any:
        """This algorithm for n clients: with what depends on their number made, and checked."""
        return self

    def on(self, problem: Any) -> Any:
        """This algorithm for a problem: with what can be made once for all steps made."""
        return self

    def made(self) -> PyTree:
        """What `on` made: every client can make it too, so nobody sends it. () if that is nothing."""
        return ()

    def unmade(self) -> Any:
        """This algorithm without what `on` made: what clients are told of it."""
        return self

    def at(self, time: Any) -> Any:
        """This algorithm with every schedule replaced by its value at step `time`."""
        return jax.tree.map(
            lambda leaf: leaf(time) if isinstance(leaf, Schedule) else leaf,
            self,
            is_leaf=lambda leaf: isinstance(leaf, Schedule),
        )


Factory = TypeVar("Factory", bound=Callable[..., Any])


def decides(*settings: str) -> Callable[[Factory], Factory]:
    """Marks a function that makes a method with some settings decided, so that nobody offers them."""

    def mark(factory: Factory) -> Factory:
        factory.decided = frozenset(settings)  # type: ignore[attr-defined]
        return factory

    return mark


def check_learns_y(problem: Any) -> None:
    """Raise an error that explains if there is no y, or nobody looks at it, where a method learns it."""
    check_has_y(problem)
    if shows_x(problem):
        raise ValueError(
            "the method learns y, but the metrics of this problem are those of a model x, which would stay "
            "as it is: ServerModel is for FedSep with the decoder Submodel. Use Classification"
        )


def check_has_y(problem: Any) -> None:
    """Raise an error that explains if there is no y, where a method needs one."""
    if not size(problem.y0):
        raise ValueError(
            f"the method learns y, and this problem ({problem.structure}) has none. To learn one variable "
            "alone, make it y: fedbilevel.Problem(f, f, x0=(), y0=...) with f(x, y, samples)"
        )


def check_tunes_x(problem: Any) -> None:
    """Raise an error that explains if there is no x, where a method is about to tune it."""
    if not size(problem.x0):
        raise ValueError(
            "the method tunes x, and this problem has none: its x0 is empty. Use one that learns y alone, "
            'such as SGP or FedAvg(level="lower"), or a problem with an x, such as fedbilevel.ClassWeights'
        )


def check_minimax(problem: Any, method: str) -> None:
    """Raise an error that explains unless a method that finds saddle points is given a minimax problem."""
    if problem.structure != "minimax":
        raise ValueError(
            f"{method} finds saddle points of minimax problems; this one is {problem.structure}. "
            "Build the problem with `fedbilevel.minimax(f, ...)`, or use another method."
        )


def check_lengths(settings: Any, n: int) -> None:
    """Raise an error that explains if a setting with one number for each client has not n of them."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        numbers = isinstance(value, tuple) and value and all(isinstance(v, int | float) for v in value)
        if numbers and len(value) != n:
            raise ValueError(
                f"{field.name} has {len(value)} numbers, but there are {n} clients; "
                "give one number for each client, or one for all of them"
            )


def with_server(method: Any, n: int) -> Any:
    """A method that needs a server, if its `links` give one among n clients; else an error that says so.

    A server hears everybody in every exchange, and takes the mean. Only links between all clients that are
    always there, and all of the same weight, do as much.
    """
    check_links(method.links)
    network = method.links.network(n)
    alike = np.allclose(np.asarray(network.base), 1 / n, atol=1e-5)
    if not (alike and np.all(network.heard() + np.eye(n) >= 1)):
        raise CannotRunError(f"{type(method).__name__} needs a server, which only complete links give")
    return dataclasses.replace(method, links=Complete())


class TwoVariables(Algorithm[Variables]):
    """A method whose state is `(x, y)` and nothing else."""

    def init(self, fed: Federation, key: jax.Array) -> Variables:
        check_lengths(self, fed.n)
        return Variables(fed.problem.constraint(fed.problem.x0), fed.problem.y0)

    def solution(self, state: Variables) -> tuple[PyTree, PyTree]:
        return state.x, state.y
