"""Omniglot: 1,623 handwritten characters of 50 alphabets, each drawn by 20 people."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from fedbilevel.data.dataset import Dataset, Table
from fedbilevel.data.error import DataError
from fedbilevel.data.source.archive import arrays
from fedbilevel.data.source.folder import damaged

_SIDE = 105


@dataclasses.dataclass(frozen=True)
class Folders:
    """Reads the original folders, `Alphabet/character01/0001_01.png` (the last number is the drawer's).

    `labels` are characters, numbered through both parts: training (background) first; `coarse` are alphabets;
    `owner` is the drawer, 0..19. Drawers of the same number need not be one person in different alphabets.

    Attributes:
        side: the images are reduced from 105 × 105 to side × side by averaging areas; 105 keeps them.
    """

    side: int = 28

    def __call__(self, background: pathlib.Path, evaluation: pathlib.Path) -> Dataset:
        """The data set of both folders."""
        parts = [_characters(folder) for folder in (background, evaluation)]
        numbers = {path: number for number, path in enumerate(parts[0] + parts[1])}
        names = dict.fromkeys(path.parent.name for path in numbers)
        alphabets = {name: number for number, name in enumerate(names)}
        train, test = (self._table(part, numbers, alphabets) for part in parts)
        return _dataset(train, test, [f"{path.parent.name}/{path.name}" for path in numbers])

    def _table(
        self, part: list[pathlib.Path], numbers: dict[pathlib.Path, int], alphabets: dict[str, int]
    ) -> Table:
        files = {folder: sorted(folder.glob("*.png")) for folder in part}
        images = [reduced(np.stack([*map(_read, paths)]), self.side) for paths in files.values()]
        flat = [(folder, path) for folder, paths in files.items() for path in paths]
        labels = [numbers[folder] for folder, _ in flat]
        coarse = [alphabets[folder.parent.name] for folder, _ in flat]
        return _table(np.concatenate(images), labels, coarse, [_drawer(path) for _, path in flat])


@dataclasses.dataclass(frozen=True)
class Archive:
    """Reads the NumPy archive: `x_bits` (characters, 20, 1379) are 105 · 105 packed bits, ink = 1.

    Columns and `side` are those of `Folders`.
    """

    side: int = 28

    def __call__(self, path: pathlib.Path) -> Dataset:
        """The data set in an archive."""
        wanted = "x_bits", "char_alphabet", "alphabets", "char_split", "char_names"
        bits, alphabet, alphabets, split, characters = arrays(path, *wanted)
        if bits.ndim != 3 or bits.shape[2] != -(-_SIDE * _SIDE // 8):
            raise damaged(path, f"x_bits has the shape {bits.shape}, not (characters, drawers, 1379)")
        train, test = (self._table(bits, alphabet, np.flatnonzero(split == part)) for part in (0, 1))
        names = [f"{alphabets[a]}/{name}" for a, name in zip(alphabet, characters, strict=True)]
        return _dataset(train, test, names)

    def _table(self, bits: npt.NDArray[Any], alphabet: npt.NDArray[Any], rows: npt.NDArray[Any]) -> Table:
        drawers = bits.shape[1]
        images = np.concatenate([reduced(_unpacked(bits[row]), self.side) for row in rows])
        owner = np.tile(np.arange(drawers), len(rows))
        return _table(images, np.repeat(rows, drawers), np.repeat(alphabet[rows], drawers), owner)


def reduced(images: npt.NDArray[Any], side: int) -> npt.NDArray[np.float32]:
    """Square images `(samples, n, n)` as `(samples, side, side, 1)`: a pixel is the mean over its area."""
    weights = _overlaps(images.shape[1], side)
    # The weights of a pixel sum to one but for rounding, which may not lift a black area above 1.
    small = np.minimum(weights @ images.astype(np.float32) @ weights.T, np.float32(1))
    return small[..., None]


def _overlaps(n: int, side: int) -> npt.NDArray[np.float32]:
    """`(side, n)`: which share of new pixel i is covered by old pixel j, along one axis."""
    edges, old = np.linspace(0, n, side + 1), np.arange(n)
    lower, upper = np.maximum.outer(edges[:-1], old), np.minimum.outer(edges[1:], old + 1)
    return (np.maximum(upper - lower, 0) * side / n).astype(np.float32)


def _unpacked(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.unpackbits(bits, axis=1)[:, : _SIDE * _SIDE].reshape(-1, _SIDE, _SIDE)


def _characters(folder: pathlib.Path) -> list[pathlib.Path]:
    """The folders of all characters, sorted by alphabet."""
    found = sorted(path for path in folder.glob("*/*/") if next(path.glob("*.png"), None))
    if not found:
        raise DataError(
            f"{folder} holds no files Alphabet/character01/0001_01.png: is it unpacked elsewhere?"
        )
    return found


def _read(path: pathlib.Path) -> npt.NDArray[Any]:
    """One drawing, ink = 1; in the files ink is black."""
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("L"))
    except (OSError, SyntaxError, ValueError) as error:
        raise damaged(path, f"it is no complete PNG image ({error})") from None
    if pixels.shape != (_SIDE, _SIDE):
        raise damaged(path, f"the image has the shape {pixels.shape}, not ({_SIDE}, {_SIDE})")
    return pixels < 128


def _drawer(path: pathlib.Path) -> int:
    try:
        return int(path.stem.rpartition("_")[2]) - 1
    except ValueError:
        raise DataError(f"{path} should end in the drawer's number, like 0001_01.png") from None


def _table(
    images: npt.NDArray[Any], labels: Sequence[int] | Any, coarse: Sequence[int] | Any, owner: Any
) -> Table:
    integers = {"labels": labels, "coarse": coarse, "owner": owner}
    return {"inputs": images, **{name: np.asarray(column, np.int32) for name, column in integers.items()}}


def _dataset(train: Table, test: Table, characters: list[str]) -> Dataset:
    drawers = 1 + max(int(part["owner"].max()) for part in (train, test))
    owners = tuple(f"drawer {number + 1}" for number in range(drawers))
    return Dataset("omniglot", train, test, tuple(characters), owners)
