"""What a client holds between the server's commands: values by number, or why there is none."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from fedbilevel.portable import Array, Json
from fedbilevel.tree import PyTree, add, scale


class Broken:
    """Stands in the store for a value that could not be computed."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Store:
    """Values by number. A command names one, or a part of one, as `(number, path)`."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}

    def find(self, value: Json) -> Any:
        """The value that a command names; what is not there is `Broken`."""
        ref, path = value
        found = self.values.get(ref, Broken("it does not have a value that it was asked to use"))
        for part in path:
            if isinstance(found, Broken):
                return found
            found = found[part]
        return found

    def told(self, value: Json, reply: list[Array]) -> Json:
        """What to say of a value; its leaves are added to the arrays of the reply."""
        found = self.find(value)
        if isinstance(found, Broken):
            return {"broken": found.reason}
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(found)]
        reply.extend(leaves)
        return {"leaves": list(range(len(reply) - len(leaves), len(reply)))}

    def keep(self, ref: int, new: Json, old: Json) -> None:
        """The new value, or the old one if the new one is broken."""
        value = self.find(new)
        self.values[ref] = self.find(old) if isinstance(value, Broken) else value

    def free(self, refs: list[int]) -> None:
        """Forget values that nobody will name again."""
        for ref in refs:
            self.values.pop(ref, None)

    def add(self, ref: int, value: Json, weight: float) -> None:
        """A weighted value on top of what is there, if that is not broken."""
        before = self.values[ref]
        parts = [] if isinstance(before, Broken) else [(1.0, before)]
        self.values[ref] = mixed([*parts, (weight, self.find(value))])


def mixed(parts: list[tuple[float, PyTree]]) -> PyTree:
    """`Σ w v` over pairs of a weight and a tree."""
    if not parts:
        return Broken("no peer sent it anything, and it has nothing itself")
    return functools.reduce(add, [scale(weight, value) for weight, value in parts])
