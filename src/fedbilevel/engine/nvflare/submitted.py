"""Jobs on a running NVFlare system, reached with an administrator's startup kit."""

from __future__ import annotations

import contextlib
import pathlib
import sys
import tempfile
import time
from typing import Any

from fedbilevel.engine.nvflare.desk import TOPIC, unwrapped, wrapped
from fedbilevel.engine.nvflare.job import Job, JobLostError, write_job

_COMMAND = 30.0
"""Seconds that a command of an administrator may take; the desk answers each within a few."""

_TRIES, _PAUSE = 6, 2.0
"""How often a command is tried, and the seconds between, while the network is away."""
_GATHER = 60.0
"""Seconds to wait for all sites; after that `min_clients` of them will do."""


class SubmittedJob(Job):
    """A job of a real federation. All that is said goes through NVFlare's administration channel, over TLS.

    Args:
        kit: the administrator's startup kit: the folder that holds `startup/`.
        sites: so many sites are waited for, for a while, before the job is submitted.
        start_timeout: seconds that the system has to be ready and the job to start.
        job: settings of `write_job`.
    """

    def __init__(self, kit: pathlib.Path, sites: int, start_timeout: float, **job: Any) -> None:
        deadline = time.monotonic() + start_timeout
        self.number, self.id = 0, ""
        self._lost: dict[str, float] = {}
        self.session = _session(kit, deadline)
        try:
            self._wait_for_sites(sites, job["min_clients"], deadline)
            with tempfile.TemporaryDirectory() as folder:
                path = write_job(pathlib.Path(folder) / "fedbilevel", start_timeout=start_timeout, **job)
                self.id = self.session.submit_job(str(path))
            self._wait_for_start(deadline)
        except BaseException:
            self.close()
            raise

    def _wait_for_sites(self, sites: int, at_least: int, deadline: float) -> None:
        """Until all are there; after a while, those that are there will do if they are enough."""
        patient_until = min(deadline, time.monotonic() + _GATHER)
        while len(connected := self._connected()) < sites:
            enough = len(connected) >= at_least and time.monotonic() > patient_until
            if enough or time.monotonic() > deadline:
                break
            time.sleep(1.0)
        if len(connected) < at_least:
            names = ", ".join(sorted(client.name for client in connected)) or "none"
            raise JobLostError(f"at least {at_least} sites are needed, and connected are: {names}")

    def _wait_for_start(self, deadline: float) -> None:
        status = ""
        while time.monotonic() < deadline and not status.startswith("FINISHED"):
            status = self.session.get_job_status(self.id) or ""
            if status == "RUNNING" and self._desk_is_open():
                return
            time.sleep(0.5)
        raise JobLostError(f"job {self.id} did not start: {status}. `nvflare job logs {self.id}` says why")

    def _desk_is_open(self) -> bool:
        with contextlib.suppress(Exception):  # the job's process is still on its way
            return "error" in self.session.do_app_command(self.id, TOPIC, {"number": -1})
        return False

    def ask(self, request: bytes) -> bytes:
        self.number += 1
        command: dict[str, Any] = {"number": self.number, "request": wrapped(request)}
        while "reply" not in (said := self._command(command)):
            if "error" in said:
                raise JobLostError(f"job {self.id} has forgotten what it was asked: {said['error']}")
            command = {"number": self.number}
        return unwrapped(said["reply"])

    def _command(self, data: dict[str, Any]) -> dict[str, Any]:
        for left in range(_TRIES - 1, -1, -1):
            try:
                return dict(self.session.do_app_command(self.id, TOPIC, data))
            except Exception as error:  # of many kinds; a request has a number, so it can be repeated
                if not left or self._has_ended():
                    raise JobLostError(f"job {self.id} cannot be reached any more: {error}") from error
            time.sleep(_PAUSE)
        raise AssertionError("the loop returns or raises")

    def _has_ended(self) -> bool:
        with contextlib.suppress(Exception):  # not even that can be asked now
            return str(self.session.get_job_status(self.id)).startswith("FINISHED")
        return False

    def returned(self, gone: set[str]) -> set[str]:
        # Times are the server's, so that clocks need not agree; who is lost is still listed for a while.
        heard = {client.name: client.last_connect_time or 0.0 for client in self._connected()}
        now = max(heard.values(), default=0.0)
        self._lost = {site: self._lost.get(site, now) for site in gone}
        return {site for site, lost in self._lost.items() if heard.get(site, 0.0) > lost}

    def _connected(self) -> list[Any]:
        try:
            return list(self.session.get_connected_client_list())
        except Exception as error:
            raise JobLostError(f"the server cannot be reached any more: {error}") from error

    def close(self) -> None:
        with contextlib.suppress(Exception):  # whatever is gone already needs no end
            self.session.abort_job(self.id)
        self.session.close()


def _session(kit: pathlib.Path, deadline: float) -> Any:
    """A session of the administrator whose kit this is; tried until the server is up."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    if not (kit / "startup" / "fed_admin.json").exists():
        raise ValueError(f"{kit} is no administrator's startup kit: there is no startup/fed_admin.json in it")
    while True:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # results alone belong to standard output
                return new_secure_session(kit.name, str(kit), timeout=10.0, command_timeout=_COMMAND)
        except Exception as error:
            if time.monotonic() > deadline:
                raise JobLostError(f"the server of {kit} cannot be reached: {error}") from error
        time.sleep(1.0)
