"""Names that may be mistyped: an error says which are valid, and which of them is nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


def nearest(name: Any, names: Iterable[str]) -> str:
    """The end of a sentence about a wrong name: the nearest valid one, in any case of letters; "" if none is.

    >>> nearest("fedavg", ["FedNest", "FedAvg"])
    "; did you mean 'FedAvg'?"
    """
    spelt = {known.lower(): known for known in names}
    near = difflib.get_close_matches(str(name).lower(), list(spelt), n=1, cutoff=0.5)
    return f"; did you mean {spelt[near[0]]!r}?" if near else ""


def check_choice(what: str, value: Any, allowed: Iterable[str], error: type[ValueError] = ValueError) -> None:
    """Raise an error that explains unless the value is one of those allowed."""
    if value not in (names := tuple(allowed)):
        listed = ", ".join(map(repr, names))
        raise error(f"{what} is {value!r}; it must be one of {listed}{nearest(value, names)}")
