"""Jobs of NVFlare as the driver sees them: started, asked, ended."""

from __future__ import annotations

import abc
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from fedbilevel.engine.nvflare.desk import SOCKET
from fedbilevel.engine.nvflare.settings import site_environment
from fedbilevel.portable import Json

_PARTIES = "fedbilevel.engine.nvflare.parties"
ALLOWED = ("fedbilevel.engine.nvflare.parties", "nvflare.collab.runtime")
"""The classes that a job of ours is made of: what a site's policy must allow."""


class JobLostError(RuntimeError):
    """The job has ended although nobody ended it; a new one can go on from the last checkpoint."""


class Job(abc.ABC):
    """A running job: `ask(request) -> reply`."""

    @abc.abstractmethod
    def ask(self, request: bytes) -> bytes:
        """What the server's desk replies. Raises `JobLostError` if the job is gone."""

    @abc.abstractmethod
    def returned(self, gone: set[str]) -> set[str]:
        """Those of the sites that this job has lost that a new one would have."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the job."""


def write_job(folder: pathlib.Path, *, min_clients: int, retries: int, start_timeout: float) -> pathlib.Path:
    """A job of our two generic parties, as NVFlare reads it: three JSON files, no code."""
    controller = {"server_obj_id": "_server", "sync_task_timeout": start_timeout}
    server = {
        "format_version": 2,
        "workflows": [
            {
                "id": "controller",
                "path": "nvflare.collab.runtime.controller.CollabController",
                "args": controller,
            }
        ],
        "components": [{"id": "_server", "path": f"{_PARTIES}.Server", "args": {"retries": retries}}],
    }
    executor = {
        "path": "nvflare.collab.runtime.executor.CollabExecutor",
        "args": {"client_obj_id": "_client"},
    }
    client = {
        "format_version": 2,
        "executors": [{"tasks": ["*"], "executor": executor}],
        "components": [{"id": "_client", "path": f"{_PARTIES}.Site", "args": {}}],
    }
    meta = {
        "name": "fedbilevel",
        "resource_spec": {},
        "min_clients": min_clients,
        "deploy_map": {"app": ["@ALL"]},
    }
    config = folder / "app" / "config"
    config.mkdir(parents=True)
    (config / "config_fed_server.json").write_text(json.dumps(server))
    (config / "config_fed_client.json").write_text(json.dumps(client))
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def allow(local: pathlib.Path) -> None:
    """Let a participant's policy (`local/resources.json`) allow our two classes, beside what it allows."""
    given, usual = local / "resources.json", local / "resources.json.default"
    source = given if given.exists() else usual
    resources: Json = json.loads(source.read_text()) if source.exists() else {"format_version": 2}
    listed = resources.setdefault("class_allow_list", [])
    listed.extend(name for name in ALLOWED if name not in listed)
    local.mkdir(parents=True, exist_ok=True)
    given.write_text(json.dumps(resources, indent=2))


class SimulatedJob(Job):
    """Sites as processes of this machine, made by NVFlare's simulator.

    Args:
        sites: their names.
        data: where they find their own samples, if they have any.
        start_timeout: seconds that they have to start.
        job: settings of `write_job`.
    """

    def __init__(self, sites: Sequence[str], data: str | None, start_timeout: float, **job: Any) -> None:
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="fedbilevel-"))
        self.process: subprocess.Popen[bytes] | None = None
        try:
            allow(self.folder / "workspace" / "local")
            write_job(self.folder / "job", start_timeout=start_timeout, **job)
            self.driver = self._start(sites, data, start_timeout)
        except BaseException:
            self.close()
            raise

    def _start(self, sites: Sequence[str], data: str | None, start_timeout: float) -> Connection:
        address = str(self.folder / "driver")
        command = [
            sys.executable,
            "-m",
            "nvflare.private.fed.app.simulator.simulator",
            str(self.folder / "job"),
        ]
        command += ["-w", str(self.folder / "workspace"), "-c", ",".join(sites), "-t", str(len(sites))]
        environment = site_environment(data, self.folder) | {SOCKET: address}
        with socket.socket(socket.AF_UNIX) as door, self.log.open("wb") as log:
            door.bind(address)
            door.listen()
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
            )
            return self._accept(door, time.monotonic() + start_timeout)

    def _accept(self, door: socket.socket, deadline: float) -> Connection:
        door.settimeout(0.2)
        while time.monotonic() < deadline and self.process is not None and self.process.poll() is None:
            with contextlib.suppress(TimeoutError):
                descriptor = door.accept()[0].detach()
                os.set_blocking(descriptor, True)
                return Connection(descriptor)
        raise JobLostError(f"the simulated sites did not start. {self.last_words()}")

    @property
    def log(self) -> pathlib.Path:
        """What the simulator prints."""
        return self.folder / "log"

    def ask(self, request: bytes) -> bytes:
        try:
            self.driver.send_bytes(request)
            return self.driver.recv_bytes()
        except (EOFError, OSError):
            raise JobLostError(f"the simulated job has ended. {self.last_words()}") from None

    def returned(self, gone: set[str]) -> set[str]:
        return gone  # a new simulation starts all of them

    def last_words(self) -> str:
        """The last errors in the log, to be shown to the user."""
        lines = [
            line
            for line in self.log.read_text(errors="replace").splitlines()
            if re.search("ERROR|Error", line)
        ]
        return "Its last errors: " + " | ".join(line[-300:] for line in lines[-3:]) if lines else ""

    def close(self) -> None:
        if hasattr(self, "driver"):
            self.driver.close()
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
