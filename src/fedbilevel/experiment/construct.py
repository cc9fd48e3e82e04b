"""Tables of an experiment file to Python objects: `kind` names the factory, other keys are its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from fedbilevel.experiment.registry import (
    INSIDE,
    NESTED,
    SURROUNDINGS,
    ConfigError,
    Factory,
    find,
    parameters,
    types_of,
)
from fedbilevel.name import nearest

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
    _check_complete(known, {*arguments, *supplied}, where, _kind(table))
    _check_types(factory, arguments, where)
    values = {name: nested(value, f"{where}.{name}") for name, value in arguments.items()}
    try:
        return factory(**supplied, **values)
    except Exception as error:  # whatever a factory, perhaps the user's own, says of its arguments
        raise ConfigError(f"{where}: {str(error) or type(error).__name__}") from error


def _kind(table: Any) -> str:
    return str(table if isinstance(table, str) else table["kind"])


def _check_complete(known: Mapping[str, inspect.Parameter], given: set[str], where: str, kind: str) -> None:
    for name, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and name not in given:
            raise ConfigError(f"{where}.{name} is missing: {kind} needs it")


_SIMPLE: Mapping[Any, tuple[type, ...]] = {bool: (bool,), int: (int,), int | None: (int,), str: (str,)}


def _check_types(factory: Factory, arguments: Table, where: str) -> None:
    """Refuse what Python would take silently, such as "no" for a truth value."""
    hints = types_of(factory)
    for name, value in arguments.items():
        wanted = _SIMPLE.get(hints.get(name))
        if wanted and (not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted)):
            raise ConfigError(f"{where}.{name} is {value!r}; it must be of type {wanted[0].__name__}")


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
    group = INSIDE.get(where.rsplit(".", 1)[-1], {})
    if isinstance(value, dict) and "kind" in value:
        return construct(value, group or NESTED, where)
    if isinstance(value, str) and group:
        return construct(value, group, where)
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
                f"there is no {place}{nearest(key, known) or '.'} "
                f"{where or 'An experiment file'} has: {', '.join(sorted(known))}"
            )


def with_defaults(table: Any, group: Mapping[str, Factory], where: str) -> Table:
    """A table with every setting that has a default written out, as far as TOML can.

    What the surroundings may supply is left to them.
    """
    factory, arguments = _parts(table, group, where)
    defaults = {
        name: _plain(p.default)
        for name, p in parameters(factory).items()
        if _plain(p.default) is not None and name not in SURROUNDINGS
    }
    return {"kind": _kind(table)} | defaults | arguments


def _plain(value: Any) -> Any:
    """A default as TOML writes it; None if it cannot."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple) and all(isinstance(item, bool | int | float | str) for item in value):
        return list(value)
    return None
