"""Step sizes that depend on the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax

from fedbilevel.number import known_number


class Schedule(eqx.Module):
    """A step size that depends on the step: wraps an optax schedule `step -> value`."""

    function: Callable[[Any], Any] = eqx.field(static=True)

    def __call__(self, time: Any) -> Any:
        return self.function(time)


Rate: TypeAlias = float | jax.Array | Schedule | Callable[[Any], Any]
"""A step size: a number, or an optax schedule of the step."""


def rate(value: Any) -> Any:
    """A step size as a leaf of the algorithm's tree: schedules are wrapped, numbers stay."""
    number = known_number(value)
    array = number is None and hasattr(value, "shape")
    if not (callable(value) or array or (number is not None and number >= 0)):
        raise ValueError(f"a step size is {value!r}; it must be a number of at least 0, or an optax schedule")
    return Schedule(value) if callable(value) and not isinstance(value, Schedule | jax.Array) else value


def rate_if_given(value: Any) -> Any:
    """A step size that may be None: something else decides it then."""
    return None if value is None else rate(value)
