"""Local programs: what a client computes."""

from __future__ import annotations

import abc
import dataclasses
import inspect
import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from fedbilevel.tree import PyTree


class ProgramError(TypeError):
    """What was given to `run` is not a local program."""


class Program(eqx.Module):
    """A pure local computation: `__call__(self, me, *values) -> value`.

    `me` is the client: its id, key, minibatches and counted oracles. The fields of a program are
    its settings: scalars (step sizes) and static data (step counts, names); every vector comes
    through `send`, `deal` or `take`, where its bytes are booked. On a wire a program is its place
    in the algorithm, so it must not close over anything.
    """

    @abc.abstractmethod
    def __call__(self, me: Any, *values: Any) -> PyTree:
        """Compute this client's value."""


def check_program(program: Any) -> None:
    """Raise an error that explains, unless `program` may run on a client."""
    if not isinstance(program, Program):
        raise ProgramError(
            f"`run` got {program!r}, which is not a local program. Write a class: "
            "`class Name(fedbilevel.fed.Program)` with `__call__(self, me, *values)`, so that it can "
            "be found by name on a client's machine; a function or lambda cannot."
        )
    captured = set(inspect.unwrap(type(program).__call__).__code__.co_freevars) - {"__class__"}
    if captured:
        raise ProgramError(
            f"the local program {type(program).__name__} closes over {sorted(captured)}: captured "
            "values would be traffic that nobody counts. Pass vectors through `cohort.send(...)` and "
            "settings as fields of the class, defined at the top level of a module."
        )
    _check_settings(program, type(program).__name__)


def _check_settings(settings: Any, name: str) -> None:
    """Fields may hold scalars, static data and modules of these; nothing that could carry a vector."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            _check_settings(value, name)
        elif isinstance(value, types.FunctionType) and (value.__closure__ or "<" in value.__qualname__):
            raise ProgramError(
                f"the field {field.name} of the local program {name} is {value!r}, which cannot be found by "
                "name on a client's machine, and may carry values that nobody counts. "
                "Use a function at the top level of a module."
            )
        elif any(jnp.ndim(leaf) > 0 for leaf in jax.tree.leaves(value) if eqx.is_array(leaf)):
            raise ProgramError(
                f"the local program {name} has an array in its field {field.name}: it would be traffic that "
                "nobody counts. Pass it through `cohort.send(value, label)` as an argument of `run`."
            )
