"""How the command line speaks: results on standard output, everything else on standard error."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from fedbilevel.engine.mesh.join import leads

EPILOG = (
    "Exit codes: 0 all is well, 1 a run diverged, 2 a mistake in a file or an option, 70 a bug, "
    "75 a process of a mesh was lost, 130 interrupted."
)

_errors = Console(stderr=True, soft_wrap=True)
_out = Console(soft_wrap=True)


def is_terminal() -> bool:
    """Whether somebody looks at standard output."""
    return _out.is_terminal


def complain(message: str) -> None:
    """An error, in plain words."""
    _errors.print(Text("Error: ", style="bold red").append(message, style="default"))


def remark(message: str) -> None:
    """What happens meanwhile; of several processes only the leading one says so."""
    if leads():
        _errors.print(Text(message))


def show(thing: Any) -> None:
    """What was asked for: text, or something that rich can draw; said by the leading process."""
    if leads():
        _out.print(Text(thing) if isinstance(thing, str) else thing)
