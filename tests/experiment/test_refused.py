"""What a refused run leaves as it was, and changes that lead to a refusal."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest

import fedbilevel as fb
from experiment.tiny import SADDLE, plan, write
from fedbilevel.experiment import DivergenceWarning
from fedbilevel.experiment.change import merged
from fedbilevel.experiment.config import plans
from fedbilevel.experiment.construct import construct
from fedbilevel.experiment.recorded import RunError
from fedbilevel.experiment.registry import SCHEDULES, ConfigError
from fedbilevel.experiment.runner import run_all


def contents(folder: Any) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_run_with_other_settings_leaves_the_finished_one_alone(tmp_path: Any) -> None:
    folder = tmp_path / "run"
    list(run_all([(plan(tmp_path), folder)]))
    before = contents(folder)
    with pytest.raises(RunError, match="holds a run with other settings"):
        list(run_all([(plan(tmp_path, algorithm__upper_lr=0.012), folder)]))
    assert contents(folder) == before
    assert json.loads((folder / "manifest.json").read_text())["status"] == "done"


def test_a_mistake_in_one_of_several_runs_changes_none_of_their_folders(tmp_path: Any) -> None:
    good, bad = plan(tmp_path), plan(tmp_path, algorithm__cohort=99)
    list(run_all([(good, tmp_path / "good")]))
    before = contents(tmp_path / "good")
    with pytest.raises(ConfigError, match="cohort is 99"):
        list(run_all([(good, tmp_path / "good"), (bad, tmp_path / "bad")], together=True, again=True))
    assert contents(tmp_path / "good") == before
    assert not (tmp_path / "bad").exists()


def test_factors_at_certain_steps_can_be_written_in_toml() -> None:
    table = {"kind": "piecewise_constant_schedule", "init_value": 1.0, "boundaries_and_scales": {"2": 0.5}}
    schedule = construct(table, SCHEDULES, "algorithm.upper_lr")
    assert [float(schedule(step)) for step in (1, 3)] == [1.0, 0.5]
    with pytest.raises(ConfigError, match="must be a table such as"):
        construct(table | {"boundaries_and_scales": {"two": 1}}, SCHEDULES, "algorithm.upper_lr")


def test_a_preset_cannot_change_a_variant_that_there_is_not(tmp_path: Any) -> None:
    text = f"{SADDLE}\n[variants.one]\n[presets.small.variants.won]\nsteps = 1\n"
    with pytest.raises(ConfigError, match="no variant 'won'; did you mean 'one'"):
        plans(write(tmp_path, text), preset="small")


def test_a_kind_of_ones_own_takes_over_the_settings_that_it_has() -> None:
    base = {"algorithm": {"kind": "FedNest", "upper_lr": 0.1, "lower_lr": 0.2, "terms": 3}}
    change = {"algorithm": {"kind": "fedbilevel.algorithm:FedAvgS"}}
    assert merged(base, change)["algorithm"] == change["algorithm"] | {"upper_lr": 0.1, "lower_lr": 0.2}


def test_own_variables_that_overflow_end_the_run_at_the_last_finite_ones() -> None:
    known = fb.Quadratic.random(jax.random.key(0), 3, 2, 2)
    method = fb.FedBiOLocal(0.0, 1e30, 0.1)
    with pytest.warns(DivergenceWarning):
        result = fb.solve(known.problem(), known.clients(), method, 20, every=20)
    assert result.diverged
    assert np.all(np.isfinite(result.y))


def test_names_that_differ_only_in_signs_are_refused(tmp_path: Any) -> None:
    text = f'{SADDLE}\n[variants."A b"]\n[variants."a-b"]\n'
    with pytest.raises(ConfigError, match="have the same folder"):
        plans(write(tmp_path, text))
