"""Python objects as JSON and raw arrays: for files and wires, never pickle.

An object becomes a JSON structure that refers to arrays by number. Classes and functions are named,
`module:qualname`, and never carried; reading makes instances of dataclasses from their fields
without calling anything.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

Json: TypeAlias = Any
Array: TypeAlias = npt.NDArray[Any]


_EXTENDED = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *_EXTENDED,
)
"""The dtypes that may be written; the last few are not numpy's own."""


_DICTS = (dict, collections.OrderedDict)


class PortableError(TypeError):
    """An object cannot be written so that another process, or another day, could read it."""


def pack(thing: Any, arrays: list[Array] | None = None) -> tuple[Json, list[Array]]:
    """The JSON structure of an object and the arrays that it refers to (appended, if a list is given)."""
    arrays = [] if arrays is None else arrays
    return _pack(thing, arrays), arrays


def unpack(structure: Json, arrays: Sequence[Any], find: Callable[[str], Any]) -> Any:
    """The object again; `find` turns a name into a class or function (`imported`, `loaded`)."""
    try:
        return _unpack(structure, arrays, find)
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, PortableError):
            raise
        raise PortableError(f"not a packed object: {error!r}") from None


def _unpack(structure: Json, arrays: Sequence[Any], find: Callable[[str], Any]) -> Any:
    if isinstance(structure, list):
        return [_unpack(item, arrays, find) for item in structure]
    if not isinstance(structure, dict):
        return structure
    if len(structure) != 1:
        raise PortableError(f"not a packed object: {sorted(structure)}")
    ((tag, content),) = structure.items()
    if tag not in _READERS:
        raise PortableError(f"not a packed object: unknown tag {tag!r}")
    return _READERS[tag](content, arrays, find)


def imported(name: str) -> Any:
    """The class or function of that name, importing its module: for a trusted peer."""
    module, _, path = name.partition(":")
    return _walk(importlib.import_module(module), path, name)


def loaded(name: str) -> Any:
    """The class or function of that name, if its module is imported already: for files."""
    module, _, path = name.partition(":")
    if module not in sys.modules:
        raise PortableError(
            f"this needs {path} of the module {module}: import that module first, then load again"
        )
    return _walk(sys.modules[module], path, name)


def name_of(thing: Any) -> str:
    """`module:qualname` of a class or function that can be imported; else an error that explains."""
    module, path = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if module is None or path is None or "<" in path or _lookup(module, path) is not thing:
        raise PortableError(
            f"{thing!r} cannot be found by name in a module, so it cannot travel to another process or into "
            "a file. A lambda or a function inside a function is of that kind: define it with `def` (or as a "
            "class) at the top level of a module, or hand the engine an importable factory: "
            "`Process(factory=make_problem)`."
        )
    return f"{module}:{path}"


# ------------------------------------------------------------------- writing


def _pack(thing: Any, arrays: list[Array]) -> Json:
    if thing is None or isinstance(thing, bool | int | float | str):
        return thing
    if isinstance(thing, jax.Array) and jnp.issubdtype(thing.dtype, jax.dtypes.prng_key):
        return {"key": [str(jax.random.key_impl(thing)), _array(jax.random.key_data(thing), arrays)]}
    if isinstance(thing, np.ndarray | np.generic | jax.Array):
        return {"array": _array(thing, arrays)}
    if type(thing) is list:
        return [_pack(item, arrays) for item in thing]
    if type(thing) is tuple or (isinstance(thing, tuple) and hasattr(thing, "_fields")):
        items = [_pack(item, arrays) for item in thing]
        return {"tuple": items} if type(thing) is tuple else {"named": [name_of(type(thing)), items]}
    if type(thing) in _DICTS:  # an ordered one has its leaves in another order
        tag = "dict" if type(thing) is dict else "ordered"
        return {tag: [[_pack(k, arrays), _pack(v, arrays)] for k, v in thing.items()]}
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        if hasattr(thing, "stays_here"):  # its class knows better than we why, and what to do
            raise PortableError(thing.stays_here)
        fields = {f.name: _pack(getattr(thing, f.name), arrays) for f in dataclasses.fields(thing)}
        return {"object": [name_of(type(thing)), fields]}
    if callable(thing):
        return {"name": name_of(thing)}
    raise PortableError(
        f"a value of type {type(thing).__name__} cannot be written; "
        "use numbers, strings, arrays, lists, tuples, dicts and dataclasses"
    )


def _array(thing: Any, arrays: list[Array]) -> int:
    arrays.append(plain_array(thing))
    return len(arrays) - 1


def plain_array(thing: Any) -> Array:
    """A copy in C order and native byte order; only numbers and booleans can be written."""
    array = np.array(thing, order="C")  # `ascontiguousarray` would turn a scalar into a vector
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype.name not in DTYPES:
        raise PortableError(
            f"an array of {array.dtype} cannot be written; only numbers and booleans can: {', '.join(DTYPES)}"
        )
    return array


# ------------------------------------------------------------------- reading


def _read_object(content: Any, arrays: Sequence[Any], find: Callable[[str], Any]) -> Any:
    name, fields = content
    cls = find(name)
    known = {f.name: _default(f) for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    # A file of an earlier version lacks the fields that came later: these have their defaults.
    later = {field: default for field, default in known.items() if field not in fields}
    incomplete = any(default is dataclasses.MISSING for default in later.values())
    if not isinstance(cls, type) or incomplete or not set(fields) <= set(known):
        raise PortableError(
            f"{name} is no dataclass with the fields {sorted(fields)}; was it written by another version?"
        )
    thing: Any = object.__new__(cls)
    for field, value in (later | fields).items():
        object.__setattr__(thing, field, _unpack(value, arrays, find) if field in fields else value)
    return thing


def _default(field: dataclasses.Field[Any]) -> Any:
    """What a field is if nobody says; nothing of anybody else's is called for it."""
    return {} if field.default_factory is dict else field.default


def _read_named(content: Any, arrays: Sequence[Any], find: Callable[[str], Any]) -> Any:
    name, items = content
    cls = find(name)
    if not (
        isinstance(cls, type) and issubclass(cls, tuple) and len(getattr(cls, "_fields", ())) == len(items)
    ):
        raise PortableError(f"{name} is no named tuple of {len(items)} items")
    return tuple.__new__(cls, [_unpack(item, arrays, find) for item in items])


def _read_key(content: Any, arrays: Sequence[Any], find: Callable[[str], Any]) -> Any:
    implementation, index = content
    return jax.random.wrap_key_data(jnp.asarray(arrays[index]), impl=implementation)


def _read_dict(pairs: Any, arrays: Sequence[Any], find: Callable[[str], Any]) -> Any:
    return {_unpack(k, arrays, find): _unpack(v, arrays, find) for k, v in pairs}


_READERS: dict[str, Callable[..., Any]] = {
    "key": _read_key,
    "array": lambda index, arrays, find: arrays[index],
    "tuple": lambda items, arrays, find: tuple(_unpack(item, arrays, find) for item in items),
    "named": _read_named,
    "dict": _read_dict,
    "ordered": lambda *content: collections.OrderedDict(_read_dict(*content)),
    "object": _read_object,
    "name": lambda name, arrays, find: find(name),
}


def _lookup(module: str, path: str) -> Any:
    thing: Any = sys.modules.get(module)
    for part in path.split("."):
        thing = getattr(thing, part, None)
    return thing


def _walk(module: Any, path: str, name: str) -> Any:
    try:
        for part in path.split("."):
            module = getattr(module, part)
    except AttributeError:
        raise PortableError(f"there is no {name}: was it renamed or removed?") from None
    return module
