"""The command that starts several processes as one mesh, on this machine."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NoReturn

import typer

from fedbilevel.cli.say import complain, remark
from fedbilevel.engine.mesh.join import LOST
from fedbilevel.experiment.registry import ConfigError

commands = typer.Typer()

_GRACE = 10.0
"""Seconds in which the others may end by themselves when one has ended badly."""


@commands.command()
def launch(
    command: Annotated[
        list[str],
        typer.Argument(
            help="What each process runs, behind `--`: `run FILE`, `resume FOLDER`, or a script.py.",
            show_default=False,
        ),
    ],
    processes: Annotated[int, typer.Option("--processes", "-p", help="How many processes.")] = 2,
) -> None:
    """Run a command as several processes that share the work: `launch --processes 2 -- run FILE`.

    They use the mesh engine. If one is lost the others stop; `resume` then goes on from the last checkpoint,
    with as many processes as you like. On a cluster let its scheduler start them: `srun fedbilevel run FILE
    -e mesh`.
    """
    if processes < 1:
        raise ConfigError(f"--processes is {processes}; it must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        reports = [pathlib.Path(folder) / str(number) for number in range(processes)]
        with _started(_program(command), reports) as children:
            code = _outcome(children, reports)
    raise typer.Exit(code)


def _program(command: Sequence[str]) -> list[str]:
    """A script as it is; a command of ours on the mesh, unless it names an engine itself."""
    if command[0].endswith(".py"):
        return [sys.executable, *command]
    named = any(word in ("-e", "--engine") or word.startswith("--engine=") for word in command)
    engine = ["--engine", "mesh"] if command[0] in ("run", "sweep") and not named else []
    return [sys.executable, "-m", "fedbilevel", *command, *engine]


@contextlib.contextmanager
def _started(program: list[str], reports: Sequence[pathlib.Path]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """All processes; none outlives the block. The first speaks for all, the others report to files."""
    address = f"127.0.0.1:{_free_port()}"
    place = {"JAX_COORDINATOR_ADDRESS": address, "JAX_COORDINATOR_BIND_ADDRESS": address}
    place["JAX_NUM_PROCESSES"] = str(len(reports))
    children: list[subprocess.Popen[bytes]] = []
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        for number, report in enumerate(reports):
            own = os.environ | place | {"JAX_PROCESS_ID": str(number)}
            with open(report, "wb") as file:
                speak: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": file} if number else {}
                children.append(subprocess.Popen(program, env=own, **speak))
        yield children
    finally:
        signal.signal(signal.SIGTERM, before)
        _end(children)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _stop(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def _outcome(children: Sequence[subprocess.Popen[bytes]], reports: Sequence[pathlib.Path]) -> int:
    """The exit code of all: that of the first to end badly, which is said."""
    try:
        while not (bad := _badly_ended(children)) and any(child.poll() is None for child in children):
            time.sleep(0.05)
        if not bad:
            return 0
        _wait(children, _GRACE)
    except KeyboardInterrupt:
        _wait(children, _GRACE)
        return 130
    return _explain(bad[0], children[bad[0]].returncode, reports)


def _badly_ended(children: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Numbers of processes that ended badly, those that did so because of another one last."""
    codes = {number: child.poll() for number, child in enumerate(children)}
    consequences = (LOST, -signal.SIGABRT)
    return sorted((n for n, code in codes.items() if code), key=lambda n: (codes[n] in consequences, n))


def _wait(children: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    end = time.monotonic() + seconds
    while any(child.poll() is None for child in children) and time.monotonic() < end:
        time.sleep(0.05)


def _explain(number: int, code: int, reports: Sequence[pathlib.Path]) -> int:
    said = reports[number].read_text(errors="replace").strip()
    if number and said:
        remark(f"Process {number} said:\n" + "\n".join(said.splitlines()[-20:]))
    if code >= 0:
        return code
    complain(
        f"process {number} of {len(reports)} was ended by {signal.Signals(-code).name}, so the others were "
        "stopped. `fedbilevel launch -p ... -- resume FOLDER` goes on from the last checkpoint, with any "
        "number of processes."
    )
    return LOST


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs: politely, then not."""
    for stop in ("terminate", "kill"):
        for child in children:
            if child.poll() is None:
                getattr(child, stop)()
        _wait(children, 2.0)
