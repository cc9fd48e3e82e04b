"""A whole NVFlare system on this machine, with certificates: to try what a real federation will do."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from fedbilevel.engine.nvflare.job import allow
from fedbilevel.engine.nvflare.settings import site_environment

ADMIN = "admin@fedbilevel.org"
_PROJECT = "fedbilevel"


class Premises:
    """A server, sites and an administrator, each with a startup kit of its own from `nvflare provision`.

    Args:
        sites: their names.
        data: where they find their own samples, if they have any.
        folder: where; default: a temporary folder, removed by `close`.
    """

    def __init__(
        self, sites: Sequence[str], data: str | None = None, folder: pathlib.Path | None = None
    ) -> None:
        self.data, self.is_ours = data, folder is None
        self.folder = folder or pathlib.Path(tempfile.mkdtemp(prefix="fedbilevel-"))
        self.sites = list(sites)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self.kits = self._provision()
        except BaseException:
            self.close()
            raise

    def _provision(self) -> pathlib.Path:
        """Make the startup kits; returns the folder that holds them."""
        project = self.folder / "project.yml"
        project.write_text(json.dumps(_project(self.sites, _free_port())))  # JSON is YAML
        command = [
            sys.executable,
            "-m",
            "nvflare.cli",
            "provision",
            "-p",
            str(project),
            "-w",
            str(self.folder),
        ]
        home = {"HOME": str(self.folder)}  # where it writes settings that are none of the user's
        environment = self._environment() | home
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        kits = self.folder / _PROJECT / "prod_00"
        if not kits.exists():
            raise RuntimeError(f"nvflare provision failed: {(done.stderr or done.stdout)[-500:]}")
        for name in ("localhost", *self.sites):
            allow(kits / name / "local")
        return kits

    @property
    def admin(self) -> pathlib.Path:
        """The administrator's startup kit."""
        return self.kits / ADMIN

    def start(self, *names: str) -> None:
        """Start participants; default: the server ("localhost") and all sites."""
        for name in names or ("localhost", *self.sites):
            with (self.kits / name / "console.log").open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    ["bash", str(self.kits / name / "startup" / "sub_start.sh"), "--once"],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment(),
                    cwd=self.kits / name,
                    start_new_session=True,
                )

    def kill(self, name: str) -> None:
        """End a participant at once, with all processes that it has started, as if its machine were gone."""
        import psutil  # comes with NVFlare

        process = self.processes.pop(name)
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for member in family:  # the parent first: it would report the loss of a child
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        process.wait()

    def close(self) -> None:
        """End everything."""
        for name in list(self.processes):
            self.kill(name)
        if self.is_ours:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        """What sites need, and this interpreter first."""
        path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")])
        return site_environment(self.data, self.folder) | {"PATH": path}


def _project(sites: list[str], port: int) -> dict[str, object]:
    server = {"name": "localhost", "type": "server", "org": "fedbilevel", "fed_learn_port": port}
    admin = {"name": ADMIN, "type": "admin", "org": "fedbilevel", "role": "project_admin"}
    clients = [{"name": site, "type": "client", "org": "fedbilevel"} for site in sites]
    builders = ("workspace.WorkspaceBuilder", "static_file.StaticFileBuilder", "cert.CertBuilder")
    return {
        "api_version": 3,
        "name": _PROJECT,
        "participants": [server, admin, *clients],
        "builders": [_builder(name) for name in (*builders, "signature.SignatureBuilder")],
    }


def _builder(name: str) -> dict[str, object]:
    settings = {
        "workspace.WorkspaceBuilder": {"template_file": ["master_template.yml"]},
        "static_file.StaticFileBuilder": {"config_folder": "config"},
    }
    return {"path": f"nvflare.lighter.impl.{name}", "args": settings.get(name, {})}


def _free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])
