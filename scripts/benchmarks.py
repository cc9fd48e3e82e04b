"""Run all benchmarks and write their figures, with machine and versions, into docs/benchmarks.md.

    python scripts/benchmarks.py [name ...]

Each benchmark is a program of its own that prints lines of JSON; those with a `figure` become rows of the
table. With names, only these are run, and the rows of the others stay.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- figures: written by scripts/benchmarks.py -->", "<!-- end of figures -->"
NAMES = (
    "roofline",
    "client_loop",
    "overhead",
    "convolution_torch",
    "convolution",
    "depthwise",
    "selection",
    "narrow",
    "pdbo_torch",
    "pdbo",
    "scale",
    "memory",
    "mesh",
    "start",
)
HEAD = "| benchmark | figure | measured | target | parts |\n|---|---|---|---|---|\n"


def figures(name: str) -> list[dict[str, Any]]:
    """Run a benchmark, show what it prints, and return its figures."""
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py")]
    # A cache of compiled programs would hide what a start takes, and changes nothing of what is timed.
    kept = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    found = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=kept) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            found.append(json.loads(line))
    if process.returncode:
        raise SystemExit(f"benchmarks/{name}.py failed; nothing was written")
    return [line for line in found if "figure" in line]


def row(name: str, line: dict[str, Any]) -> str:
    """A figure as a row of the table."""
    target = line.get("target", "")
    if target and not line["met"]:
        target = f"**{target}: missed**"
    rest = {key: value for key, value in line.items() if key not in ("figure", "value", "target", "met")}
    return f"| {name} | {line['figure']} | {line['value']:g} | {target} | {_words(rest)} |\n"


def _words(value: Any) -> str:
    """Nested parts as text."""
    if isinstance(value, dict):
        parts = (f"{key.replace('_', ' ')} {_words(own)}" for key, own in value.items())
        return "; ".join(parts) if any(isinstance(own, dict) for own in value.values()) else ", ".join(parts)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def machine() -> str:
    """What the figures were measured on, and with."""
    packages = ("jax", "jaxlib", "numpy", "equinox", "torch")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return f"{_processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions}.\n"


def _processor() -> str:
    table = pathlib.Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def written(page: str, rows: dict[str, list[str]]) -> str:
    """The page with new rows for some benchmarks, and the old ones for the others."""
    before, rest = page.split(BEGIN)
    old, after = rest.split(END)
    kept = {
        name: [line + "\n" for line in old.splitlines() if line.startswith(f"| {name} |")] for name in NAMES
    }
    table = HEAD + "".join("".join(lines) for lines in (kept | rows).values())
    return f"{before}{BEGIN}\n\n{machine()}\n{table}\n{END}{after}"


def main(names: list[str]) -> None:
    """Run them and write the page."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        near = difflib.get_close_matches(unknown[0], NAMES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise SystemExit(f"there is no benchmark {unknown[0]!r}; {hint}There are {', '.join(NAMES)}")
    for name in names or NAMES:
        rows = {name: [row(name, line) for line in figures(name)]}
        PAGE.write_text(written(PAGE.read_text(), rows))


if __name__ == "__main__":
    main(sys.argv[1:])
