"""The commands in one program, and what their mistakes look like."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

import typer

from fedbilevel import __version__
from fedbilevel.cli import data, demo, federate, launch, look, run, site
from fedbilevel.cli.say import EPILOG, complain
from fedbilevel.engine.mesh.join import LOST, LostProcessError

app = typer.Typer(
    name="fedbilevel",
    help="Federated bilevel optimisation: run experiments, compare methods, look things up.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
groups = (run, launch, federate, site, look, demo)
for group in (module.commands for module in groups):
    app.registered_commands.extend(group.registered_commands)
app.add_typer(data.commands, name="data")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fedbilevel {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Say the version."
    ),
) -> None:
    """Federated bilevel optimisation: run experiments, compare methods, look things up."""


def main() -> None:
    """Run the command line. A user's mistake is one message and exit code 2, never a traceback.

    `FEDBILEVEL_DEBUG=1` shows the traceback.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    warnings.showwarning = _one_line
    sys.path.append(os.getcwd())  # where `kind = "module:name"` is looked for first
    try:
        app()
    except Exception as error:
        if os.environ.get("FEDBILEVEL_DEBUG"):
            raise
        expected = isinstance(error, ValueError | TypeError | RuntimeError | OSError)
        complain(
            str(error) if expected else f"{type(error).__name__}: {error} (FEDBILEVEL_DEBUG=1 shows where)"
        )
        sys.exit(LOST if isinstance(error, LostProcessError) else 2 if expected else 70)


def program() -> None:
    """`main` as a program: one that was interrupted ends at once.

    XLA may be compiling in threads of its own, which a regular end of the interpreter does not survive.
    """
    try:
        main()
    except SystemExit as end:
        if end.code != 130:
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)


def _one_line(message: Any, *_: Any, **__: Any) -> None:
    print(f"Warning: {message}", file=sys.stderr)
