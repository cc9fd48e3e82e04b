"""What a site says about itself: where its data are, and which experiments it agreed to.

A file of the site's own, `local/fedbilevel.json` in its startup kit: no server can change it.
"""

from __future__ import annotations

import json
import os
import pathlib

from fedbilevel.engine.agreement import Agreement
from fedbilevel.engine.configuration import client_environment, main_script
from fedbilevel.engine.worker import Worker
from fedbilevel.portable import Json

FILE = "fedbilevel.json"
SCRIPT = "FEDBILEVEL_SCRIPT"
"""The environment variable that says how the driver's own program was started; only a driver that started the
sites itself sets it, and such sites trust it."""
DATA = "FEDBILEVEL_OWN_DATA"
"""The environment variable that says where such sites find their own data."""


def write_settings(local: pathlib.Path, *, data: str | None, agreed: list[Json] | None) -> None:
    """Write a site's settings into the `local` folder of its startup kit."""
    (local / FILE).write_text(json.dumps({"data": data, "agreed": agreed}))


def make_worker(site: str, local: str) -> Worker:
    """The worker of a site whose local configuration is in that folder."""
    file = pathlib.Path(local) / FILE
    if file.exists():
        settings = json.loads(file.read_text())
        return Worker(data=settings["data"], site=site, agreement=Agreement.load(settings["agreed"]))
    if SCRIPT in os.environ:
        return Worker(json.loads(os.environ[SCRIPT]), os.environ.get(DATA), site)
    return Worker(agreement=Agreement())


def site_environment(data: str | None, folder: pathlib.Path) -> dict[str, str]:
    """The environment of sites that this process starts itself, with a folder for what they share."""
    own = {SCRIPT: json.dumps(main_script())} | ({} if data is None else {DATA: data})
    return client_environment(str(folder / "compiled")) | own
