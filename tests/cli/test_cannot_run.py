"""What the command line makes of a method that cannot run over its links."""

import os
from typing import Any

import pytest

from experiment.test_cannot_run import NETWORKS, REASON
from experiment.tiny import write

pytestmark = pytest.mark.usefixtures("no_figures")


def test_run_goes_on_and_ends_well(fedbilevel: Any, tmp_path: Any) -> None:
    said = fedbilevel("run", write(tmp_path, NETWORKS), "--out", "there")
    assert said.code == 0
    assert f"[2/3] ring, seed 0: n/a, {REASON}, there/ring/seed-0" in said.err
    assert f"ring: n/a, {REASON}" in said.out
    assert fedbilevel("compare", "there", "--no-figures").out == said.out
    resumed = fedbilevel("resume", "there")
    assert (resumed.code, resumed.out) == (0, said.out)


def test_alone_it_has_nothing_to_compare(fedbilevel: Any, tmp_path: Any) -> None:
    said = fedbilevel("run", write(tmp_path, NETWORKS), "--only", "ring")
    assert said.code == 0
    assert REASON in said.err
    assert "No comparison: no run has been evaluated yet" in said.err


def test_a_dry_run_says_so_too(fedbilevel: Any, tmp_path: Any) -> None:
    said = fedbilevel("run", write(tmp_path, NETWORKS), "--only", "ring", "--dry-run")
    assert (said.code, os.listdir(tmp_path)) == (0, ["tiny.toml"])
    assert f"ring: n/a, {REASON}" in said.out
