"""A run's folder is one run's at a time: two would write into each other's rows and checkpoints."""

from __future__ import annotations

import contextlib
import logging
import pathlib
from collections.abc import Iterator

from filelock import BaseFileLock, FileLock, Timeout

from fedbilevel.engine.mesh.join import told
from fedbilevel.experiment.recorded import RunError

log = logging.getLogger(__name__)


@contextlib.contextmanager
def claimed(folder: pathlib.Path) -> Iterator[None]:
    """Hold a folder; an error that explains if another run does.

    The operating system holds the lock, so that what is killed holds nothing any more. On a disk without such
    locks a file is one, as `filelock` makes it, or there is a warning only. Of several processes that run
    together the leading one, which alone writes there, holds it for all.
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
        lock.acquire()
    except Timeout:
        raise RunError(
            f"another run is going on in {folder}. Wait until it has ended, stop it, or choose another "
            "folder with --out."
        ) from None
    except (NotImplementedError, OSError) as error:  # a disk without locks
        log.warning("%s cannot be locked (%s): see to it that no other run writes there", folder, error)
    return b""
