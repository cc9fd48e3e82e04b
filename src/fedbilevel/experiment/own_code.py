"""Modules of the user's own that an experiment names as `module:name`: what is in them."""

from __future__ import annotations

import hashlib
import importlib.util
import pathlib
import re
from collections.abc import Iterator
from typing import Any

_NAMED = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_][\w.]*")


def fingerprints(config: Any) -> dict[str, str]:
    """What the files of the named modules contain now, hashed: with other code a run is another run.

    What these modules import themselves is not looked at.
    """
    files = {module: _file(module) for module in sorted(set(_modules(config)))}
    return {
        module: hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        for module, file in files.items()
        if file is not None and file.is_file()
    }


def _file(module: str) -> pathlib.Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # of a package around it; who needs the module says it better
        return None
    return None if spec is None or spec.origin is None else pathlib.Path(spec.origin)


def _modules(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _modules(item)
    elif isinstance(value, str) and (match := _NAMED.fullmatch(value)):
        yield match[1]
