"""The page of benchmarks: what the script that writes it makes of figures."""

import importlib.util
import pathlib
from types import ModuleType

import pytest

SCRIPT = pathlib.Path(__file__).parent.parent / "scripts" / "benchmarks.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def page(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(script, "machine", lambda: "A machine.\n")  # its own needs PyTorch
    rows = "| roofline | speed | 0.1 |  |  |\n| start | seconds | 9 |  |  |\n"
    return f"before\n{script.BEGIN}\n{rows}{script.END}\nafter\n"


def test_new_rows_take_the_place_of_old_ones_and_the_others_stay(script: ModuleType, page: str) -> None:
    line = {"figure": "speed", "value": 0.7, "target": "at least 0.5", "met": True, "parts": {"own": 2}}
    written = script.written(page, {"roofline": [script.row("roofline", line)]})
    assert written.startswith("before\n")
    assert written.endswith("after\n")
    assert "| roofline | speed | 0.7 | at least 0.5 | parts own 2 |" in written
    assert "0.1" not in written
    assert "| start | seconds | 9 |" in written
    assert script.written(written, {}) == written


def test_a_missed_target_is_seen(script: ModuleType) -> None:
    line = {"figure": "speed", "value": 0.3, "target": "at least 0.5", "met": False}
    assert "**at least 0.5: missed**" in script.row("roofline", line)


def test_a_mistyped_name_is_refused(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="did you mean 'roofline'"):
        script.main(["rofline"])


def test_every_benchmark_has_its_program(script: ModuleType) -> None:
    there = {path.stem for path in (SCRIPT.parent.parent / "benchmarks").glob("*.py")}
    assert set(script.NAMES) <= there
