"""Shakespeare, one client a role: predict the next character from those before it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedbilevel.data.dataset import Dataset, Table
from fedbilevel.data.error import DataError
from fedbilevel.data.source.folder import contents, damaged

Windows: TypeAlias = npt.NDArray[np.int32]
"""`(samples, length + 1)` codes of characters: what is seen, and the character that follows."""


@dataclasses.dataclass(frozen=True)
class Roles:
    """Reads lines `play TAB role TAB speech`.

    The speeches of a role are joined by line ends, in order; the same name in two plays is two roles. The
    first part of its text is for training, the rest for testing: no character belongs to both. A role whose
    training text is too short for one window is left out.

    Attributes:
        length: characters in a window.
        stride: how far each window lies after the last. With 1, as in LEAF, every character is once a label,
            at the price of `length` integers for each of them (1.3 GB for all plays and 80).
        training: share of a role's text for training.
    """

    length: int = 80
    stride: int = 10
    training: int | float = 0.8

    def __post_init__(self) -> None:
        for name in ("length", "stride"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise DataError(f"{name} is {getattr(self, name)!r}; it must be a whole number of at least 1")
        share: Any = self.training
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise DataError(f"training is {share!r}; it must be a share above 0 and at most 1")

    def __call__(self, path: pathlib.Path) -> Dataset:
        """The data set of one file."""
        texts = _texts(path)
        characters = sorted(set("".join(texts.values())))
        train, test, owners = [], [], []
        for role, text in texts.items():
            codes = _codes(text, characters)
            cut = int(self.training * len(codes))
            if cut > self.length:
                owners.append(role)
                train.append(self._windows(codes[:cut]))
                test.append(self._windows(codes[cut:]))
        if not owners:
            raise DataError(f"{path} has no role with text for one window of {self.length} characters")
        return _dataset(train, test, characters, owners)

    def _windows(self, codes: npt.NDArray[np.int32]) -> Windows:
        if len(codes) <= self.length:
            return np.zeros((0, self.length + 1), np.int32)
        return np.lib.stride_tricks.sliding_window_view(codes, self.length + 1)[:: self.stride]


def read_leaf(train: pathlib.Path, test: pathlib.Path) -> Dataset:
    """The data set of two folders of LEAF's JSON files.

    A file holds `{"users": [...], "user_data": {user: {"x": [text, ...], "y": [next character, ...]}}}`, with
    texts of one length. All samples are kept as they are.
    """
    parts = [dict(_users(folder)) for folder in (train, test)]
    owners = list(parts[0] | parts[1])
    samples = [[part.get(owner, []) for owner in owners] for part in parts]
    lengths = {len(sample) for part in samples for own in part for sample in own}
    if len(lengths) != 1:
        raise DataError(
            f"the texts in {train} and {test} have the lengths {sorted(lengths)}; need one length"
        )
    (length,) = lengths
    characters = sorted({letter for part in samples for own in part for s in own for letter in s})
    coded = [[_codes("".join(own), characters).reshape(-1, length) for own in part] for part in samples]
    return _dataset(coded[0], coded[1], characters, owners)


def _texts(path: pathlib.Path) -> dict[str, str]:
    """The whole text of every role, by `play/role`."""
    speeches: dict[str, list[str]] = {}
    for number, line in enumerate(_decoded(path).split("\n"), 1):
        if line.strip():
            fields = line.rstrip("\r").split("\t")
            if len(fields) != 3:
                raise damaged(path, f"line {number} has {len(fields)} fields, not play TAB role TAB speech")
            speeches.setdefault(f"{fields[0]}/{fields[1]}", []).append(fields[2])
    return {role: "\n".join(said) for role, said in speeches.items()}


def _decoded(path: pathlib.Path) -> str:
    try:
        return contents(path).decode()
    except UnicodeDecodeError as error:
        raise damaged(path, f"it is no UTF-8 text ({error})") from None


def _users(folder: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
    """The samples of every user in a folder of JSON files: each text with its next character appended."""
    files = sorted(folder.glob("*.json")) + sorted(folder.glob("*.json.gz"))
    if not files:
        raise DataError(f"{folder} holds no .json files; LEAF's preprocessing writes them there")
    for path in files:
        try:
            for user, samples in json.loads(_decoded(path))["user_data"].items():
                yield user, [x + y for x, y in zip(samples["x"], samples["y"], strict=True)]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise damaged(path, f'it is no JSON of LEAF ("users", "user_data": x, y): {error!r}') from None


def _codes(text: str, characters: list[str]) -> npt.NDArray[np.int32]:
    """The number of each character of a text in the sorted list of all."""
    known = np.array([ord(character) for character in characters], np.uint32)
    return np.searchsorted(known, np.frombuffer(text.encode("utf-32-le"), np.uint32)).astype(np.int32)


def _dataset(train: list[Windows], test: list[Windows], characters: list[str], owners: list[str]) -> Dataset:
    return Dataset("shakespeare", _table(train), _table(test), tuple(characters), tuple(owners))


def _table(windows: Iterable[Windows]) -> Table:
    """Columns of all owners' windows, one after the other."""
    parts: list[Any] = list(windows)
    samples = np.concatenate(parts)
    owner = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
    # Copies, not views: a view of the inputs would keep the labels' column in memory, and be slow to read.
    return {"inputs": samples[:, :-1].copy(), "labels": samples[:, -1].copy(), "owner": owner}
