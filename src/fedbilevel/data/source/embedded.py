"""Sets that need no files: a part of MNIST that comes with this package, and scikit-learn's digits."""

from __future__ import annotations

import hashlib
import importlib
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt

from fedbilevel.data.dataset import Dataset, Table
from fedbilevel.data.source.archive import arrays
from fedbilevel.data.source.base import DataMissingError
from fedbilevel.data.source.idx import as_images
from fedbilevel.data.source.names import DIGITS

MINI = pathlib.Path(__file__).parent.parent / "embedded" / "mnist_mini.npz"
"""The embedded file; `scripts/build_mnist_mini.py` makes it."""

MINI_ARRAYS = ("x_train", "y_train", "x_test", "y_test")

MINI_HASH = "eef2af6835fd7831272ff2cbb88f7caae53030b08e5eef4d0098c71f066592b9"
"""What `content_hash` gives for the embedded arrays."""

_DIGITS_TRAINING = 1437


def read_mini() -> Dataset:
    """10,000 training and 2,000 test images of MNIST, equally many of every digit."""
    x_train, y_train, x_test, y_test = arrays(MINI, *MINI_ARRAYS)
    return Dataset("mnist-mini", _table(x_train, y_train), _table(x_test, y_test), DIGITS)


def read_digits() -> Dataset:
    """scikit-learn's 1,797 digits of 8 × 8 pixels: the first 1,437 (80 %) for training."""
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise DataMissingError(
            f"'digits' is a part of scikit-learn, which cannot be imported ({error}). Install it: "
            "pip install scikit-learn; or take 'mnist-mini', which needs nothing."
        ) from None
    bunch, cut = datasets.load_digits(), _DIGITS_TRAINING
    images, labels = bunch.images, bunch.target
    train, test = _table(images[:cut], labels[:cut], top=16), _table(images[cut:], labels[cut:], top=16)
    return Dataset("digits", train, test, DIGITS)


def content_hash(columns: dict[str, npt.NDArray[Any]]) -> str:
    """SHA-256 of names, types, shapes and values: the same however the arrays are compressed."""
    digest = hashlib.sha256()
    for name, column in columns.items():
        digest.update(f"{name} {column.dtype.str} {column.shape}".encode())
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def _table(images: npt.NDArray[Any], labels: npt.NDArray[Any], top: int | float = 255) -> Table:
    return {"inputs": as_images(images, top), "labels": labels.astype(np.int32)}
