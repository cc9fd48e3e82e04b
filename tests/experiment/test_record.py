"""Results on disk: all of one or nothing, and nothing but what `save` wrote is read."""

import dataclasses
import io
import json
import pickle
import sys
import types
import zipfile
from typing import Any

import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import pytest

from fedbilevel import Ledger, load
from fedbilevel.algorithm.base import Variables
from fedbilevel.experiment import History, Result
from fedbilevel.fed import Kept
from fedbilevel.portable import PortableError


def result(**changes: Any) -> Result:
    x, y = {"w": jnp.array([1.0, 2.0])}, (jnp.array(3.0), ())
    rows = ({"step": 0, "error": float("nan")}, {"step": 2, "error": 0.5})
    ledger = Ledger(1, {"x": 2**40}, {"y": 3}, {}, {"g_y": 4}, 5)
    state = Variables(x, Kept({"own": jnp.arange(4).reshape(2, 2)}))
    whole = Result(x, y, History(rows), ledger, False, 2, 7, state, ("client 1: gone",), {"growth": 1.5})
    return dataclasses.replace(whole, **changes)


@pytest.fixture
def saved(tmp_path: Any) -> Any:
    return result().save(tmp_path / "run.result")


def zipped(path: Any, header: Any, **arrays: Any) -> Any:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with open(path, "wb") as file:
        np.savez(file, header=np.frombuffer(text, np.uint8), **arrays)
    return path


def test_a_result_comes_back(saved: Any) -> None:
    original, back = result(), load(saved)
    np.testing.assert_array_equal(back.x["w"], original.x["w"])
    assert back.y[1] == ()
    assert isinstance(back.state, Variables)
    np.testing.assert_array_equal(back.state.y.value["own"], [[0, 1], [2, 3]])
    assert np.isnan(back.history[0]["error"])
    for name in ("ledger", "diverged", "steps", "seed", "failures", "notes"):
        assert getattr(back, name) == getattr(original, name)
    assert back.history[1] == original.history[1]


def test_a_printed_result_is_a_summary() -> None:
    large = jnp.zeros((1000, 1000))
    lines = repr(result(y=large, diverged=True)).splitlines()
    assert lines[0] == "Result diverged after 2 steps (seed 7): x of 2 and y of 1,000,000 numbers"
    assert lines[1] == "  last  error 0.5"
    assert lines[2:-1] == str(result().ledger).splitlines()
    assert lines[-1].startswith("a term of the Neumann series grew (by 1.5 at worst)")
    assert repr(result(history=History(({"step": 0},)))).splitlines()[1] == lines[2], "nothing was measured"
    assert repr(result(history=History())).splitlines()[1] == lines[2], "nor was it begun"
    assert repr(result().history) == "History of 2 rows with the columns step, error"


def test_the_path_is_used_as_it_is_given(tmp_path: Any) -> None:
    path = result().save(str(tmp_path / "no_suffix"))
    assert path == tmp_path / "no_suffix"
    assert [file.name for file in tmp_path.iterdir()] == ["no_suffix"]


@pytest.mark.parametrize(
    "leaf",
    [
        np.ones(2, ml_dtypes.bfloat16),
        np.ones(2, ml_dtypes.float8_e4m3fn),
        np.array([1.0], np.float16),
        np.array([True, False]),
        np.array([], np.int8),
    ],
    ids=lambda leaf: leaf.dtype.name,
)
def test_every_dtype_comes_back(tmp_path: Any, leaf: Any) -> None:
    back = load(result(x=leaf).save(tmp_path / "run")).x
    assert back.dtype == leaf.dtype
    assert back.tobytes() == leaf.tobytes()


def test_a_random_key_in_a_state_comes_back(tmp_path: Any) -> None:
    back = load(result(state=jr.key(3)).save(tmp_path / "run")).state
    np.testing.assert_array_equal(jr.key_data(back), jr.key_data(jr.key(3)))


# ------------------------------------------------------------------------ atomic


@pytest.mark.parametrize("interruption", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_an_interrupted_save_leaves_nothing_behind(
    tmp_path: Any, monkeypatch: Any, interruption: BaseException
) -> None:
    path = tmp_path / "run"
    result(seed=1).save(path)
    before = path.read_bytes()

    def interrupted(file: Any, **arrays: Any) -> None:
        file.write(b"half of it")
        raise interruption

    monkeypatch.setattr(np, "savez", interrupted)
    for target in (path, tmp_path / "other"):
        with pytest.raises(type(interruption)):
            result(seed=2).save(target)
    assert [file.name for file in tmp_path.iterdir()] == ["run"]
    assert path.read_bytes() == before


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Any) -> None:
    for state in (lambda: 0, {1, 2}, np.array([{1}], object)):
        with pytest.raises(PortableError):
            result(state=state).save(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------- what is refused


def test_no_truncated_file_is_read(saved: Any, tmp_path: Any) -> None:
    whole, part = saved.read_bytes(), tmp_path / "part"
    for length in [*range(0, len(whole), 7), len(whole) - 1]:
        part.write_bytes(whole[:length])
        with pytest.raises(PortableError, match="part is not a result"):
            load(part)


def test_what_is_no_result_at_all(tmp_path: Any) -> None:
    (tmp_path / "part").write_text("notes of mine")
    with pytest.raises(PortableError, match=r"part is not a result that .* wrote.*it is no zip file"):
        load(tmp_path / "part")


def test_a_file_with_changed_bytes_is_read_or_refused(saved: Any, tmp_path: Any) -> None:
    whole, changed = saved.read_bytes(), tmp_path / "changed"
    others: dict[str, int] = {}
    refused = 0
    for place in range(0, len(whole), 3):
        content = bytearray(whole)
        content[place] ^= 0b01010101
        changed.write_bytes(content)
        try:
            load(changed)
        except PortableError:
            refused += 1
        except Exception as error:
            others.setdefault(repr(error)[:100], place)
    assert refused > 0
    assert others == {}


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"PK\x03\x04 not a zip",
        pickle.dumps({"x": 1}),
        npy(np.ones(3)),
        json.dumps({}).encode(),
    ],
    ids=["empty", "text", "zip?", "pickle", "npy", "json"],
)
def test_other_kinds_of_files_are_refused(tmp_path: Any, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(PortableError, match=r"not a result that `Result\.save` wrote"):
        load(path)


def test_other_archives_are_refused(tmp_path: Any) -> None:
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr("header", "{}")
    np.savez(tmp_path / "arrays.npz", weights=np.ones(3))
    for name in ("archive", "arrays.npz"):
        with pytest.raises(PortableError):
            load(tmp_path / name)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"\xff\xfe",
        b"[" * 100_000,
        [],
        {},
        {"format": "fedbilevel result 0", "result": 1},
        {"format": "fedbilevel result 2"},
        {"format": "fedbilevel result 2", "result": {"array": 3}},
        {"format": "fedbilevel result 2", "result": {"tuple": 3}},
        {"format": "fedbilevel result 2", "result": {"object": ["fedbilevel.fed.ledger:Ledger", []]}},
    ],
    ids=[
        "text",
        "bytes",
        "deep",
        "list",
        "empty",
        "old format",
        "no result",
        "no array",
        "no tuple",
        "no fields",
    ],
)
def test_a_header_of_another_form_is_refused(tmp_path: Any, header: Any) -> None:
    with pytest.raises(PortableError):
        load(zipped(tmp_path / "file", header))


def test_a_missing_file_is_reported_as_missing(tmp_path: Any) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nowhere")


def test_another_object_than_a_result_is_refused(tmp_path: Any) -> None:
    path = zipped(tmp_path / "file", {"format": "fedbilevel result 2", "result": {"tuple": []}, "dtypes": []})
    with pytest.raises(PortableError, match="holds a tuple, not a result"):
        load(path)


class Bomb:
    """Unpickling this would be noticed."""

    exploded: list[int] = []  # noqa: RUF012

    def __reduce__(self) -> Any:
        return Bomb.exploded.append, (1,)


def test_a_pickled_array_is_refused_and_never_run(tmp_path: Any) -> None:
    header = {"format": "fedbilevel result 2", "result": {"array": 0}}
    path = zipped(tmp_path / "file", header, array0=np.array([Bomb()], object))
    with pytest.raises(PortableError):
        load(path)
    assert Bomb.exploded == []


def test_a_class_whose_module_is_not_imported_is_named(tmp_path: Any, monkeypatch: Any) -> None:
    module = types.ModuleType("module_of_a_user")
    exec("import typing\nclass Carried(typing.NamedTuple):\n    x: int", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    path = result(state=module.Carried(1)).save(tmp_path / "run")
    assert load(path).state == (1,)
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(
        PortableError, match="needs Carried of the module module_of_a_user: import that module"
    ):
        load(path)
