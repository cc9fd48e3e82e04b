"""NumPy archives (`.npz`)."""

from __future__ import annotations

import pathlib
import zipfile
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from fedbilevel.data.source.folder import damaged


def arrays(path: pathlib.Path, *names: str) -> tuple[npt.NDArray[Any], ...]:
    """The named arrays of an archive. Runs no code of the file: arrays of objects are refused."""
    try:
        # numpy would leave a damaged file open if it had opened it itself.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            return tuple(archive[name] for name in names)
    except KeyError as error:
        raise damaged(path, f"{error.args[0]}; it should hold {', '.join(names)}") from None
    except (
        ValueError,
        TypeError,
        AttributeError,
        OSError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise damaged(path, f"it is no complete NumPy archive ({error})") from None
