"""Replies of clients: everything in them is checked before it is used."""

from __future__ import annotations

from typing import Any

import jax

from fedbilevel.engine.wire import WireError, decode
from fedbilevel.fed.ledger import ORACLES, Counts, Entry
from fedbilevel.portable import Array, Json
from fedbilevel.tree import PyTree


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
        leaves, (expected, treedef) = self._leaves(), jax.tree.flatten(spec)
        seen = [(leaf.shape, leaf.dtype) for leaf in leaves]
        wanted = [(leaf.shape, leaf.dtype) for leaf in expected]
        if seen != wanted:
            raise WireError(f"it answered with arrays of {_text(seen)} where {_text(wanted)} is expected")
        return jax.tree.unflatten(treedef, leaves)

    def missed(self) -> tuple[list[str], str]:
        """Whose letters a client did not get, and why it sent none itself ("": it did)."""
        try:
            answer = self.body["answers"][-1]
            return [str(name) for name in answer["missing"]], str(answer.get("broken", ""))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise WireError(f"its answer is incomplete: {error!r}") from None

    def _leaves(self) -> list[Array]:
        try:
            answer = self.body["answers"][-1]
            if "broken" not in answer:
                return [self.arrays[int(index)] for index in answer["leaves"]]
            reason = str(answer["broken"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise WireError(f"its answer is incomplete: {error!r}") from None
        raise WireError(reason)


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
