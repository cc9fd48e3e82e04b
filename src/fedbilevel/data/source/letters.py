"""OCR letters: handwritten lower-case letters, one natural client a word. (Not EMNIST's letters.)"""

from __future__ import annotations

import pathlib
import string
from typing import Any

import numpy as np
import numpy.typing as npt

from fedbilevel.data.dataset import Dataset, Table
from fedbilevel.data.source.archive import arrays
from fedbilevel.data.source.folder import contents, damaged
from fedbilevel.data.source.idx import as_images

_HEIGHT, _WIDTH = 16, 8
_FIELDS = 6 + _HEIGHT * _WIDTH


def read_text(path: pathlib.Path) -> Dataset:
    """The data set of the original text.

    A line has, between tabs: number, letter, number of the next letter, word, position, fold, 128 pixels.
    """
    lines = [line.split("\t")[:_FIELDS] for line in contents(path).decode("latin1").splitlines()]
    try:
        table = np.array(lines)
        pixels = table[:, 6:].astype(np.uint8).reshape(-1, _HEIGHT, _WIDTH)
        labels = np.array([string.ascii_lowercase.index(letter) for letter in table[:, 1]])
        return _dataset(pixels, labels, table[:, 3].astype(int), table[:, 5].astype(int))
    except (ValueError, IndexError) as error:
        raise damaged(path, f"its lines are not {_FIELDS} fields between tabs ({error})") from None


def read_archive(path: pathlib.Path) -> Dataset:
    """The data set of a NumPy archive: `x_bits` (samples, 16) packed pixels, `y`, `word`, `fold`."""
    bits, labels, word, fold = arrays(path, "x_bits", "y", "word", "fold")
    if bits.ndim != 2 or bits.shape[1] != _HEIGHT * _WIDTH // 8:
        raise damaged(path, f"x_bits has the shape {bits.shape}, not (samples, 16)")
    return _dataset(np.unpackbits(bits, axis=1).reshape(-1, _HEIGHT, _WIDTH), labels, word, fold)


def _dataset(
    pixels: npt.NDArray[Any], labels: npt.NDArray[Any], word: npt.NDArray[Any], fold: npt.NDArray[Any]
) -> Dataset:
    """Fold 0 of the ten is for testing. A word lies in one fold: no client has both."""
    words, owner = np.unique(word, return_inverse=True)
    columns = {"labels": labels.astype(np.int32), "owner": owner.astype(np.int32)}
    train, test = (_rows(pixels, columns, chosen) for chosen in (fold != 0, fold == 0))
    owners = tuple(f"word {number}" for number in words)
    return Dataset("ocr-letters", train, test, tuple(string.ascii_lowercase), owners)


def _rows(pixels: npt.NDArray[Any], columns: Table, chosen: npt.NDArray[Any]) -> Table:
    kept = {name: column[chosen] for name, column in columns.items()}
    return {"inputs": as_images(pixels[chosen], top=1), **kept}
