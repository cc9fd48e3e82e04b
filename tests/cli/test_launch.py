"""The command that starts several processes, as far as it needs none."""

import signal
import sys
import types
from typing import Any

import pytest

from experiment.tiny import write
from fedbilevel.cli.launch import _badly_ended, _program


def test_commands_run_on_the_mesh_unless_they_say_otherwise() -> None:
    assert _program(["run", "a.toml"])[-4:] == ["run", "a.toml", "--engine", "mesh"]
    assert _program(["run", "a.toml", "-e", "mesh"])[-4:] == ["run", "a.toml", "-e", "mesh"]
    assert _program(["sweep", "--engine=process"])[-2:] == ["sweep", "--engine=process"]
    assert _program(["resume", "folder"])[1:] == ["-m", "fedbilevel", "resume", "folder"]
    assert _program(["script.py", "3"]) == [sys.executable, "script.py", "3"]


def test_who_was_killed_comes_before_who_noticed() -> None:
    codes = (75, 0, -signal.SIGABRT, -signal.SIGKILL, None)
    children: list[Any] = [types.SimpleNamespace(poll=lambda code=code: code) for code in codes]
    assert _badly_ended(children) == [3, 0, 2]


def test_no_process_is_a_mistake(fedbilevel: Any) -> None:
    said = fedbilevel("launch", "--processes", "0", "--", "run", "a.toml")
    assert said.code == 2
    assert "--processes is 0" in said.err


def test_several_processes_must_not_all_do_the_same(fedbilevel: Any, monkeypatch: Any, tmp_path: Any) -> None:
    for name, value in {"COORDINATOR_ADDRESS": "h:1", "NUM_PROCESSES": "2", "PROCESS_ID": "0"}.items():
        monkeypatch.setenv(f"JAX_{name}", value)
    said = fedbilevel("run", write(tmp_path))
    assert said.code == 2
    assert "the engine is 'simulator', and each would do all of the work" in " ".join(said.err.split())


@pytest.mark.usefixtures("no_figures")
def test_the_mesh_by_name(fedbilevel: Any, tmp_path: Any) -> None:
    file = write(tmp_path)
    assert fedbilevel("run", file, "--engine", "mesh", "-o", "o").code == 0
    assert fedbilevel("resume", "o").code == 0
