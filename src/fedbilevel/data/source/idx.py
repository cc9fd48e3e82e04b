"""The IDX format of MNIST and its relatives."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt

from fedbilevel.data.dataset import Dataset, Table
from fedbilevel.data.error import DataError
from fedbilevel.data.source.folder import contents, damaged

_DTYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}

_FIRST_LABELS = {
    "mnist": (5, 0, 4, 1, 9, 2, 1, 3, 1, 4),
    "fashion-mnist": (9, 0, 0, 3, 0, 2, 7, 2, 5, 5),
}
"""How the training labels begin: these sets have files of the same names, and are easily mixed up."""


def read_idx(path: pathlib.Path) -> npt.NDArray[Any]:
    """The array in an IDX file: two zero bytes, type, number of axes, their lengths, then the values."""
    raw = contents(path)
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _DTYPES:
        raise damaged(path, f"an IDX file begins with two zero bytes and a type, this one with {raw[:4]!r}")
    dtype, start = np.dtype(_DTYPES[raw[2]]), 4 + 4 * raw[3]
    shape = tuple(int.from_bytes(raw[i : i + 4], "big") for i in range(4, start, 4))
    wanted = start + math.prod(shape) * dtype.itemsize
    if len(raw) != wanted:
        raise damaged(path, f"its header promises {wanted:,} bytes, it has {len(raw):,}")
    return np.frombuffer(raw, dtype, offset=start).reshape(shape)


def as_images(raw: npt.NDArray[Any], top: int | float = 255) -> npt.NDArray[np.float32]:
    """Values 0..top as float32 in [0, 1]; grey images `(samples, height, width)` get a channel axis."""
    scaled = np.divide(raw, np.float32(top), dtype=np.float32)
    return scaled if raw.ndim == 4 else scaled[..., None]


def read_part(
    images: pathlib.Path, labels: pathlib.Path, transposed: bool = False, first_label: int = 0
) -> Table:
    """The columns of one pair of IDX files."""
    pixels, numbers = read_idx(images), read_idx(labels)
    if pixels.ndim != 3 or numbers.shape != pixels.shape[:1]:
        raise DataError(
            f"{images} has the shape {pixels.shape} and {labels} {numbers.shape}; they should be "
            "(samples, height, width) and (samples,): they do not belong together, or one is incomplete"
        )
    # Transposing first and scaling after leaves the images contiguous in the order in which they are read.
    upright = np.ascontiguousarray(pixels.swapaxes(1, 2)) if transposed else pixels
    return {"inputs": as_images(upright), "labels": numbers.astype(np.int32) - first_label}


@dataclasses.dataclass(frozen=True)
class FourFiles:
    """Reads images and labels for training and for testing.

    Attributes:
        name: of the set.
        classes: names of the labels.
        transposed: the files hold the images with rows and columns exchanged, as EMNIST's do.
        first_label: the number of the first class in the files (1 in EMNIST's letters).
    """

    name: str
    classes: tuple[str, ...]
    transposed: bool = False
    first_label: int = 0

    def __call__(
        self,
        train_images: pathlib.Path,
        train_labels: pathlib.Path,
        test_images: pathlib.Path,
        test_labels: pathlib.Path,
    ) -> Dataset:
        """The data set of the four files."""
        train = read_part(train_images, train_labels, self.transposed, self.first_label)
        test = read_part(test_images, test_labels, self.transposed, self.first_label)
        self._check_identity(train["labels"], train_labels)
        return Dataset(self.name, train, test, self.classes)

    def _check_identity(self, labels: npt.NDArray[Any], path: pathlib.Path) -> None:
        seen = tuple(labels[:10].tolist())
        for name, first in _FIRST_LABELS.items():
            if seen == first and self.name in _FIRST_LABELS and name != self.name:
                raise DataError(
                    f"{path} holds the labels of {name!r}, not of {self.name!r}; their files have the same "
                    f"names: put those of {self.name!r} into a sub-folder {self.name}"
                )
