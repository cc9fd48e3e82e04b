"""Writes small files in the true formats of the data sets."""

from __future__ import annotations

import gzip
import pathlib
import struct
from typing import Any

import numpy as np
from PIL import Image

RANDOM = np.random.default_rng(0)


def write(path: pathlib.Path, raw: bytes) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw, 1) if path.suffix == ".gz" else raw)
    return path


def idx_bytes(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def pixels(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, shape, np.uint8)


def numbers(count: int, classes: int) -> np.ndarray:
    return RANDOM.integers(0, classes, count).astype(np.uint8)


def write_idx_set(
    folder: pathlib.Path, prefixes: tuple[str, str] = ("train", "t10k"), ending: str = "", classes: int = 10
) -> dict[str, np.ndarray]:
    """Four IDX files; returns what was written, as `x_train`, `y_train`, `x_test`, `y_test`."""
    written = {}
    for part, prefix, count in (("train", prefixes[0], 12), ("test", prefixes[1], 5)):
        written |= {f"x_{part}": pixels(count, 28, 28), f"y_{part}": numbers(count, classes)}
        for kind, letter in (("images-idx3", "x"), ("labels-idx1", "y")):
            write(folder / f"{prefix}-{kind}-ubyte{ending}", idx_bytes(written[f"{letter}_{part}"]))
    return written


def python2_pickle(content: dict[str, Any]) -> bytes:
    """A dictionary as Python 2 pickled it (protocol 2), for CIFAR's python version; Python 3 cannot."""
    items = b"".join(_python2_value(key) + _python2_value(value) for key, value in content.items())
    return b"\x80\x02}q\x01(" + items + b"u."


def _python2_value(value: Any) -> bytes:
    if isinstance(value, str):
        return b"U" + bytes([len(value)]) + value.encode()
    if isinstance(value, list):
        return b"](" + b"".join(map(_python2_value, value)) + b"e"
    if isinstance(value, int):
        return b"K" + bytes([value])
    shape = b"".join(b"M" + struct.pack("<H", length) for length in value.shape)
    raw = value.tobytes()
    return (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85U\x01b\x87Rq\x04"
        + (b"(K\x01" + shape + b"\x86cnumpy\ndtype\nq\x05U\x02u1K\x00K\x01\x87Rq\x06")
        + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        + (b"T" + struct.pack("<i", len(raw)) + raw + b"tb")
    )


def write_drawing(path: pathlib.Path, ink: np.ndarray) -> None:
    """A drawing as Omniglot stores it: one bit a pixel, black ink on white."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(~ink).save(path)
