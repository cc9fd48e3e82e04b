"""Every experiment file that the project shows can be understood, whole and in small."""

from __future__ import annotations

import pathlib
import re

import pytest

from fedbilevel.experiment.citation import bibtex
from fedbilevel.experiment.config import plans, read

ROOT = pathlib.Path(__file__).parent.parent
FILES = sorted((ROOT / "papers").rglob("*.toml"))
FREE = {"mnist-mini"}  # what a new machine has


def test_there_are_files() -> None:
    assert {file.parent.name for file in FILES} >= {"fednest"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_file_says_what_it_is_and_can_be_understood(file: pathlib.Path) -> None:
    assert file.read_text().startswith("# "), "its first line is what `fedbilevel list papers` shows"
    presets = read(file)["presets"]
    assert "small" in presets
    for preset in (None, *presets):
        found = plans(file, preset=preset)
        assert len({plan.seed for plan in found}) == 3, f"three seeds ({preset})"


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_in_small_it_runs_anywhere(file: pathlib.Path) -> None:
    data = [plan.config.get("data", {}).get("name") for plan in plans(file, preset="small")]
    assert {name for name in data if name is not None} <= FREE


def test_the_files_of_the_docs_can_be_understood(tmp_path: pathlib.Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "experiments.md").read_text(), re.DOTALL)
    (tmp_path / "file.toml").write_text(block)
    whole, small = (plans(tmp_path / "file.toml", preset=preset) for preset in (None, "small"))
    assert [plan.variant for plan in whole] == [name for name in ("FedNest", "LFedNest") for _ in range(3)]
    assert small[0].config["steps"] == 20
    assert "tarzanagh" in bibtex([whole[0].config["algorithm"]["kind"]]).lower()
