"""The command line: `fedbilevel run FILE`, and what goes with it."""

from fedbilevel.cli.main import main, program

__all__ = ["main", "program"]
