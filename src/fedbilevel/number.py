"""Settings that are numbers: whether they are, and lie where they must."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np


def whole(value: Any) -> Any:
    """A whole number of numpy's as Python's own, which compiled programs can be made for; others stay."""
    return int(value) if isinstance(value, np.integer) else value


def known_number(value: Any) -> float | None:
    """A number, Python's or numpy's, that is known before anything runs; None: it is something else."""
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return float(value) if is_number else None


def check_count(name: str, value: Any, least: int = 1, error: type[ValueError] = ValueError) -> None:
    """Raise an error that explains unless a value is a whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise error(f"{name} is {value!r}; it must be a whole number of at least {least}")


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
        number = known_number(value)
        # An array may be known at run time only, and is not looked into.
        unknown = hasattr(value, "shape") and number is None
        if not unknown and not (number is not None and math.isfinite(number) and holds(number)):
            raise ValueError(f"{name} is {value!r}; it must be {what}")
