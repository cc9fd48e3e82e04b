"""What a client agreed to run: compared when it joins, so that a server can ask for nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, Self

from fedbilevel.portable import Array, Json

_PARTS = ("problem", "algorithm", "probes", "x64")
"""The parts of a configuration that both sides must have alike. The rest is a client's own."""
_MEASURED = ("smoothness",)
"""Fields whose values a run may measure itself."""
_CLASS, _FUNCTION = "(class)", "(function)"  # no field can have such a name
_MOST_SHOWN = 5


class AgreementError(ValueError):
    """The server asks for something that this client did not agree to."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The configurations that a client accepts.

    Attributes:
        accepted: fingerprints; None: any that names nothing but this library's own classes and functions.
    """

    accepted: tuple[Json, ...] | None = None

    @classmethod
    def load(cls, accepted: Sequence[Json] | None) -> Self:
        """From JSON."""
        return cls(None if accepted is None else tuple(accepted))

    def check(self, configuration: Json, arrays: Sequence[Array]) -> None:
        """Raise an error that says what differs, unless the configuration is an accepted one."""
        found = fingerprint(configuration, arrays)
        _check_names([_plain(value, arrays) for key, value in configuration["dict"] if key not in _PARTS])
        if self.accepted is None:
            _check_names(found)
            return
        differing = [list(differences(mine, found)) for mine in self.accepted]
        if not all(differing):
            return
        nearest = min(differing, key=len)
        shown = "; ".join(nearest[:_MOST_SHOWN]) + ("; ..." if len(nearest) > _MOST_SHOWN else "")
        raise AgreementError(
            f"the server's configuration is not the one agreed here ({digest(found)}): {shown}"
        )


def fingerprint(configuration: Json, arrays: Sequence[Array]) -> Json:
    """A packed configuration as plain JSON, its arrays as dtype, shape and hash."""
    content = dict(configuration["dict"])
    return {part: _plain(content[part], arrays) for part in _PARTS}


def digest(found: Json) -> str:
    """A short name of a fingerprint."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12]


def differences(mine: Json, theirs: Json, path: str = "") -> Iterator[str]:
    """Where two fingerprints differ, one line each."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in dict.fromkeys([*mine, *theirs]):
            yield from differences(mine.get(key), theirs.get(key), f"{path}.{key}" if path else key)
    elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            yield from differences(a, b, f"{path}[{place}]")
    elif mine != theirs:
        yield f"{path} is {_brief(theirs)} at the server and {_brief(mine)} here"


def _plain(structure: Json, arrays: Sequence[Array]) -> Json:
    if isinstance(structure, list):
        return [_plain(item, arrays) for item in structure]
    if not isinstance(structure, dict):
        return structure
    ((tag, content),) = structure.items()
    if tag == "array":
        return _array(arrays[content])
    if tag == "key":
        return _array(arrays[content[1]])
    if tag == "object":
        fields = {name: _plain(value, arrays) for name, value in content[1].items() if name not in _MEASURED}
        return {_CLASS: content[0]} | fields
    if tag in ("dict", "ordered"):
        return {str(_plain(key, arrays)): _plain(value, arrays) for key, value in content}
    if tag == "name":
        return {_FUNCTION: content}
    if tag == "named":
        return {_CLASS: content[0], "items": _plain(content[1], arrays)}
    return {tag: _plain(content, arrays)}


def _array(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


def _check_names(found: Json) -> None:
    foreign = sorted(
        {name for name in _names(found) if name.partition(".")[0].partition(":")[0] != "fedbilevel"}
    )
    if foreign:
        raise AgreementError(
            f"the server names {', '.join(foreign[:_MOST_SHOWN])}, which is not of this library. A site runs "
            "such code only if it agreed to the experiment: `fedbilevel site KIT FILE ...`"
        )


def _names(found: Json) -> Iterator[str]:
    """All classes and functions that a fingerprint names."""
    if isinstance(found, dict):
        yield from (found[kind] for kind in (_CLASS, _FUNCTION) if kind in found)
    for item in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from _names(item)


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
