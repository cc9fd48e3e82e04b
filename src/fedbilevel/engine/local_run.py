"""A client's end of `run`: a local program, traced once and compiled once for all clients of a machine.

Clients run the same programs at the same time. Where they share JAX's cache of compiled programs, the first
compiles while the others wait and then read what it left: n clients of a machine cost one compilation, not n,
if their data have the same shapes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.data.batches import Samples
from fedbilevel.data.clients import Clients
from fedbilevel.fed.ledger import Counts, as_arrays, metering
from fedbilevel.fed.program import Program
from fedbilevel.problem.base import Problem
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree

_settings: Any = jax.config  # whose options have no types
_LOCKS = 4096
"""How many files in the cache's folder tell programs apart that are compiled at the same time."""


class LocalRun:
    """A compiled `(clients, id, settings, key data, *values) -> (value, counts)`.

    Args:
        problem: what is solved.
        program: whose structure counts; its settings are an argument of every call.
    """

    def __init__(self, problem: Problem, program: Program) -> None:
        structure = jax.tree.structure(program)

        def run(clients: Clients, id: Any, settings: Any, key: Any, *values: Any) -> tuple[PyTree, Counts]:
            own_key = jax.random.fold_in(jax.random.wrap_key_data(key), id)
            with metering() as meter:
                me = Client(problem, clients, 0, id, own_key)
                out = jax.tree.unflatten(structure, settings)(me, *values)
            return jax.tree.map(jnp.asarray, out), as_arrays(meter.counts)

        self._run = jax.jit(run)
        self._name = repr(structure)
        self._known: set[Any] = set()

    def shapes(self, clients: Clients, id: int, settings: list[Any], values: list[PyTree]) -> PyTree:
        """The shapes of the result for values of these shapes. A call that follows is not traced again."""
        # A Python number stays one: as an array it would have another type, and be traced again.
        plain = [
            s if isinstance(s, int | float) else jax.ShapeDtypeStruct(s.shape, s.dtype) for s in settings
        ]
        key = jax.random.key_data(jax.random.key(0))
        return self._run.eval_shape(clients, id, plain, key, *values)[0]

    def __call__(self, clients: Clients, *arguments: Any) -> tuple[PyTree, Counts]:
        # A client's data have one shape, and a structure that says whether batches or all samples are used.
        kind = (jax.tree.structure((clients, arguments)), *map(jax.typeof, jax.tree.leaves(arguments)))
        if kind not in self._known:
            traced = self._run.lower(clients, *arguments)  # which all clients do at the same time
            with _turn(self._name + repr(kind)):
                traced.compile()
            self._known.add(kind)
        return self._run(clients, *arguments)


def rounded(clients: Clients) -> Clients:
    """A client's data with rows of zeros behind them, which it never draws, up to a round number of rows.

    Clients of about the same size then have data of one shape, so that they share their programs. The next
    power of two, or the size of the largest client if that is less: nobody stores more than twice its data.
    """
    levels, structure = jax.tree.flatten(clients, is_leaf=lambda part: isinstance(part, Samples))
    return jax.tree.unflatten(structure, [_rounded(s) if isinstance(s, Samples) else s for s in levels])


def _rounded(samples: Samples) -> Samples:
    leaves = jax.tree.leaves(samples.flat)
    rows = len(leaves[0]) if leaves else 0
    more = min(samples.longest, 1 << max(rows - 1, 0).bit_length()) - rows
    if more <= 0 or samples.rows is not None:
        return samples
    flat = jax.tree.map(lambda leaf: np.pad(leaf, [(0, more)] + [(0, 0)] * (leaf.ndim - 1)), samples.flat)
    return dataclasses.replace(samples, flat=flat)


@contextlib.contextmanager
def _turn(program: str) -> Iterator[None]:
    """Inside, no other client with the same cache compiles this program; at once without a cache of them all.

    Args:
        program: a description, in which addresses do not count. Other programs are compiled side by side.
    """
    if sys.platform == "win32" or not _shared():
        yield
        return
    import fcntl

    folder = pathlib.Path(_settings.jax_compilation_cache_dir)
    folder.mkdir(parents=True, exist_ok=True)
    number = zlib.crc32(re.sub(r" at 0x\w+", "", program).encode()) % _LOCKS
    with (folder / f"compiling-{number}").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the system unlocks it when the file is closed, or its process dies
        yield


def _shared() -> bool:
    """Whether what one client compiles is there for the others, however quickly it was compiled."""
    folder = _settings.jax_compilation_cache_dir
    local = folder is not None and "://" not in folder  # a bucket has no locks
    every = _settings.jax_persistent_cache_min_compile_time_secs <= 0
    return bool(_settings.jax_enable_compilation_cache and local and every)
