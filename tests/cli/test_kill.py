"""A real process, stopped by real signals: it goes on to the same bits."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from experiment.tiny import SADDLE, changed, checkpoints, manifest, rows, same_run, write
from fedbilevel import load

LONG = changed(SADDLE, ("steps = 6", "steps = 150"), ("every = 2", "every = 1"))

# What a shell starts in the background, as it may start these tests, is deaf to interrupts.
LISTENING = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("fedbilevel", run_name="__main__", alter_sys=True)
"""


def stopped_at(line: int, how: signal.Signals, folder: pathlib.Path, *arguments: str) -> tuple[int, str]:
    """Start a command, send a signal as soon as the history has so many lines, and wait for its end."""
    history = folder / "seed-0" / "history.jsonl"
    command = [sys.executable, "-c", LISTENING, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder.parent) as process:
        end = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end:
            begun = history.exists()
            if begun and history.read_bytes().count(b"\n") >= line:
                process.send_signal(how)
                break
            time.sleep(0.0005 if begun else 0.02)  # while it starts it gets the processor
        _, err = process.communicate(timeout=60)
    return process.returncode, err


@pytest.mark.usefixtures("no_figures")
def test_killed_damaged_and_interrupted_it_ends_in_the_same_bits(fedbilevel: Any, tmp_path: Any) -> None:
    file, folder = write(tmp_path, LONG), tmp_path / "o"
    assert stopped_at(5, signal.SIGKILL, folder, "run", str(file), "-o", "o")[0] == -signal.SIGKILL
    killed = len(rows_so_far(folder))
    assert manifest(folder / "seed-0")["status"] == "running"

    newest = checkpoints(folder / "seed-0")[-1]
    content = bytearray(newest.read_bytes())
    content[100] ^= 255
    newest.write_bytes(content)
    code, err = stopped_at(killed + 5, signal.SIGINT, folder, "resume", "o")
    interrupted = len(rows_so_far(folder))
    assert code == 130
    assert "fedbilevel resume o" in err
    assert "Traceback" not in err
    assert sum(newest.name in line for line in err.splitlines()) == 1, "one line about the damage"
    assert manifest(folder / "seed-0")["status"] == "interrupted"
    assert 5 <= killed < killed + 5 <= interrupted < 150

    assert fedbilevel("resume", "o").code == 0
    assert fedbilevel("run", file, "-o", "whole").code == 0
    assert same_run(load(folder / "seed-0" / "result.npz"), load("whole/seed-0/result.npz"))
    assert rows(folder / "seed-0") == rows(tmp_path / "whole" / "seed-0")
    assert sorted(os.listdir(folder / "seed-0")) == sorted(os.listdir("whole/seed-0")), "no drafts are left"


def rows_so_far(folder: pathlib.Path) -> list[Any]:
    """The complete lines of a history."""
    lines = (folder / "seed-0" / "history.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]
