"""Rows of numbers as lines of JSON, which has no NaN and no infinity: what is not finite is null."""

from __future__ import annotations

import json
import math
from typing import Any


def standard(value: Any) -> Any:
    """A tree of plain values with None for every NaN and infinity, for JSON that every program reads.

    Example:
        >>> standard({"step": 3, "loss": math.nan, "clients": [0.5, math.inf]})
        {'step': 3, 'loss': None, 'clients': [0.5, None]}
    """
    if isinstance(value, dict):
        return {name: standard(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [standard(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def line(row: dict[str, Any]) -> str:
    """A row as a line of a file."""
    return json.dumps(standard(row), allow_nan=False) + "\n"


def parsed(text: str) -> Any:
    """What `line` wrote, with NaN where a number was not finite; anything else as JSON reads it.

    Example:
        >>> parsed(line({"step": 3, "loss": math.inf}))
        {'step': 3, 'loss': nan}
    """
    row = json.loads(text)
    if not isinstance(row, dict):
        return row
    return {name: math.nan if value is None else value for name, value in row.items()}
