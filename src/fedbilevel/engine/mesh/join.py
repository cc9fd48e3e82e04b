"""Several processes as one: who we are, what we agree on, and what happens when one is lost."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils

T = TypeVar("T")

HEARTBEAT = 60
"""Seconds of silence after which a process counts as lost, where its connection was not closed before."""

LOST = 75
"""The exit code of a process that has lost another: to be tried again."""

_OURS = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_SCHEDULERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
"""Where `srun` and `mpirun` say how many processes they started; JAX finds out the rest by itself."""


class MeshError(RuntimeError):
    """The processes of a mesh did not come together."""


class LostProcessError(MeshError):
    """Another process of the mesh has gone while this one needed it."""


def join() -> None:
    """Join the other processes, if this one was started as one of several (see `Mesh.join`)."""
    if several():
        return
    where = place_of(os.environ)
    if where is None:
        return
    try:
        jax.distributed.initialize(**where, heartbeat_timeout_seconds=HEARTBEAT)
    except RuntimeError as error:
        raise MeshError(
            f"this process is one of several, but could not join the others: {error}. If it computed before, "
            "call `fb.Mesh.join()` first, right after the imports."
        ) from None
    _meet()


def place_of(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The arguments of `jax.distributed.initialize`; None if this process is alone."""
    given = [environment.get(name) for name in _OURS]
    if any(given[1:]):
        if not all(given):
            missing = [name for name, value in zip(_OURS, given, strict=True) if not value]
            raise MeshError(f"one of several processes also needs {' and '.join(missing)} in its environment")
        address, processes, number = given
        numbers = {"num_processes": _number(_OURS[1], processes), "process_id": _number(_OURS[2], number)}
        return {"coordinator_address": address} | numbers if numbers["num_processes"] > 1 else None
    started = [environment.get(name, "") for name in _SCHEDULERS]
    return {} if any(count.isdigit() and int(count) > 1 for count in started) else None


def _number(name: str, text: str | None) -> int:
    if text is None or not text.isdigit():
        raise MeshError(f"{name} is {text!r}; it must be a whole number")
    return int(text)


def _meet() -> None:
    """The first sum over all processes: connections are made now, while all of them are here.

    Later they might be half a minute apart, each compiling, and making connections does not wait as long.
    """
    with _silent():
        multihost_utils.sync_global_devices("fedbilevel")


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without what the transport prints on standard output, where results belong."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


# ------------------------------------------------------------------ agreement

PIECE = 1 << 26
"""Bytes that are sent at once, at most."""


def several() -> bool:
    """Whether this process has joined others."""
    return bool(jax.distributed.is_initialized())


def leads() -> bool:
    """Whether this process is the one that writes and speaks."""
    return not several() or jax.process_index() == 0


def told(make: Callable[[], bytes]) -> bytes:
    """What the leading process makes, in all of them; an error that it meets is an error of all."""
    if not several():
        return make()
    failure: Exception | None = None
    try:
        content = make() if leads() else b""
    except Exception as error:
        failure, content = error, str(error).encode()
    with watching():
        # A result may have more bytes than 32 bits count, and more than should be sent at once.
        about = np.asarray([*divmod(len(content), PIECE), failure is not None], np.int32)
        pieces, rest, failed = map(int, _from_leader(about))
        sizes = [*[PIECE] * pieces, rest]
        starts = (i * PIECE for i in range(len(sizes)))
        text = b"".join(_piece(content[i : i + n], n) for i, n in zip(starts, sizes, strict=True))
    if failure is not None:
        raise failure
    if failed:
        raise MeshError(f"the leading process stopped: {text.decode()}")
    return text


def _piece(content: bytes, size: int) -> bytes:
    """So many bytes of the leading process in all of them."""
    padded = np.zeros(1 << size.bit_length(), np.uint8)  # few lengths, few programs to compile
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    return _from_leader(padded)[:size].tobytes()


def together(check: Callable[[], None]) -> None:
    """Check something in every process, each what it holds; an error that one meets is an error of all."""
    failure: Exception | None = None
    try:
        check()
    except Exception as error:
        failure = error
    failed = _from_all(failure is not None) if several() else []
    if failure is not None:
        raise failure
    if any(failed):
        others = ", ".join(str(process) for process, has in enumerate(failed) if has)
        raise MeshError(f"this process stops because there was an error in process {others}, which says why")


def _from_all(flag: bool) -> list[bool]:
    with watching():
        return [bool(own) for own in multihost_utils.process_allgather(np.asarray(flag)).ravel()]


def _from_leader(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.asarray(multihost_utils.broadcast_one_to_all(array))


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """What JAX says when another process is lost, in words that help."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not several() or not _LOST.search(str(error)):
            raise
        atexit.register(_leave)
        raise LostProcessError(
            f"another process of the mesh is lost, so process {jax.process_index()} stops. `fedbilevel "
            "resume` goes on from the last checkpoint, with any number of processes. "
            f"({str(error).splitlines()[0][:200]})"
        ) from None


_LOST = re.compile("gloo|nccl|connection|unavailable|deadline|coordination|heartbeat|aborted", re.IGNORECASE)


def _leave() -> None:
    """End at once: a regular end would wait for the lost process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(LOST)
