"""Messages: they come back as they were sent, and a broken one is never anything but a WireError."""

import json
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from fedbilevel.engine.wire import WireError, decode, encode
from fedbilevel.portable import PortableError

names = ("bool", "int8", "uint32", "int64", "float16", "float32", "float64", "complex64")
dtypes = st.sampled_from(
    [*map(np.dtype, names), np.dtype(ml_dtypes.bfloat16), np.dtype(">f4"), np.dtype(">i8")]
)
arrays = dtypes.flatmap(
    lambda dtype: hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3).map(
        lambda shape: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    )
)
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=6))
bodies = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
MESSAGE = encode(
    {"run": [1, "x", None], "ü": True},
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array(3, np.int8),
        np.zeros((0, 2), ml_dtypes.bfloat16),
    ],
)


def with_header(header: Any, payload: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return b"FBL1" + struct.pack("<I", len(text)) + text + payload


def decodes_or_refuses(message: bytes) -> bool:
    """Whether a message decodes to arrays that can be used; anything but a WireError is a failure."""
    try:
        _, contents = decode(message)
    except WireError:
        return False
    for array in contents:
        assert type(array) is np.ndarray
        assert array.dtype.kind in "biufcV"
        assert not array.dtype.hasobject
        assert array.dtype.names is None
        array.copy()
    return True


@settings(deadline=None)
@given(bodies, st.lists(arrays, max_size=3))
@example({"empty": []}, [])
def test_a_message_comes_back(body: Any, contents: Any) -> None:
    back, received = decode(encode(body, contents))
    assert back == body
    for sent, got in zip(contents, received, strict=True):
        assert got.shape == sent.shape
        assert got.dtype == sent.dtype.newbyteorder("=")
        np.testing.assert_array_equal(got, sent)


def test_no_truncation_of_a_message_is_read() -> None:
    for length in range(len(MESSAGE)):
        with pytest.raises(WireError):
            decode(MESSAGE[:length])


def test_no_extension_of_a_message_is_read() -> None:
    with pytest.raises(WireError, match="3 bytes are left over"):
        decode(MESSAGE + b"abc")


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(MESSAGE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_corrupted_bytes_are_refused_or_decode(changes: list[tuple[int, int]]) -> None:
    message = bytearray(MESSAGE)
    for place, value in changes:
        message[place] = value
    decodes_or_refuses(bytes(message))


def test_every_change_of_one_header_byte_is_refused_or_decodes() -> None:
    (length,) = struct.unpack_from("<I", MESSAGE, 4)
    outcomes = set()
    for place in range(8 + length):
        for value in (0, 9, 32, 34, 44, 48, 57, 91, 93, 123, 125, 255):
            message = bytearray(MESSAGE)
            message[place] = value
            outcomes.add(decodes_or_refuses(bytes(message)))
    assert outcomes == {True, False}


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_garbage_is_refused_or_decodes(garbage: bytes) -> None:
    decodes_or_refuses(garbage)
    decodes_or_refuses(with_header(garbage))


CRAFTED = {
    "object dtype": ([["object", [1]]], 8),
    "hidden object": ([["int8,O", [1]]], 9),
    "structured": ([["int8,int8", [1]]], 2),
    "malformed structure": ([["int8,(2,,3)f4", [1]]], 8),
    "string dtype": ([["str", [1]]], 0),
    "datetime": ([["datetime64[s]", [1]]], 8),
    "void": ([["V8", [1]]], 8),
    "unknown float": ([["float33", [1]]], 8),
    "no dtype": ([[None, [1]]], 8),
    "huge": ([["float32", [2**62, 2**62]]], 8),
    "huge and empty": ([["float32", [0, 2**70]]], 0),
    "many axes": ([["float32", [1] * 100]], 4),
    "many empty axes": ([["float32", [0] * 100]], 0),
    "negative": ([["float32", [-1]]], 0),
    "two negatives": ([["float32", [-1, -1]]], 4),
    "fraction": ([["float32", [1.0]]], 4),
    "boolean length": ([["float32", [True]]], 4),
    "text length": ([["float32", "11"]], 4),
    "not a list": (7, 0),
    "no shape": ([["float32"]], 4),
    "a name": ("float32", 4),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_a_crafted_table_of_arrays_is_refused(case: str) -> None:
    table, payload = CRAFTED[case]
    with pytest.raises(WireError):
        decode(with_header({"body": None, "arrays": table}, bytes(payload)))


@pytest.mark.parametrize(
    "header",
    [b"", b"[]", b"{}", b'{"body": 1}', b'{"arrays": []}', b"\xff", b"[" * 10**5, b"1" * 5000, b"null"],
    ids=lambda header: repr(header[:12]),
)
def test_a_header_of_another_form_is_refused(header: bytes) -> None:
    with pytest.raises(WireError):
        decode(with_header(header))


def test_another_protocol_is_refused() -> None:
    for message in (b"", b"GET / HTTP/1.1\r\n", b"FBL2" + MESSAGE[4:]):
        with pytest.raises(WireError, match="does not begin as a message"):
            decode(message)


def test_what_cannot_be_read_back_is_not_sent() -> None:
    for array in (np.array([None]), np.array(["text"]), np.zeros(1, "datetime64[s]")):
        with pytest.raises(PortableError, match="only numbers and booleans"):
            encode(None, [array])
