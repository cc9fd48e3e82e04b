"""The command line: `fedbilevel run FILE`, and what goes with it."""

from fedbilevel.cli.main import main

__all__ = ["main"]
