"""A folder is one process's at a time."""

import errno
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pytest

from experiment.tiny import manifest, plan
from fedbilevel.experiment import claim
from fedbilevel.experiment.claim import claimed
from fedbilevel.experiment.recorded import RunError
from fedbilevel.experiment.runner import run_all

HOLD = """
import pathlib, sys, time
from fedbilevel.experiment import claim
from fedbilevel.experiment.claim import claimed
with claimed(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_folder_is_refused_until_the_process_in_it_is_killed(
    tmp_path: pathlib.Path,
) -> None:
    folder, wanted = tmp_path / "run", plan(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=r"another run is going on in .*run\..* --out"):
            list(run_all([(wanted, folder)]))
        assert not (folder / "manifest.json").exists(), "nothing was touched"
        other.send_signal(signal.SIGKILL)
    list(run_all([(wanted, folder)]))
    assert manifest(folder)["status"] == "done"


def test_a_folder_is_free_again_after_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="mine"), claimed(tmp_path):
        raise ValueError("mine")
    with claimed(tmp_path):
        pass


def test_a_run_that_is_done_needs_no_lock(tmp_path: pathlib.Path) -> None:
    folder, wanted = tmp_path / "run", plan(tmp_path)
    list(run_all([(wanted, folder)]))
    with claimed(folder):
        (outcome,) = run_all([(wanted, folder)])
    assert outcome.status == "done"


def test_runs_that_share_a_folder_are_refused_before_any_begins(tmp_path: pathlib.Path) -> None:
    wanted, folder = plan(tmp_path), tmp_path / "run"
    with pytest.raises(RunError, match=r"two runs have the same folder, .*run; each needs its own"):
        list(run_all([(wanted, folder), (wanted, tmp_path / "." / "run")]))
    assert not folder.exists()


def test_a_disk_without_locks_is_a_warning(tmp_path: pathlib.Path, monkeypatch: Any, caplog: Any) -> None:
    def refuse(lock: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(claim.FileLock, "acquire", refuse)
    with claimed(tmp_path):
        pass
    assert "cannot be locked ([Errno 37] No locks available)" in caplog.text
