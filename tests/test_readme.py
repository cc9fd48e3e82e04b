"""The README's first program is the example's, and prints what the README says."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_first_program_prints_what_the_readme_says() -> None:
    example = ROOT / "examples" / "ridge.py"
    assert blocks("python")[0].strip() in example.read_text()
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == blocks("text")[0].strip()
