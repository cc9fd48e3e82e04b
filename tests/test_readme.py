"""The README's first program is the example's, and prints what the README says; the other examples run."""

from __future__ import annotations

import pathlib
import re
import runpy

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def blocks(language: str, file: str = "README.md") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / file).read_text(), re.DOTALL)


def test_first_program_prints_what_the_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    example = ROOT / "examples" / "ridge.py"
    assert blocks("python")[0].strip() in example.read_text()
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip() == blocks("text")[0].strip()


def printed_by(example: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_nodes_of_one_kind_come_to_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed_by("personal.py", capsys)
    shares = [int(re.findall(r"(\d+)% of the first", line)[0]) for line in lines[:6]]
    low, high = sorted((shares[::2], shares[1::2]))
    assert max(low) < 10
    assert min(high) > 90


def test_ten_times_the_penalty_is_a_tenth_of_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    errors = [float(re.findall(r"error ([\d.]+)", line)[0]) for line in printed_by("own_method.py", capsys)]
    assert 8 < errors[0] / errors[1] < 12
    assert 8 < errors[1] / errors[2] < 12
    assert errors[3] < errors[2]


def test_the_page_about_methods_shows_the_example() -> None:
    example = (ROOT / "examples" / "own_method.py").read_text()
    shown = blocks("python", "docs/methods.md")
    assert len(shown) == 2
    assert all(block.strip() in example for block in shown)


def test_a_sketch_learns_for_its_share_of_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed_by("sketch.py", capsys)
    found = [re.findall(r"([\d.]+)% .* ([\d,]+) bytes", line)[0] for line in lines]
    accuracy, sent = ([float(pair[i].replace(",", "")) for pair in found] for i in (0, 1))
    assert sent[0] * 7850 == sent[1] * 300
    assert 60 < accuracy[0] < accuracy[1]
