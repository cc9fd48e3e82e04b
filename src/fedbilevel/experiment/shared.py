"""A run's folder among several processes: the leading one reads and writes, the others hear what it found."""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

from fedbilevel.engine.mesh.join import leads, several, told
from fedbilevel.experiment.config import Plan
from fedbilevel.experiment.directory import Directory
from fedbilevel.experiment.loop import Evaluation
from fedbilevel.experiment.record import Result, load


class SharedDirectory:
    """A `Directory` of which only the leading process has the files; all processes make the same calls.

    So nothing but the leading process needs a disk, and no process sees a file that another one changes.

    Args:
        path, keep, every: as for `Directory`.
    """

    def __init__(self, path: pathlib.Path, keep: int = 2, every: int = 1) -> None:
        self.path, self._files = path, Directory(path, keep, every)

    def is_done(self, plan: Plan) -> bool:
        """As `Directory.is_done`."""
        return bool(told(lambda: b"yes" if self._files.is_done(plan) else b""))

    def begin(self, plan: Plan, *, again: bool = False) -> Result | None:
        """As `Directory.begin`."""
        return _read(told(lambda: _written(self._files.begin(plan, again=again))))

    def record(self, seen: Evaluation) -> None:
        """As `Directory.record`. What clients keep is collected from all processes, so that all must ask."""
        result = seen.result()
        if leads():
            self._files.record(seen._replace(result=lambda: result))

    def finish(self, result: Result, status: str) -> None:
        """As `Directory.finish`."""
        if leads():
            self._files.finish(result, status)

    def note(self, **facts: Any) -> None:
        """As `Directory.note`."""
        if leads():
            self._files.note(**facts)

    def manifest(self) -> dict[str, Any]:
        """As `Directory.manifest`."""
        facts: dict[str, Any] = json.loads(told(lambda: json.dumps(self._files.manifest()).encode()))
        return facts

    def result(self) -> Result:
        """As `Directory.result`."""
        found = _read(told(lambda: _written(self._files.result())))
        assert found is not None
        return found


def directory_of(path: pathlib.Path, keep: int, every: int) -> Directory | SharedDirectory:
    """The folder of a run, for one process or for one of several."""
    return (SharedDirectory if several() else Directory)(path, keep, every)


def _written(result: Result | None) -> bytes:
    if result is None:
        return b""
    with tempfile.TemporaryDirectory() as folder:
        return result.save(pathlib.Path(folder) / "result.npz").read_bytes()


def _read(content: bytes) -> Result | None:
    if not content:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "result.npz"
        file.write_bytes(content)
        return load(file)
