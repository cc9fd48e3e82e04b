"""papers/pdbo/from_run: the paper's outer step from a run's first checkpoint."""

from __future__ import annotations

import importlib
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

PAPER = pathlib.Path(__file__).parent.parent.parent / "papers" / "pdbo"
LESS = ("data.share=0.1", "data.partition.clients=3", "algorithm.lower_steps=3", "algorithm.adjoint.terms=2")


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PAPER / "from_run")
        yield importlib.import_module("outer_step")
    del sys.modules["outer_step"]


@pytest.mark.usefixtures("no_figures")
def test_the_rounds_and_the_step_of_x_are_those_of_the_run(
    module: Any, fedbilevel: Any, tmp_path: pathlib.Path
) -> None:
    """With the step size that all of its inner steps end with, of which the script makes one."""
    falling = "algorithm.lower_lr.boundaries_and_scales={1 = 0.1, 2 = 0.1}"
    changes = [f"-s{change}" for change in (*LESS, falling, "algorithm.adjoint_lr=last", "steps=1")]
    which = ["--preset", "small", "--only", "PDBO-DA, FC", "--seed", 0, "--quiet", "--out", tmp_path]
    said = fedbilevel("run", PAPER / "table1.toml", *which, *changes)
    assert said.code == 0, said.err
    folder = tmp_path / "pdbo-da-fc" / "seed-0"
    result, lr = module.outer_step(folder)
    assert lr == pytest.approx(0.25 * 0.01)
    whole = module.fb.load(folder / "result.npz")
    np.testing.assert_allclose(result.x, whole.x, rtol=1e-5)
    assert module.growth(result) == pytest.approx(whole.history[-1]["push_growth"], rel=1e-4)
    shorter, least = module.outer_step(folder, terms=1, share=0.5)
    assert least == pytest.approx(lr / 2)
    assert np.abs(np.asarray(shorter.x)).max() > 0
