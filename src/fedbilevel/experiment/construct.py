"""Tables of an experiment file to Python objects: `kind` names the factory, other keys are its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from fedbilevel.experiment.registry import NESTED, ConfigError, Factory, find, nearest, parameters

Table: TypeAlias = dict[str, Any]


def construct(
    table: Any, group: Mapping[str, Factory], where: str, given: Mapping[str, Callable[[], Any]] | None = None
) -> Any:
    """Build what a table describes.

    Args:
        table: `kind` and arguments; a string is short for `{kind = ...}`.
        group: the factories that may be named.
        where: the place of the table in the file, such as `algorithm`, for errors.
        given: arguments that the surroundings supply where the table does not, if the factory has them.
    """
    factory, arguments = _parts(table, group, where)
    known = parameters(factory)
    supplied = {
        name: make() for name, make in (given or {}).items() if name in known and name not in arguments
    }
    check_keys(arguments, known, where)
    missing = [
        n
        for n, p in known.items()
        if p.default is inspect.Parameter.empty and not {n} & (arguments.keys() | supplied)
    ]
    if missing:
        raise ConfigError(f"{where}.{missing[0]} is missing: {factory.__name__} needs it")
    values = {name: nested(value, f"{where}.{name}") for name, value in arguments.items()}
    try:
        return factory(**supplied, **values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _parts(table: Any, group: Mapping[str, Factory], where: str) -> tuple[Factory, Table]:
    """The factory that a table names, and the arguments for it."""
    table = {"kind": table} if isinstance(table, str) else table
    if not isinstance(table, dict) or "kind" not in table:
        raise ConfigError(
            f"{where} must be a table with a `kind`, one of {', '.join(group)}; it is {table!r}"
        )
    what = where.rsplit(".", 1)[-1]
    try:
        factory = find(table["kind"], group, what)
    except ConfigError as error:
        raise ConfigError(f"{where}.kind: {error}") from None
    return factory, {key: value for key, value in table.items() if key != "kind"}


def nested(value: Any, where: str) -> Any:
    """A value of a table: tables with a kind become objects, lists become tuples."""
    if isinstance(value, dict) and "kind" in value:
        return construct(value, NESTED, where)
    if isinstance(value, dict):
        return {key: nested(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return tuple(nested(item, f"{where}[{i}]") for i, item in enumerate(value))
    return value


def check_keys(table: Mapping[str, Any], known: Any, where: str) -> None:
    """Raise an error with the nearest valid name if a table has a key that nothing uses."""
    for key in table:
        if key not in known:
            place = f"{where}.{key}" if where else key
            raise ConfigError(
                f"there is no {place}{nearest(key, known)} "
                f"{where or 'An experiment file'} has: {', '.join(sorted(known))}"
            )


def with_defaults(table: Any, group: Mapping[str, Factory], where: str) -> Table:
    """A table with every setting that has a default written out, as far as TOML can."""
    factory, arguments = _parts(table, group, where)
    defaults = {
        name: _plain(p.default) for name, p in parameters(factory).items() if _plain(p.default) is not None
    }
    kind = table if isinstance(table, str) else table["kind"]
    return {"kind": kind} | defaults | arguments


def _plain(value: Any) -> Any:
    """A default as TOML writes it; None if it cannot."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple) and all(isinstance(item, bool | int | float | str) for item in value):
        return list(value)
    return None
