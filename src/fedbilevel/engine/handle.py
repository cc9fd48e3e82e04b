"""Handles of values that stay on the clients, and the commands queued for a client."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.portable import Array, Json, pack
from fedbilevel.tree import PyTree


class Ref:
    """A value that stays on the clients: its number there, a path into it, its shapes, its origin."""

    def __init__(self, root: _Root, path: tuple[Any, ...], spec: PyTree, origin: str) -> None:
        self.root, self.path, self.spec, self.origin = root, path, spec, origin

    def __getitem__(self, part: Any) -> Ref:
        return Ref(self.root, (*self.path, part), self.spec[part], self.origin)

    @property
    def number(self) -> int:
        """Its number in the clients' stores."""
        return self.root.number

    @property
    def address(self) -> Json:
        """How a command names it."""
        return [self.root.number, list(self.path)]


class _Root:
    def __init__(self, number: int) -> None:
        self.number = number


class Numbers:
    """Gives out numbers in the clients' stores, and knows which are no longer used."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._unused: list[int] = []

    def new(self, spec: PyTree, origin: str = "what it was sent") -> Ref:
        """A handle with a new number; when its last copy is gone, clients may forget the value."""
        root = _Root(next(self._next))
        weakref.finalize(root, self._unused.append, root.number)
        return Ref(root, (), spec, origin)

    def unused(self) -> list[int]:
        """The numbers that went out of use since the last call."""
        numbers, self._unused[:] = list(self._unused), []
        return numbers


class Queue:
    """Commands for one client, with the arrays that they refer to."""

    def __init__(self) -> None:
        self.commands: list[Json] = []
        self.arrays: list[Array] = []

    def add(self, verb: str, *content: Json) -> None:
        """Queue a command of JSON values."""
        self.commands.append([verb, *content])

    def array(self, value: Any) -> int:
        """The number of a new array."""
        self.arrays.append(np.asarray(value))
        return len(self.arrays) - 1

    def put(self, ref: Ref, tree: PyTree) -> None:
        """Queue a value for the client's store."""
        self.add("put", ref.number, pack(tree, self.arrays)[0])

    def like(self, spec: PyTree) -> Json:
        """Shapes, dtypes and structure of a value that the client will get from others: a stack of none."""
        none = jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape), leaf.dtype), spec)
        return pack(none, self.arrays)[0]

    @property
    def has_work(self) -> bool:
        """Whether the client is to compute something (and not merely to store or forget)."""
        return any(command[0] == "run" for command in self.commands)


def spec_of_rows(stacked: PyTree) -> PyTree:
    """The shapes and dtypes of a row of a stack, which may be one of no rows (see `Queue.like`)."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked)


def spec_of(tree: PyTree) -> PyTree:
    """The shapes and dtypes of a tree."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), tree)
