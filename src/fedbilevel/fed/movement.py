"""What an engine supplies for the verbs of a cohort: how values move, and what conditions do to them."""

from __future__ import annotations

import abc
from typing import Any

import jax

from fedbilevel.fed.codec import Codec
from fedbilevel.fed.place import At, Kept, Published
from fedbilevel.fed.program import Program
from fedbilevel.tree import PyTree


class Movements(abc.ABC):
    """How values move between the server and the clients of a cohort; rules and costs are the verbs'."""

    # ------------------------------------ what an engine with conditions supplies

    def _there(self) -> Any:
        """Who can be reached, `(size,)` bool; None: all."""
        return None

    def _arriving(self, whole: int, codec: Codec | None = None, who: Any = None) -> None:
        """Messages go down to those `(size,)` whom `who` names (None: all), of `whole` bytes (see
        `messages`).
        """
        return

    def _awaited(
        self, rows: PyTree, able: jax.Array, whole: int, codec: Codec | None
    ) -> tuple[PyTree, jax.Array]:
        """Of what clients have, the answers that come: rows, and who answered."""
        return rows, able

    def _heard(self, value: At, answered: jax.Array) -> At:
        """A value that goes with an answer, at those whose answer came."""
        return value

    def _delivered(self, weights: jax.Array, size: int) -> None:
        """Messages of `size` bytes go over the links that `(size, size)` weights name."""
        return

    # ------------------------------------------------- what an engine supplies

    @abc.abstractmethod
    def _send(self, tree: PyTree) -> Any: ...

    @abc.abstractmethod
    def _read_published(self, published: Published) -> tuple[Any, Any, Any]: ...

    @abc.abstractmethod
    def _deal(self, stacked: PyTree) -> Any: ...

    @abc.abstractmethod
    def _run(self, program: Program, values: tuple[At, ...], key: jax.Array, *, fails: bool) -> At: ...

    @abc.abstractmethod
    def _take(self, kept: Kept) -> Any: ...

    @abc.abstractmethod
    def _put(self, kept: Kept, value: At) -> Kept: ...

    @abc.abstractmethod
    def _gather(self, value: At) -> tuple[PyTree, jax.Array]: ...

    @abc.abstractmethod
    def _push(self, value: At, weights: jax.Array) -> tuple[Any, int, Any]: ...
