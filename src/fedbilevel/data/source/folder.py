"""Where data files are looked for, and how they are opened."""

from __future__ import annotations

import gzip
import os
import pathlib
import zlib
from collections.abc import Iterator, Sequence

from fedbilevel.data.error import DataError
from fedbilevel.data.source.base import DataMissingError, Form, Source

VARIABLE = "FEDBILEVEL_DATA"
"""The environment variable that names a folder with data."""

_GZIP = b"\x1f\x8b"


def cache_folder() -> pathlib.Path:
    """The user's own folder for downloads: `$XDG_CACHE_HOME/fedbilevel`, usually `~/.cache/fedbilevel`."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules say that a relative path is to be ignored: it would depend on the working directory.
    base = pathlib.Path(given) if os.path.isabs(given) else pathlib.Path.home() / ".cache"
    return base / "fedbilevel"


def roots(dir: str | os.PathLike[str] | None) -> tuple[pathlib.Path, ...]:
    """The folders to search: `dir` alone if given; else that of the environment, then the user's cache."""
    if dir is not None:
        return (pathlib.Path(dir).expanduser(),)
    given = os.environ.get(VARIABLE)
    return (*((pathlib.Path(given).expanduser(),) if given else ()), cache_folder())


def subfolders(source: Source) -> tuple[str, ...]:
    """Sub-folders of a data folder in which a set may lie; "" is the folder itself.

    The top comes last: MNIST and Fashion-MNIST have files of the same names, and a folder that bears a
    set's name is the better witness.
    """
    own = dict.fromkeys((source.name, source.own_folder, ""))
    return tuple(f"{base}/{usual}".strip("/") for base in own for usual in (*source.folders, ""))


def locate(source: Source, folders: Sequence[pathlib.Path]) -> tuple[Form, tuple[pathlib.Path, ...]] | None:
    """The first form of a set whose files are all there, with their paths; None: there is none."""
    for root in folders:
        for form in source.forms:
            for sub in subfolders(source):
                paths = [_present(root / sub, file) for file in form.files]
                if None not in paths:
                    return form, tuple(path for path in paths if path)
    return None


def missing(source: Source, folders: Sequence[pathlib.Path]) -> DataMissingError:
    """The error that says what was looked for, where, and how to get it."""
    wanted = "\n  or ".join(", ".join(form.files) for form in source.forms)
    below = ", ".join(sub for sub in subfolders(source) if sub)
    looked = "\n".join(f"  {root}" + ("" if root.is_dir() else " (no such folder)") for root in folders)
    return DataMissingError(
        f"the data set {source.name!r} was not found.\nWanted, plain or .gz:\n     {wanted}\n"
        f"Looked in, and in the sub-folders {below}:\n{looked}\n"
        + "".join(f"Incomplete: {line}\n" for line in _incomplete(source, folders))
        + f"How to get it: {source.how_to_get}"
    )


def contents(path: pathlib.Path) -> bytes:
    """The bytes of a file, unpacked if it is a gzip file (whatever its name says)."""
    raw = path.read_bytes()
    try:
        return gzip.decompress(raw) if raw.startswith(_GZIP) else raw
    except (EOFError, OSError, zlib.error) as error:
        raise damaged(path, f"it cannot be unpacked ({error})") from None


def damaged(path: pathlib.Path, why: str) -> DataError:
    """The error for a file that is not what its name says."""
    return DataError(f"{path} is damaged or of another format: {why}. Delete it and get it again.")


def _present(folder: pathlib.Path, name: str) -> pathlib.Path | None:
    if name.endswith("/"):
        return folder / name if (folder / name).is_dir() else None
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _incomplete(source: Source, folders: Sequence[pathlib.Path]) -> Iterator[str]:
    """Places that hold a part of what is needed."""
    for place in (root / sub for root in folders for sub in subfolders(source)):
        for form in source.forms:
            absent = [file for file in form.files if _present(place, file) is None]
            if 0 < len(absent) < len(form.files):
                yield f"{place} lacks {', '.join(absent)}"
