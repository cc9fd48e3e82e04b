"""NVFlare with simulated sites: the same iterates and ledger, data that stay at home, failures survived."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from conform.cases import CASES, distance
from engine import sites_own
from engine.sites_own import NAP, VICTIM, SleepyAverage
from fedbilevel.engine import TooFewClientsError
from fedbilevel.engine.nvflare.engine import NVFlare
from fedbilevel.engine.nvflare.job import JobLostError
from rogue_worker import Average

pytest.importorskip("nvflare")
SITES = ("site-1", "site-2", "site-3")


@pytest.fixture(scope="module")
def engine() -> Iterator[NVFlare]:
    """One started simulation for all tests: starting takes longer than all of them."""
    with NVFlare("sim", sites=SITES, data="engine.sites_own:samples", timeout=60.0, retries=3) as engine:
        yield engine


@pytest.mark.parametrize("name", ["FedNest", "FedBiOAcc", "FedSep", "FedBiOLocal", "PDBO"])
def test_same_iterates_and_ledger_as_the_simulator(name: str, engine: NVFlare) -> None:
    case = CASES[name]
    problem, clients = case.make()
    before = engine.wire
    remote = fb.solve(problem, clients, case.algorithm(), 20, engine=engine, every=20, seed=7)
    local = fb.solve(problem, clients, case.algorithm(), 20, every=20, seed=7)
    for p, q in zip(jax.tree.leaves((remote.x, remote.y)), jax.tree.leaves((local.x, local.y)), strict=True):
        np.testing.assert_allclose(p, q, rtol=1e-5, atol=1e-5 * float(np.abs(q).max(initial=0)))
    assert remote.ledger == local.ledger
    assert not remote.failures
    down, up = (now - then for now, then in zip(engine.wire, before, strict=True))
    assert down > sum(local.ledger.down.values())
    assert up > sum(local.ledger.up.values())


def averaged(algorithm: Any, engine: NVFlare, steps: int = 3, **settings: Any) -> fb.Result:
    problem, clients = fb.single_level(distance, jnp.zeros(3)), fb.Clients(jnp.zeros((3, 1, 3)))
    return fb.solve(problem, clients, algorithm, steps, engine=engine, every=1, **settings)


@pytest.mark.parametrize(
    ("mode", "reason"), [("raise", "the sensor is unplugged"), ("nan", "NaN or an infinity")]
)
def test_a_site_that_fails_is_left_out_and_comes_back(mode: str, reason: str, engine: NVFlare) -> None:
    result = averaged(Average(mode), engine)
    np.testing.assert_allclose(result.x, 6.0, rtol=1e-6)  # the mean of 0 and 4, three times
    assert result.ledger.up["v"] == 3 * 2 * 12, "only answers that came are billed"
    assert len(result.failures) == 3
    assert all(line.startswith(f"client {VICTIM} (site-2): ") and reason in line for line in result.failures)
    assert result.history.column("failures")[-1] == 3
    np.testing.assert_allclose(averaged(Average("none"), engine, 1).x, 5 / 3, rtol=1e-6)


def test_a_slow_site_costs_one_timeout_and_comes_back_in_the_same_run(
    engine: NVFlare, monkeypatch: pytest.MonkeyPatch
) -> None:
    averaged(SleepyAverage(0.0), engine, 1)  # compiled
    monkeypatch.setattr(engine._sites, "timeout", 1.0)
    times = []

    def wait(_: Any) -> None:
        times.append(time.monotonic())
        if len(times) == 5:
            time.sleep(2 * NAP)

    result = averaged(SleepyAverage(NAP), engine, 6, callback=wait)
    steps = np.diff(times)
    assert 1.0 <= steps[0] < NAP, "the first step waited for the timeout and not for the sleeper"
    assert steps[1:3].max() < 1.0, "then nobody waits"
    assert "did not answer within 1 s" in result.failures[0]
    assert "still busy with an earlier message" in result.failures[1]
    answers = result.ledger.up["v"] // 12
    assert answers == 6 * 3 - len(result.failures), "what did not come is not billed"
    expected = 2 * len(result.failures) + 5 / 3 * (6 - len(result.failures))
    np.testing.assert_allclose(result.x, expected, rtol=1e-6)
    assert len(result.failures) < 6, "it came back"


def test_too_few_answers_are_an_error_that_names_the_site(
    engine: NVFlare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "min_clients", 3)
    with pytest.raises(TooFewClientsError, match=r"2 of 3 clients answered, and min_clients is 3.*site-2"):
        averaged(Average("raise"), engine)


def test_data_stay_at_their_sites(engine: NVFlare, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has zeros of the right shapes; the result is that of the sites' own samples."""
    clients = engine.clients(batch_size=2, weights="size")
    assert clients.lower.size.tolist() == [3, 4, 5]
    assert not np.any(clients.lower.flat)
    own = [sites_own.samples(site)["lower"] for site in SITES]
    known = fb.Clients(own, batch_size=2, weights="size")
    problem, algorithm = fb.single_level(distance, jnp.ones(3)), fb.FedAvg(0.05, steps=2)
    remote = fb.solve(problem, clients, algorithm, 5, engine=engine)
    local = fb.solve(problem, known, algorithm, 5)
    np.testing.assert_allclose(remote.x, local.x, rtol=1e-5)
    assert remote.ledger == local.ledger
    blind = fb.solve(problem, clients, algorithm, 5)
    assert np.abs(blind.x - local.x).max() > 0.1, "zeros would have given another result"
    monkeypatch.setattr(engine, "own_data", True)
    alike = fb.Clients(jnp.zeros((3, 1, 3)), batch_size=2, weights="size")  # says what samples look like
    np.testing.assert_allclose(fb.solve(problem, alike, algorithm, 5, engine=engine).x, local.x, rtol=1e-5)


def test_a_run_on_a_lost_job_is_an_error_and_the_next_one_starts_another(engine: NVFlare) -> None:
    """Last, since it ends the simulation: the server's process is killed."""
    averaged(Average("none"), engine)
    assert engine._sites is not None
    job = engine._sites.job

    def kill(seen: Any) -> None:
        if seen.row["step"] == 1:
            os.killpg(job.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]

    with pytest.raises(JobLostError, match="the simulated job has ended"):
        averaged(Average("none"), engine, callback=kill)
    assert engine._sites is None


@pytest.mark.parametrize("options", [{"dropout": 1.5}, {"min_clients": 0}, {"timeout": 0.0}, {"retries": -1}])
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        NVFlare("sim", **options)


def test_sites_that_are_started_here_must_be_named() -> None:
    with NVFlare("sim") as engine, pytest.raises(ValueError, match="say which, sites="):
        engine.clients()


def test_a_folder_that_is_no_startup_kit_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="is no administrator's startup kit"):
        averaged(Average("none"), NVFlare(tmp_path))
