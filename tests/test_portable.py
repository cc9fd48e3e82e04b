"""Objects as JSON and arrays: what is written comes back, and nothing in it is run."""

import dataclasses
import json
import sys
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from fedbilevel import Ledger
from fedbilevel.portable import PortableError, imported, loaded, name_of, pack, unpack


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Box:
    content: Any
    label: str = ""

    def __post_init__(self) -> None:
        if self.label == "boom":
            raise AssertionError("reading must not call anything")


def top_level() -> None: ...


DTYPES = [np.dtype(name) for name in ("bool", "int8", "uint16", "int64", "float32", "float64", "complex64")]
arrays = st.sampled_from([*DTYPES, np.dtype(ml_dtypes.bfloat16)]).flatmap(
    lambda dtype: hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3).map(
        lambda shape: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    )
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
keys = st.one_of(st.text(max_size=3), st.integers(), st.tuples(st.integers(), st.text(max_size=2)))
trees = st.recursive(
    st.one_of(scalars, arrays, st.just(top_level), st.just(Pair)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Box, inner, st.text(max_size=3)),
    ),
    max_leaves=8,
)


def through_json(thing: Any, find: Any = loaded) -> Any:
    structure, contents = pack(thing)
    return unpack(json.loads(json.dumps(structure)), contents, find)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        return same(vars(a), vars(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


@settings(max_examples=100, deadline=None)
@given(trees)
def test_what_is_packed_comes_back(thing: Any) -> None:
    assert same(through_json(thing), thing)
    assert same(through_json(thing, imported), thing)


@settings(max_examples=20, deadline=None)
@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=2, max_side=3)))
def test_jax_arrays_and_transposed_arrays_come_back_as_their_values(values: Any) -> None:
    back = through_json([jnp.asarray(values), values.T])
    assert back[0].tobytes() == np.asarray(jnp.asarray(values)).tobytes()
    np.testing.assert_array_equal(back[1], values.T)
    assert back[1].flags.c_contiguous


def test_what_was_packed_does_not_change_with_the_original() -> None:
    original = np.zeros(2)
    structure, contents = pack(original)
    original[0] = 1
    assert unpack(structure, contents, loaded).tolist() == [0, 0]


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_random_keys_come_back_as_keys(implementation: str) -> None:
    key = jr.key(7, impl=implementation)
    back = through_json(key)
    assert jax.random.key_impl(back) == jax.random.key_impl(key)
    np.testing.assert_array_equal(jr.key_data(back), jr.key_data(key))


def test_reading_calls_nothing() -> None:
    box = object.__new__(Box)
    object.__setattr__(box, "content", 1)
    object.__setattr__(box, "label", "boom")
    assert through_json(box).label == "boom"


# ----------------------------------------------------------------- what cannot travel


def test_what_has_no_name_cannot_be_written() -> None:
    def inner() -> None: ...

    class Inner:
        def __call__(self) -> None: ...

    for thing in (lambda: 0, inner, Inner, Inner()):
        with pytest.raises(PortableError, match=r"define it with `def`.*factory"):
            pack({"inside": [thing]})


@pytest.mark.parametrize("thing", [{1, 2}, b"bytes", 1j, object()], ids=["set", "bytes", "complex", "object"])
def test_other_types_are_refused(thing: Any) -> None:
    with pytest.raises(PortableError, match="cannot be written; use numbers, strings, arrays"):
        pack([thing])


def test_an_object_array_is_refused() -> None:
    with pytest.raises(PortableError):
        pack(np.array([{1}, None], object))


def test_a_shadowed_name_is_not_written() -> None:
    impostor = types.FunctionType(top_level.__code__, {}, "top_level")
    impostor.__module__, impostor.__qualname__ = top_level.__module__, top_level.__qualname__
    with pytest.raises(PortableError, match="cannot be found by name"):
        name_of(impostor)


# ---------------------------------------------------------------- what cannot be read


def test_names_of_modules_that_are_not_imported_are_not_imported_by_a_file() -> None:
    assert "this" not in sys.modules
    with pytest.raises(PortableError, match="of the module this: import that module first"):
        loaded("this:s")
    assert "this" not in sys.modules


@pytest.mark.parametrize("find", [loaded, imported])
def test_a_name_that_is_gone_is_reported(find: Any) -> None:
    with pytest.raises(PortableError, match=r"no fedbilevel\.tree:Gone: was it renamed or removed"):
        find("fedbilevel.tree:Gone")


def test_a_dataclass_with_other_fields_is_reported() -> None:
    structure, contents = pack(Box(1))
    del structure["object"][1]["label"]
    assert unpack(structure, contents, loaded) == Box(1), "what came later has its default"
    structure["object"][1]["extra"] = 2
    with pytest.raises(PortableError, match="another version"):
        unpack(structure, contents, loaded)
    with pytest.raises(PortableError, match="another version"):
        unpack({"object": [name_of(Box), {}]}, [], loaded)
    name = name_of(top_level)
    with pytest.raises(PortableError, match="is no dataclass"):
        unpack({"object": [name, {}]}, [], loaded)


def test_a_ledger_of_an_earlier_version_has_counted_no_messages() -> None:
    structure, contents = pack(Ledger(3, edge={"z": 8}))
    del structure["object"][1]["messages"]
    assert unpack(structure, contents, loaded) == Ledger(3, edge={"z": 8})


def test_a_named_tuple_of_another_length_is_reported() -> None:
    with pytest.raises(PortableError, match="no named tuple of 3 items"):
        unpack({"named": [name_of(Pair), [1, 2, 3]]}, [], loaded)


MALFORMED = [
    {"tuple": [], "dict": []},
    {},
    {"unknown": 1},
    {"array": 5},
    {"array": -2},
    {"array": "0"},
    {"array": None},
    {"tuple": 5},
    {"tuple": None},
    {"dict": [[1, 2, 3]]},
    {"dict": 4},
    {"dict": [[[1], 2]]},
    {"object": 3},
    {"object": ["fedbilevel.fed.ledger:Ledger", 7]},
    {"object": [5, {}]},
    {"named": ["x"]},
    {"named": [None, []]},
    {"name": 7},
    {"name": ""},
    {"name": "no colon"},
    {"key": [1]},
    {"key": ["nonsense", 0]},
    {"key": ["threefry2x32", 9]},
    {"key": ["threefry2x32", 0]},
]


def test_a_malformed_structure_is_never_another_kind_of_error() -> None:
    others = {}
    for structure in MALFORMED:
        try:
            unpack(structure, [np.zeros(3)], loaded)
        except PortableError:
            continue
        except Exception as error:
            others[json.dumps(structure)] = repr(error)[:80]
        else:
            others[json.dumps(structure)] = "was read"
    assert others == {}
