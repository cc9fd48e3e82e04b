"""The 10,000 test images of EMNIST's `mnist` split as a small set of its own."""

from __future__ import annotations

import pathlib

import numpy as np

from fedbilevel.data.dataset import Dataset, Table
from fedbilevel.data.source.archive import arrays
from fedbilevel.data.source.folder import damaged
from fedbilevel.data.source.idx import as_images, read_part
from fedbilevel.data.source.names import DIGITS

_TRAINING = 0.8


def read_test_files(images: pathlib.Path, labels: pathlib.Path) -> Dataset:
    """The set from the two IDX files of the test part."""
    return _divided(read_part(images, labels, transposed=True))


def read_test_archive(path: pathlib.Path) -> Dataset:
    """The set from a NumPy archive of `x` (samples, 28, 28), stored transposed, and `y`."""
    pixels, labels = arrays(path, "x", "y")
    if pixels.ndim != 3 or labels.shape != pixels.shape[:1]:
        raise damaged(path, f"x has the shape {pixels.shape} and y {labels.shape}")
    upright = np.ascontiguousarray(pixels.swapaxes(1, 2))
    return _divided({"inputs": as_images(upright), "labels": labels.astype(np.int32)})


def _divided(columns: Table) -> Dataset:
    """The first 80 % for training, the rest for testing: their order is random already."""
    cut = int(_TRAINING * len(columns["labels"]))
    train = {name: column[:cut] for name, column in columns.items()}
    test = {name: column[cut:] for name, column in columns.items()}
    return Dataset("emnist-mnist-10k", train, test, DIGITS)
