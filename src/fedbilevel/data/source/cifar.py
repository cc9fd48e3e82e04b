"""CIFAR-10 and CIFAR-100, in their binary and python versions, and as NumPy archives."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt

from fedbilevel.data.dataset import Dataset, Table
from fedbilevel.data.source.archive import arrays
from fedbilevel.data.source.folder import contents, damaged
from fedbilevel.data.source.idx import as_images
from fedbilevel.data.source.plain import PlainError, read_plain

_PIXELS = 3 * 32 * 32


@dataclasses.dataclass(frozen=True)
class Binary:
    """Reads the binary version: a record is its label bytes, then 3 · 32 · 32 pixels, channel by channel.

    Attributes:
        name: of the set.
        classes: names of the labels.
        columns: what the label bytes mean: `("labels",)`, or `("coarse", "labels")` in CIFAR-100.
    """

    name: str
    classes: tuple[str, ...]
    columns: tuple[str, ...] = ("labels",)

    def __call__(self, *paths: pathlib.Path) -> Dataset:
        """The data set of some files for training and, last, one for testing."""
        *train, test = map(self._records, paths)
        return Dataset(self.name, self._table(np.concatenate(train)), self._table(test), self.classes)

    def _records(self, path: pathlib.Path) -> npt.NDArray[np.uint8]:
        raw, length = contents(path), len(self.columns) + _PIXELS
        if not raw or len(raw) % length:
            raise damaged(path, f"its {len(raw):,} bytes are not a number of records of {length:,} bytes")
        return np.frombuffer(raw, np.uint8).reshape(-1, length)

    def _table(self, records: npt.NDArray[np.uint8]) -> Table:
        first = len(self.columns)
        return _table(records[:, first:], **{name: records[:, i] for i, name in enumerate(self.columns)})


@dataclasses.dataclass(frozen=True)
class Python:
    """Reads the python version: pickled dictionaries of `data` and lists of labels.

    Attributes:
        name: of the set.
        classes: names of the labels.
        columns: key in the dictionary of each column of labels.
    """

    name: str
    classes: tuple[str, ...]
    columns: tuple[tuple[str, str], ...] = (("labels", "labels"),)

    def __call__(self, *paths: pathlib.Path) -> Dataset:
        """The data set of some files for training and, last, one for testing."""
        *train, test = map(self._columns, paths)
        joined = {name: np.concatenate([part[name] for part in train]) for name in test}
        return Dataset(self.name, _table(**joined), _table(**test), self.classes)

    def _columns(self, path: pathlib.Path) -> dict[str, npt.NDArray[Any]]:
        try:
            content = {_text(key): value for key, value in read_plain(contents(path)).items()}
            columns = {name: np.asarray(content[key], np.uint8) for name, key in self.columns}
            return {"pixels": content["data"].reshape(-1, _PIXELS), **columns}
        except KeyError as error:
            raise damaged(path, f"it has no entry {error}") from None
        except (PlainError, AttributeError, ValueError, TypeError, OverflowError) as error:
            raise damaged(path, str(error)) from None


@dataclasses.dataclass(frozen=True)
class Archive:
    """Reads a NumPy archive with a part of the set: `x_train`, `y_train` (coarse: `c_train`), `x_test`, ...

    The data set is called like the archive, so that no report takes a part of the images for all of them.
    """

    classes: tuple[str, ...]
    columns: tuple[tuple[str, str], ...] = (("labels", "y"),)

    def __call__(self, path: pathlib.Path) -> Dataset:
        """The data set in an archive."""
        train, test = (self._table(path, part) for part in ("train", "test"))
        return Dataset(path.stem, train, test, self.classes)

    def _table(self, path: pathlib.Path, part: str) -> Table:
        pixels, *labels = arrays(
            path, *(f"{letter}_{part}" for letter in ("x", *(c for _, c in self.columns)))
        )
        return _table(
            pixels, **{name: column for (name, _), column in zip(self.columns, labels, strict=True)}
        )


def _table(pixels: npt.NDArray[Any], **labels: npt.NDArray[Any]) -> Table:
    """Columns of images stored channel by channel."""
    images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return {"inputs": as_images(images), **{name: column.astype(np.int32) for name, column in labels.items()}}


def _text(key: str | bytes) -> str:
    """Keys are bytes where Python 2 wrote the file and Python 3 has written it again."""
    return key.decode() if isinstance(key, bytes) else key
