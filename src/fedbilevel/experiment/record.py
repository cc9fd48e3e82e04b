"""What a run leaves behind: the solution, its history and its cost."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from fedbilevel.fed.ledger import Ledger
from fedbilevel.portable import PortableError, loaded, pack, unpack
from fedbilevel.tree import PyTree

Row: TypeAlias = dict[str, float]

_FORMAT = "fedbilevel result 1"


@dataclasses.dataclass(frozen=True)
class History(Sequence[Row]):
    """Rows of numbers, one an evaluation: step, metrics, what the method reports, cumulative cost."""

    rows: tuple[Row, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> History: ...
    def __getitem__(self, index: int | slice) -> Row | History:
        return History(self.rows[index]) if isinstance(index, slice) else self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def column(self, name: str) -> npt.NDArray[Any]:
        """One number of every row, NaN where a row has none; an unknown name is an error."""
        names = {key for row in self.rows for key in row}
        if name not in names:
            raise KeyError(f"there is no column {name!r}; the columns are {sorted(names)}")
        return np.array([row.get(name, np.nan) for row in self.rows])


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished, stopped or diverged run.

    Attributes:
        x, y: the variables (y has one row a client where the lower level is local).
        history: rows of step, metrics and cumulative cost.
        ledger: the whole cost.
        diverged: whether a NaN or overflow stopped it; x and y are then the last finite ones.
        steps: how many steps led here.
        seed: of the run.
        state: all that the algorithm carries: what `solve(..., start=result)` goes on from.
        failures: what went wrong at clients, one line each.
        notes: what the run itself found suspicious, one line each.
        smoothness: what `smoothness="auto"` measured at the start; None if nothing had to be measured.
    """

    x: PyTree
    y: PyTree
    history: History
    ledger: Ledger
    diverged: bool
    steps: int
    seed: int
    state: PyTree
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    smoothness: float | None = None

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write it to a file: a zip of one JSON text and `.npy` arrays. Atomic: all of it, or nothing."""
        structure, arrays = pack(self)
        header = json.dumps({"format": _FORMAT, "result": structure}, allow_nan=True)
        contents: dict[str, Any] = {f"array{i}": array for i, array in enumerate(arrays)}
        target = pathlib.Path(path)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as file:
            try:
                np.savez(file, header=np.frombuffer(header.encode(), np.uint8), **contents)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, target)
            except BaseException:
                os.unlink(file.name)
                raise
        return target


def load(path: str | os.PathLike[str]) -> Result:
    """Read what `Result.save` wrote. Runs no code of the file: it holds numbers and names only."""
    try:
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(file["header"].tobytes().decode())
            arrays = [file[f"array{i}"] for i in range(len(file.files) - 1)]
    except (ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
        raise PortableError(f"{path} is not a result that `Result.save` wrote: {error}") from None
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise PortableError(f"{path} is not of the format {_FORMAT!r}; was it written by another version?")
    result = unpack(header["result"], arrays, loaded)
    if not isinstance(result, Result):
        raise PortableError(f"{path} holds a {type(result).__name__}, not a result")
    return result
