"""Messages: a JSON header and raw arrays. Nothing in a message is ever executed.

Layout: `FBL1`, the header's length (4 bytes, little endian), the header (JSON: a body, and dtype and
shape of every array), the arrays' bytes one after another.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedbilevel.portable import DTYPES, Array, Json, plain_array

_MAGIC = b"FBL1"
_MOST_AXES, _LONGEST_AXIS = 32, 1 << 40


class WireError(ValueError):
    """A message is not what it should be."""


def encode(body: Json, arrays: list[Array]) -> bytes:
    """A message; `body` refers to the arrays by number."""
    arrays = [plain_array(array) for array in arrays]
    table = [[array.dtype.name, list(array.shape)] for array in arrays]
    header = json.dumps({"body": body, "arrays": table}).encode()
    parts = [array.tobytes() for array in arrays]
    return b"".join([_MAGIC, struct.pack("<I", len(header)), header, *parts])


def decode(message: bytes) -> tuple[Json, list[Array]]:
    """The body and arrays of a message, all of it checked."""
    if message[:4] != _MAGIC or len(message) < 8:
        raise WireError("it does not begin as a message of this protocol does")
    (length,) = struct.unpack_from("<I", message, 4)
    try:
        header = json.loads(message[8 : 8 + length].decode())
        body, table = header["body"], header["arrays"]
        specs = [(_dtype(name), _shape(lengths)) for name, lengths in table]
    except (ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        raise WireError(f"its header cannot be read: {error}") from None
    return body, _arrays(message, 8 + length, specs)


def _arrays(message: bytes, offset: int, specs: list[tuple[Any, tuple[int, ...]]]) -> list[Array]:
    arrays = []
    for dtype, shape in specs:
        size = math.prod(shape) * dtype.itemsize
        if offset + size > len(message):
            raise WireError(f"it ends before its array of {dtype} {shape}")
        flat = np.frombuffer(message, dtype, math.prod(shape), offset)
        arrays.append(flat.reshape(shape))
        offset += size
    if offset != len(message):
        raise WireError(f"{len(message) - offset} bytes are left over behind its arrays")
    return arrays


def _dtype(name: Any) -> Any:
    if name not in DTYPES:
        raise WireError(f"{name!r} is no dtype for a message")
    return jnp.dtype(name)


def _shape(lengths: Any) -> tuple[int, ...]:
    whole = all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < _LONGEST_AXIS for n in lengths)
    if not whole or len(lengths) > _MOST_AXES:
        raise WireError(f"{lengths!r} is no shape of an array")
    return tuple(lengths)
