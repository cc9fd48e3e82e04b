"""A run's folder is one process's at a time: two would write into each other's rows and checkpoints."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

from filelock import BaseFileLock, FileLock, Timeout

from fedbilevel.engine.mesh.join import told
from fedbilevel.experiment.recorded import RunError


@contextlib.contextmanager
def claimed(folder: pathlib.Path) -> Iterator[None]:
    """Hold a folder; an error that explains if another process does. What is killed holds nothing any more.

    Of several processes that run together the leading one, which alone writes there, holds it for all.
    """
    lock = FileLock(folder / ".lock", timeout=0)
    told(lambda: _taken(lock, folder))
    try:
        yield
    finally:
        lock.release()


def _taken(lock: BaseFileLock, folder: pathlib.Path) -> bytes:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.suppress(NotImplementedError):  # a file system that has no locks
            lock.acquire()
    except Timeout:
        raise RunError(
            f"another process is running in {folder}. Wait until it has ended, stop it, or choose another "
            "folder with --out."
        ) from None
    return b""
