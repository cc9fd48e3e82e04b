"""Several processes by the command line: one is killed, the others stop, and any number of them goes on."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

import fedbilevel as fb
from engine.killing import rows, until
from experiment.tiny import SADDLE, changed, manifest, write
from fedbilevel.experiment.config import plans
from fedbilevel.experiment.runner import run_all

STEPS = 30
LONG = changed(SADDLE, ("steps = 6", f"steps = {STEPS}"), ("every = 2", "every = 1"))


def launched(folder: pathlib.Path, processes: int, *command: str) -> subprocess.Popen[str]:
    start = [sys.executable, "-m", "fedbilevel", "launch", "--processes", str(processes), "--", *command]
    return subprocess.Popen(start, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.terminate()
    return process.returncode, out, err


def child(launcher: int, number: int) -> int:
    """The process of that number in the mesh, by its place in the environment."""
    for text in pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"JAX_PROCESS_ID={number}\0".encode() in pathlib.Path(f"/proc/{text}/environ").read_bytes():
            return int(text)
    raise AssertionError(f"there is no process {number}")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: Any) -> tuple[pathlib.Path, tuple[int, str, str], float, int]:
    """A run whose process 1 was killed: its folder, how the launcher ended, after how long, and its rows."""
    folder: pathlib.Path = tmp_path_factory.mktemp("mesh")
    file, run = write(folder, LONG), folder / "o" / "seed-0"
    launcher = launched(folder, 2, "run", str(file), "-o", "o")
    until(lambda: len(rows(run)) >= 5 or launcher.poll() is not None)
    os.kill(child(launcher.pid, 1), signal.SIGKILL)
    began = time.monotonic()
    said = ended(launcher)
    return run, said, time.monotonic() - began, len(rows(run))


def test_the_others_stop_within_seconds_and_say_why(killed: Any) -> None:
    run, (code, out, err), seconds, reached = killed
    assert code == 75
    assert seconds < 30
    assert "another process of the mesh is lost, so process 0 stops" in " ".join(err.split())
    assert "process 1 of 2 was ended by SIGKILL" in " ".join(err.split())
    assert "resume" in err
    assert "Traceback" not in err
    assert out == ""
    assert manifest(run)["status"] == "failed"
    assert 5 <= reached <= STEPS


def test_it_goes_on_with_another_number_of_processes(killed: Any, tmp_path: pathlib.Path) -> None:
    run, _, _, reached = killed
    before = rows(run)
    code, out, err = ended(launched(run.parent.parent, 3, "resume", "o"))
    assert code == 0, err
    assert err.count("[1/1]") == 1, "one process speaks"
    assert "Gloo" not in out
    assert manifest(run)["status"] == "done"
    assert [row["step"] for row in rows(run)] == list(range(STEPS + 1))
    assert rows(run)[: reached - 2] == before[: reached - 2], "what was reached before is not done again"

    (plan,) = plans(write(tmp_path, LONG))
    (outcome,) = run_all([(plan, tmp_path / "simulated")])
    assert outcome.result is not None
    there = fb.load(run / "result.npz")
    np.testing.assert_allclose(there.x, outcome.result.x, rtol=1e-5)
    np.testing.assert_allclose(there.y, outcome.result.y, rtol=1e-5)
    assert there.ledger == outcome.result.ledger
