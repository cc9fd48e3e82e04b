"""What clients send, to the server or to each other: everything in it is checked before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from fedbilevel.engine.wire import WireError, decode
from fedbilevel.fed.ledger import ORACLES, Counts, Entry
from fedbilevel.portable import Array, Json
from fedbilevel.tree import PyTree, all_finite

K = TypeVar("K")

_LONGEST_REASON = 400
"""Characters of what a client says about another one that are shown."""


class Reply:
    """What a client answered to a message of commands.

    Raises `WireError`, whose text goes on from "client 3: ...", if it cannot be read.
    """

    def __init__(self, message: bytes | Exception) -> None:
        self.body, self.arrays = body_of(message)
        try:
            self.spent: Counts = {Entry(*entry): times for *entry, times in self.body["spent"]}
            fair = all(_is_fair(entry, times) for entry, times in self.spent.items())
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"it sent a message that cannot be read: {error!r}") from None
        if not fair:
            raise WireError("it sent a bill that cannot be right")

    def value(self, spec: PyTree) -> PyTree:
        """The answer to the last `get`, of exactly the shapes and dtypes of `spec`."""
        return value_of(self._last(), self.arrays, spec)

    def missed(self) -> tuple[list[str], dict[str, str], str]:
        """Whose letters a client did not get, whose it refused and why; and why it had no value itself."""
        answer = self._last()
        try:
            refused = {str(name): str(why)[:_LONGEST_REASON] for name, why in answer["refused"].items()}
            return [str(name) for name in answer["missing"]], refused, str(answer.get("broken", ""))
        except (KeyError, TypeError, AttributeError) as error:
            raise WireError(f"its answer is incomplete: {error!r}") from None

    def _last(self) -> Json:
        try:
            return self.body["answers"][-1]
        except (KeyError, IndexError, TypeError) as error:
            raise WireError(f"its answer is incomplete: {error!r}") from None


def letter_value(letter: bytes, spec: PyTree) -> PyTree:
    """What a peer's letter holds, of exactly the shapes and dtypes of `spec`; else a `WireError`."""
    return value_of(*body_of(letter), spec)


def value_of(answer: Json, arrays: list[Array], spec: PyTree) -> PyTree:
    """The value that an answer tells, of exactly the shapes and dtypes of `spec`; else a `WireError`."""
    leaves, (expected, treedef) = _leaves(answer, arrays), jax.tree.flatten(spec)
    seen = [(leaf.shape, leaf.dtype) for leaf in leaves]
    wanted = [(leaf.shape, leaf.dtype) for leaf in expected]
    if seen != wanted:
        raise WireError(f"it sent arrays of {_text(seen)} where {_text(wanted)} is expected")
    return jax.tree.unflatten(treedef, leaves)


def _leaves(answer: Json, arrays: list[Array]) -> list[Array]:
    try:
        if "broken" not in answer:
            return [arrays[int(index)] for index in answer["leaves"]]
        reason = str(answer["broken"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise WireError(f"its answer is incomplete: {error!r}") from None
    raise WireError(reason)


def accepted(read: Mapping[K, Callable[[], PyTree]]) -> tuple[dict[K, PyTree], dict[K, str]]:
    """Those of several senders' values that may enter a sum, and why the others may not.

    Args:
        read: for each sender a function that gives its value, or raises `WireError`.
    """
    values, refused = {}, {}
    for sender, value in read.items():
        try:
            values[sender] = value()
        except WireError as error:
            refused[sender] = str(error)
    finite = {sender: value for sender, value in values.items() if bool(all_finite(value))}
    if not finite:
        return values, refused  # where nobody's is finite the run itself has diverged, and shall see it
    broken = {sender: "what it sent holds a NaN or an infinity" for sender in values if sender not in finite}
    return finite, refused | broken


def body_of(message: bytes | Exception) -> tuple[Json, list[Array]]:
    """The body and arrays of a message that came, or the reason why none did."""
    if isinstance(message, Exception):
        raise WireError(str(message) or type(message).__name__) from message
    try:
        return decode(message)
    except WireError as error:
        raise WireError(f"it sent a message that cannot be read: {error}") from None


def _is_fair(entry: Entry, times: Any) -> bool:
    call = entry.kind == "call" and entry.label in ORACLES and entry.unit == 1
    samples = entry.kind == "samples" and entry.label == ""
    numbers: tuple[Any, ...] = (entry.unit, times)
    return (call or samples) and all(isinstance(n, int) and n >= 0 for n in numbers)


def _text(arrays: list[tuple[Any, Any]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in arrays)
