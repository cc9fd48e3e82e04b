"""Settings that are numbers: whether they are, and lie where they must."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np


def whole(value: Any) -> Any:
    """A whole number of numpy's as Python's own, which compiled programs can be made for; others stay."""
    return int(value) if isinstance(value, np.integer) else value


def check_positive(settings: Any, *names: str) -> None:
    """Raise an error that explains unless the named settings are numbers above 0."""
    _check(settings, names, lambda value: value > 0, "a number above 0")


def check_not_negative(settings: Any, *names: str) -> None:
    """Raise an error that explains unless the named settings are numbers of at least 0."""
    _check(settings, names, lambda value: value >= 0, "a number of at least 0")


def check_shares(settings: Any, *names: str) -> None:
    """Raise an error that explains unless the named settings are numbers between 0 and 1."""
    _check(settings, names, lambda value: 0 <= value <= 1, "a number between 0 and 1")


def _check(settings: Any, names: tuple[str, ...], holds: Callable[[float], bool], what: str) -> None:
    for name in names:
        value = getattr(settings, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # An array may be known at run time only, and is not looked into.
        unknown = hasattr(value, "shape") and not is_number
        if not unknown and not (is_number and math.isfinite(value) and holds(value)):
            raise ValueError(f"{name} is {value!r}; it must be {what}")
