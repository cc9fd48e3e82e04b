"""The measured exponents of FedBiO's complexities: the fit, what is counted, and one small rung."""

from __future__ import annotations

import importlib
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax.random as jr
import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parent.parent / "papers" / "fedbio" / "complexity"
MODULES = ("theorems", "spending", "ladder", "tables")


@pytest.fixture(scope="module")
def complexity() -> Iterator[Any]:
    """All names of the program's modules in one place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        names = [vars(importlib.import_module(module)) for module in MODULES]
    yield types.SimpleNamespace(**{name: value for module in names for name, value in module.items()})
    for module in MODULES:
        del sys.modules[module]


def test_a_power_law_is_found_exactly(complexity: Any) -> None:
    epsilons = [0.1 / 2**k for k in range(5)]
    found = complexity.fit(epsilons, [7 * e**-1.5 for e in epsilons])
    assert found.slope == pytest.approx(-1.5, abs=1e-12)
    assert found.half == pytest.approx(0, abs=1e-6)
    with pytest.raises(ValueError, match="there are 2 rungs"):
        complexity.fit(epsilons[:2], [1, 2])


def test_the_interval_holds_the_true_slope_as_often_as_it_says(complexity: Any) -> None:
    draw, epsilons = np.random.default_rng(0), np.array([0.1 / 2**k for k in range(6)])
    fits = [complexity.fit(epsilons, epsilons**-1.0 * np.exp(0.2 * draw.normal(size=6))) for _ in range(1000)]
    inside = np.mean([abs(found.slope + 1) <= found.half for found in fits])
    assert 0.93 < inside < 0.97


@pytest.mark.parametrize(
    ("slope", "half", "said"),
    [(-1.5, 0.01, "as steep"), (-1.7, 0.1, "steeper"), (-1.7, 0.3, "as steep"), (-1.2, 0.1, "less steep")],
)
def test_a_bound_is_denied_only_by_a_steeper_slope(
    complexity: Any, slope: float, half: float, said: str
) -> None:
    assert complexity.verdict(complexity.Fit(slope, half), -1.5) == said


def test_settings_scale_as_the_theorems_say(complexity: Any) -> None:
    """From ε to ε/64."""
    for setting in (complexity.fedbio, complexity.fedbio_local):
        one, other = setting(1.0), setting(64.0)
        assert other.batch == 64 * one.batch
        assert other.algorithm.upper_lr == pytest.approx(one.algorithm.upper_lr / 8)
        assert other.algorithm.sync_every == one.algorithm.sync_every
    one, other = complexity.fedbioacc(1.0), complexity.fedbioacc(64.0)
    assert (other.batch, other.algorithm.sync_every) == (8 * one.batch, one.algorithm.sync_every)
    assert other.algorithm.delta == pytest.approx(4 * one.algorithm.delta)
    assert other.algorithm.t0 == pytest.approx(64 * one.algorithm.t0)
    assert other.algorithm.c_upper == pytest.approx(one.algorithm.c_upper / 8)
    local = complexity.fedbioacc_local(64.0)
    assert (local.batch, local.lower_batch) == (other.batch, complexity.CLIENTS * other.batch)
    small = complexity.fedbioacc_small(64.0)
    assert (small.batch, small.algorithm.sync_every) == (one.batch, 4 * one.algorithm.sync_every)
    assert small.algorithm.t0 == pytest.approx(4**4.5 * one.algorithm.t0)
    assert local.algorithm.terms > complexity.fedbioacc_local(1.0).algorithm.terms


def test_the_mean_over_the_points_where_a_round_began_decides(complexity: Any) -> None:
    assert complexity._first_time([4.0], [2.0, 0.0, 0.0], 3.0) == 2, "(4 + 2)/2 after two rounds"
    assert complexity._first_time([4.0], [2.0, 0.0, 9.0], 2.0) == 3, "the last point is of no round yet"
    assert complexity._first_time([4.0, 2.0], [0.0, 0.0], 2.0) == 2
    assert complexity._first_time([4.0], [2.0], 3.0) is None


def test_batches_are_as_large_as_the_theorem_says_at_each_level(complexity: Any) -> None:
    known = complexity.Nonconvex.random(jr.key(3), clients=2, dx=2, dy=2)
    clients = complexity.clients_of(known, complexity.fedbio_local(2.0))
    assert clients.upper.width == 8
    assert clients.lower.width == 8 * complexity.CLIENTS


def test_one_rung_costs_what_the_method_says(complexity: Any) -> None:
    known = complexity.Nonconvex.random(jr.key(3), clients=3, dx=2, dy=2)
    setting, start = complexity.fedbioacc(1.0), float(known.stationarity(known.problem().x0))
    spent = complexity.spend(known, setting, 0.8 * start, 0, 200)
    assert 2 <= spent.steps < 200
    period, batch = setting.algorithm.sync_every, setting.batch
    each = 2 * period * batch * spent.steps + setting.first_batch
    expected = {"rounds": 2 * spent.steps, "∇f": 2 * each, "∇g": each, "Jv": each, "Hv": each}
    assert spent.costs == expected
    never = complexity.spend(known, setting, 1e-9, 0, 3)
    assert never.costs == {}
    assert never.steps == 3
    assert never.floor > 1


def ladder(complexity: Any, claim: Any, slope: float, reached: int = 4) -> list[Any]:
    """Four rungs with exact power laws; from some rung on it does not get there."""
    rungs = []
    for number in range(4):
        epsilon = complexity.FIRST / 2**number
        costs = {cost: epsilon ** (slope - (cost != "rounds")) for cost in complexity.COSTS}
        spent = complexity.Spent(costs if number < reached else {}, 10, 0.5)
        rungs.append(complexity.Rung(claim, epsilon, (spent, spent)))
    return rungs


def test_tables_say_what_was_fitted_and_what_failed(complexity: Any) -> None:
    claim = complexity.CLAIMS[0]
    assert complexity._slopes(claim, ladder(complexity, claim, -1.5))[::5] == ["-1.50 ± 0.00", "as steep"]
    assert complexity._slopes(claim, ladder(complexity, claim, -2.0))[-1] == "steeper"
    failed = ladder(complexity, claim, -1.5, reached=3)
    assert complexity._slopes(claim, failed)[-1] == "does not reach 0.0125 in time"
    assert complexity.slope_table(failed).row_count == 2
    assert complexity.ladder_table(failed).row_count == 4


def test_hessian_products_are_fitted_without_the_length_of_their_series(complexity: Any) -> None:
    (local,) = (claim for claim in complexity.CLAIMS if claim.name == "FedBiO, local")
    rung = ladder(complexity, local, -1.5)[2]
    assert rung.bounded("Hv") == pytest.approx(rung.cost("Hv") / complexity.terms(4.0))
    assert rung.bounded("Jv") == rung.cost("Jv")
