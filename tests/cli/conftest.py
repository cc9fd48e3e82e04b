"""The command line in this process, so that tests share what is compiled."""

import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from fedbilevel.cli import main, run


class Said(NamedTuple):
    """The exit code of a command, and what it wrote."""

    code: int
    out: str
    err: str


@pytest.fixture
def fedbilevel(monkeypatch: Any, capsys: Any, tmp_path: Any) -> Callable[..., Said]:
    """Runs a command in a folder of its own; anything but an exit is an error, as a traceback would be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)

    def call(*arguments: Any) -> Said:
        monkeypatch.setattr(sys, "argv", ["fedbilevel", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Said(int(stopped.value.code or 0), out, err)

    return call


@pytest.fixture
def no_figures(monkeypatch: Any) -> None:
    """Figures take most of the time of a small run; here they are empty files."""

    def drawn(runs: Any, metric: Any, folder: pathlib.Path) -> list[pathlib.Path]:
        file = folder / "comparison.png"
        file.write_bytes(b"")
        return [file]

    monkeypatch.setattr(run, "draw_curves", drawn)
