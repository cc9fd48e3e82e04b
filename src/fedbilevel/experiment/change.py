"""Changes of an experiment's settings: by variants and presets, and on the command line."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping
from typing import Any

from fedbilevel.experiment.construct import Table
from fedbilevel.experiment.engines import ENGINES
from fedbilevel.experiment.registry import ALGORITHMS, NESTED, PROBLEMS, WORDS, ConfigError, find, parameters


def merged(base: Table, change: Mapping[str, Any]) -> Table:
    """A table with changes, deeply.

    Where the kind of a table changes, settings of the old kind that the new one does not have are dropped.
    """
    new = copy.deepcopy(base)
    for key, value in change.items():
        old = new.get(key)
        if isinstance(old, str) and isinstance(value, Mapping):  # a name is short for a table with that kind
            old = {"kind": old}
        elif isinstance(old, dict) and "kind" in old and isinstance(value, str):
            value = {"kind": value}
        if isinstance(value, Mapping) and isinstance(old, dict):
            new[key] = merged(_adapted(old, value.get("kind")), value)
        else:
            new[key] = copy.deepcopy(value)
    return new


def _adapted(table: Table, kind: Any) -> Table:
    """What of a table makes sense for another kind."""
    if kind is None or kind == table.get("kind"):
        return table
    everything = {**ALGORITHMS, **PROBLEMS, **NESTED, **WORDS, **ENGINES}
    try:
        old, new = (find(name, everything, "kind") for name in (table.get("kind"), kind))
    except ConfigError:  # said with its place when the table is built
        return table
    lost = set(parameters(old)) - set(parameters(new))
    return {key: value for key, value in table.items() if key not in lost}


def tree_of(dotted: Mapping[str, Any]) -> Table:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    tree: Table = {}
    for key, value in dotted.items():
        *path, last = key.split(".")
        place = tree
        for part in path:
            place[part] = place.get(part, {})
            if not isinstance(place[part], dict):  # `algorithm=FedNest` is short for its kind
                place[part] = {"kind": place[part]}
            place = place[part]
        place[last] = value
    return tree


def parsed(text: str) -> tuple[str, Any]:
    """`algorithm.upper_lr=0.01` of the command line as a key and a value; bare words are strings."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r} is not of the form key=value, such as algorithm.upper_lr=0.01")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()
