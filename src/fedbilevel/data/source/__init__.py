"""Data sets by name: where they come from, and how their files are read.

`load("mnist-mini")` works everywhere; `SOURCES` tells what else there is, and `get` downloads it.
"""

from fedbilevel.data.source.base import DataMissingError, Download, Form, Package, Source
from fedbilevel.data.source.download import fetch, get
from fedbilevel.data.source.load import load
from fedbilevel.data.source.registry import SOURCES

__all__ = [
    "SOURCES",
    "DataMissingError",
    "Download",
    "Form",
    "Package",
    "Source",
    "fetch",
    "get",
    "load",
]
