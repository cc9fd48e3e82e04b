"""The reader of pickles makes plain data and runs nothing."""

import datetime
import os
import pathlib
import pickle
from typing import Any

import numpy as np
import pytest

from data.source_files import python2_pickle
from fedbilevel.data.source.plain import PlainError, read_plain

PLAIN: dict[str, Any] = {
    "numbers": [0, 1, -1, 255, 256, 70_000, -(2**31), 2**40, 1.5],
    "texts": ["", "a", "é", "x" * 300],
    "bytes": [b"", b"\x00\xff", b"y" * 300],
    "constants": (None, True, False),
    "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    "nested": {"list": [[1], [], [2, [3]]], b"key": {}},
}


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_plain_data_are_read_as_python_reads_them(protocol: int) -> None:
    shared = ["shared"]
    content = {**PLAIN, "first": shared, "second": shared}
    raw = pickle.dumps(content, protocol)
    assert read_plain(raw) == content == pickle.loads(raw)  # noqa: S301


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["u1", "i2", "<i4", ">i4", "f4", ">f8"])
def test_arrays_keep_shape_type_and_order(protocol: int, dtype: str) -> None:
    rows = np.arange(6).reshape(2, 3).astype(dtype)
    for array in (rows, np.asfortranarray(rows), rows[:0]):
        back = read_plain(pickle.dumps({"array": array, "again": array}, protocol))
        for name in ("array", "again"):
            np.testing.assert_array_equal(back[name], array)
            assert back[name].dtype == array.dtype


def test_what_python_2_wrote_is_read() -> None:
    images = np.arange(12, dtype=np.uint8).reshape(3, 4)
    raw = python2_pickle({"labels": [3, 1, 2], "data": images, "batch_label": "one"})
    back = read_plain(raw)
    np.testing.assert_array_equal(back.pop("data"), images)
    assert back == {"labels": [3, 1, 2], "batch_label": "one"}
    np.testing.assert_array_equal(pickle.loads(raw)["data"], images)  # noqa: S301


class Command:
    """Python's own unpickler would run this."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_no_code_of_a_file_is_run(tmp_path: pathlib.Path, protocol: int) -> None:
    raw = pickle.dumps({"data": Command(tmp_path / "made")}, protocol)
    with pytest.raises(PlainError, match=r"asks to call posix\.mkdir"):
        read_plain(raw)
    assert not (tmp_path / "made").exists()
    pickle.loads(raw)  # noqa: S301
    assert (tmp_path / "made").exists(), "the file was no threat: this test would prove nothing"


class Holder:
    """An object with a state."""

    def __init__(self) -> None:
        self.value = 1


REFUSED = {
    "object": pickle.dumps(Holder(), 2),
    "function": b"cos\nsystem\nU\x04true\x85R.",
    "dtype of objects": pickle.dumps(np.array([{}, None]), 4),
    "date": pickle.dumps(datetime.date(2020, 1, 1), 4),
    "another codec": b"c_codecs\nencode\nU\x01aU\x03hex\x86R.",
    "state of a list": b"]}b.",
    "call of a text": b"U\x09os.systemU\x01a\x85R.",
    "cut": pickle.dumps(PLAIN, 4)[:-5],
    "empty": b"",
    "nonsense": b"<html>",
    "stack underflow": b"e.",
    "unknown memory": b"h\x07.",
    "two values": b"K\x01K\x02.",
    "wrong size": pickle.dumps(np.zeros(3, np.uint8), 3).replace(b"\x00\x00\x00q", b"\x00\x00q"),
    "append to a number": b"K\x01K\x02a.",
}


@pytest.mark.parametrize("case", REFUSED)
def test_anything_else_is_refused(case: str) -> None:
    with pytest.raises(PlainError):
        read_plain(REFUSED[case])
