"""What a run leaves behind: the solution, its history and its cost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, overload

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from fedbilevel.experiment.best import BestPoint, Row
from fedbilevel.experiment.suspicion import notes
from fedbilevel.fed.ledger import Ledger
from fedbilevel.portable import DTYPES, Array, PortableError, loaded, pack, unpack
from fedbilevel.tree import PyTree, size

_FORMAT = "fedbilevel result 2"


@dataclasses.dataclass(frozen=True, repr=False)
class History(Sequence[Row]):
    """Rows of numbers, one an evaluation: step, metrics, what the method reports, cumulative cost.

    Attributes:
        rows: the rows.
        per_client: for each row the clients' own values of the problem's `client_metrics`.
    """

    rows: tuple[Row, ...] = ()
    per_client: tuple[Mapping[str, npt.NDArray[Any]], ...] = ()

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> History: ...
    def __getitem__(self, index: int | slice) -> Row | History:
        if isinstance(index, slice):
            return History(self.rows[index], self.per_client[index])
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        return f"History of {len(self)} rows with the columns {', '.join(names)}"

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def column(self, name: str) -> npt.NDArray[Any]:
        """One number of every row, NaN where a row has none; an unknown name is an error."""
        names = {key for row in self.rows for key in row}
        if name not in names:
            raise KeyError(f"there is no column {name!r}; the columns are {sorted(names)}")
        return np.array([row.get(name, np.nan) for row in self.rows])

    def clients(self, name: str) -> npt.NDArray[Any]:
        """A client metric at every client, `(rows, clients)`."""
        names = sorted({key for values in self.per_client for key in values})
        if name not in names:
            raise KeyError(f"there is no client metric {name!r}; there are {names}")
        return np.array([values[name] for values in self.per_client])


@dataclasses.dataclass(frozen=True, repr=False)
class Result:
    """A finished, stopped or diverged run; printed, it is a summary of a few lines.

    Attributes:
        x, y: the variables (y has one row a client where the lower level is local).
        history: rows of step, metrics and cumulative cost.
        ledger: the whole cost.
        diverged: whether a NaN or overflow stopped it; x and y are then the last finite ones.
        steps: how many steps led here.
        seed: of the run.
        state: all that the algorithm carries: what `solve(..., start=result)` goes on from.
        failures: what went wrong at clients, one line each.
        trouble: what was suspicious in the reports of the adjoint: kind -> worst number (`notes` says it).
        smoothness: what `smoothness="auto"` measured at the start; None if nothing had to be measured.
        best: where the metric of `solve(..., best=)` was best; None if none was named.
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
    trouble: Mapping[str, float] = dataclasses.field(default_factory=dict)
    smoothness: float | None = None
    best: BestPoint | None = None

    def __repr__(self) -> str:
        end = "diverged after" if self.diverged else "after"
        sizes = f"x of {size(self.x):,} and y of {size(self.y):,} numbers"
        lines = [f"Result {end} {self.steps:,} steps (seed {self.seed}): {sizes}"]
        if measured := ", ".join(f"{name} {value:.6g}" for name, value in self._last_measured().items()):
            lines.append(f"  last  {measured}")
        return "\n".join((*lines, str(self.ledger), *self.notes))

    def _last_measured(self) -> Row:
        """The last row of the history, without the step and the cost."""
        known = {"step", *self.ledger.columns()}
        last = self.history[-1] if self.history else {}
        return {name: value for name, value in last.items() if name not in known}

    @property
    def notes(self) -> tuple[str, ...]:
        """What the run itself found suspicious, one line each."""
        return notes(self.trouble)

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write it to a file: a zip of one JSON text and `.npy` arrays. Atomic: all of it, or nothing."""
        structure, arrays = pack(self)
        dtypes = [array.dtype.name for array in arrays]
        header = json.dumps({"format": _FORMAT, "result": structure, "dtypes": dtypes})
        contents: dict[str, Any] = {f"array{i}": _native(array) for i, array in enumerate(arrays)}
        with written(path) as file:
            np.savez(file, header=np.frombuffer(header.encode(), np.uint8), **contents)
        return pathlib.Path(path)


@contextlib.contextmanager
def written(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file that appears under its name when all of it is on the disk, or not at all."""
    target = pathlib.Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(draft, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str]) -> Result:
    """Read what `Result.save` wrote. Runs no code of the file: it holds numbers and names only."""
    with open(path, "rb") as file:
        try:
            header, arrays = _read(file)
        except _UNREADABLE as error:
            raise PortableError(f"{path} is not a result that `Result.save` wrote: {error!r}") from None
    result = unpack(header.get("result"), arrays, loaded)
    if not isinstance(result, Result):
        raise PortableError(f"{path} holds a {type(result).__name__}, not a result")
    return result


_UNREADABLE = (
    *(ValueError, KeyError, TypeError, AttributeError, IndexError, OSError, EOFError, RecursionError),
    *(NotImplementedError, zipfile.BadZipFile, zlib.error),
)
"""What zipfile and numpy raise on files that are damaged, or not of this kind."""


def _read(file: IO[bytes]) -> tuple[dict[str, Any], list[Any]]:
    """The header and the arrays of a file, each in its own dtype."""
    if not zipfile.is_zipfile(file):
        raise ValueError("it is no zip file")
    file.seek(0)
    with np.load(file, allow_pickle=False) as archive:
        header = json.loads(archive["header"].tobytes().decode())
        if header["format"] != _FORMAT:
            raise ValueError(f"its format is {header['format']!r}, not {_FORMAT!r}: another version's?")
        names = header["dtypes"]
        if any(name not in DTYPES for name in names):
            raise ValueError("it holds arrays of an unknown dtype")
        return header, [archive[f"array{i}"].view(jnp.dtype(name)) for i, name in enumerate(names)]


def _native(array: Array) -> Array:
    """An array as numpy can write it: bfloat16 and its like as integers of the same width."""
    return array if array.dtype.isbuiltin == 1 else array.view(f"uint{8 * array.dtype.itemsize}")
