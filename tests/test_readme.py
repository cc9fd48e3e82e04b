"""The README's first program is the example's, and prints what the README says."""

from __future__ import annotations

import pathlib
import re
import runpy

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_first_program_prints_what_the_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    example = ROOT / "examples" / "ridge.py"
    assert blocks("python")[0].strip() in example.read_text()
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip() == blocks("text")[0].strip()
