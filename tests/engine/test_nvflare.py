"""NVFlare with simulated sites: the same iterates and ledger, data that stay at home, failures survived."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from conform.cases import CASES, distance
from conform.compare import close
from engine import sites_own
from engine.killing import alive, offspring, rows, until
from engine.sites_own import NAP, VICTIM, SleepyAverage
from experiment.tiny import manifest, write
from fedbilevel.cli import federate
from fedbilevel.engine import TooFewClientsError
from fedbilevel.engine.conditions import Link
from fedbilevel.engine.nvflare.engine import NVFlare
from fedbilevel.experiment.config import plans
from fedbilevel.experiment.runner import run_all
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
    remote = fb.solve(problem, clients, case.algorithm(), 5, engine=engine, every=5, seed=7)
    local = fb.solve(problem, clients, case.algorithm(), 5, every=5, seed=7)
    close(remote, local, 1e-5)
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


def test_its_simulation_agrees_on_who_answers_and_on_the_time(
    engine: NVFlare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site always sleeps for a second; after two steps, for compilation, the deadline is half of that."""
    nap, deadline, steps, seen = 1.0, 0.5, 4, []
    monkeypatch.setattr(engine, "deadline", None)
    engine.exchanges.clear()

    def note(evaluation: Any) -> None:
        seen.append((float(evaluation.x[0]), time.monotonic()))
        engine.deadline = None if evaluation.row["step"] < 2 else deadline

    real = averaged(SleepyAverage(nap, once=False), engine, steps, callback=note)
    gained, seconds = np.diff(np.array(seen), axis=0).T
    np.testing.assert_allclose(gained, [5 / 3, 5 / 3, 2, 2], rtol=1e-6)
    assert len(real.failures) == 2
    assert all("(site-2): it did not answer within the deadline of 0.5 s" in line for line in real.failures)
    engine.deadline = None
    averaged(Average("none"), engine, 1)  # the late ones' times are known when they are done
    link = Link.measured(engine.exchanges, 3)
    whole, late = (fb.Simulator(link=link, deadline=limit) for limit in (None, deadline))
    for part, simulator in ((slice(1, 2), whole), (slice(2, None), late)):
        simulated = averaged(Average("none"), simulator, len(gained[part]))
        np.testing.assert_allclose(simulated.x, gained[part].sum(), rtol=1e-6)
        modelled = np.diff(simulated.history.column("simulated_seconds"))
        assert np.all((seconds[part] > modelled / 2) & (seconds[part] < 2 * modelled)), (seconds, modelled)


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


STEPS = 60
# Clients keep a y and momenta of their own, which nobody else has: what a lost job could lose.
KEPT = f"""
steps = {STEPS}
every = 1
[problem]
kind = "Quadratic"
clients = 3
dx = 3
dy = 2
lower = "local"
[algorithm]
kind = "FedBiOAccLocal"
upper_lr = 0.05
lower_lr = 0.2
adjoint_lr = 0.2
sync_every = 2
"""


def test_a_killed_program_and_a_killed_server_lose_nothing(
    engine: NVFlare, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Last, since it ends the simulation."""
    file, run = write(tmp_path, KEPT), tmp_path / "o" / "seed-0"
    kill_program(file, run)
    before = rows(run)
    assert 10 < len(before) < STEPS, "it was killed on its way"
    assert manifest(run)["status"] == "running"

    # The same command again goes on, here with the sites that run already; then their server is killed.
    monkeypatch.setattr(federate, "NVFlare", lambda *_, **__: engine)
    killer = threading.Thread(target=kill_server, args=(engine, run, len(before) + 5))
    killer.start()
    federate.federate(file, out=tmp_path / "o", quiet=True)
    killer.join()
    said = capsys.readouterr().err
    assert said.count("the simulated job has ended.") == said.count("A new job goes on from the last") == 1
    assert [row["step"] for row in rows(run)] == list(range(STEPS + 1))
    assert rows(run)[: len(before) - 1] == before[:-1], "what was reached is not done again"

    (plan,) = plans(file)
    (outcome,) = run_all([(plan, tmp_path / "undisturbed")])
    there, here = fb.load(run / "result.npz"), outcome.result
    assert here is not None
    assert there.y.shape == (3, 2), "everybody's own y"
    close(there, here, 1e-5)
    assert there.ledger == here.ledger
    assert not there.failures


def kill_program(file: pathlib.Path, run: pathlib.Path) -> None:
    """Start `federate`, kill it on its way, and see its job end by itself."""
    command = [sys.executable, "-m", "fedbilevel", "federate", str(file), "-o", str(run.parent), "-q"]
    program = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        until(lambda: len(rows(run)) > 10 or program.poll() is not None)
        job = offspring(program.pid)
    finally:
        program.kill()
        program.wait()
    assert len(job) >= 5, "the simulator, its server and three sites"
    until(lambda: not alive(job))


def kill_server(engine: NVFlare, run: pathlib.Path, line: int) -> None:
    """Kill the process of the job's server when the history has so many rows."""
    until(lambda: len(rows(run)) > line)
    assert engine._sites is not None
    job = offspring(engine._sites.job.process.pid)  # type: ignore[attr-defined]
    (server,) = [p for p in job if any("simulator_worker" in " ".join(c.cmdline()) for c in p.children())]
    server.kill()
    until(lambda: not alive(job))


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
