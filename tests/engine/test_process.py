"""The process engine: failures are reported, left out of the mean, and survived."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.connection
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from conform.cases import CASES, distance
from conform.every_verb import EveryVerb
from fedbilevel.engine import TooFewClientsError
from fedbilevel.engine.configuration import client_environment
from fedbilevel.engine.wire import decode
from fedbilevel.experiment import DivergenceWarning
from fedbilevel.portable import PortableError
from rogue_worker import VICTIM, Average

REASONS = {
    "nan": "NaN or an infinity",
    "raise": "Misbehave raised .*the sensor is unplugged",
    "shape": r"arrays of float32\[6\] where float32\[3\] is expected",
    "dtype": r"arrays of float16\[3\] where float32\[3\] is expected",
    "garbage": "cannot be read: it does not begin as",
    "truncated": "cannot be read: it ends before its array",
    "bill": "a bill that cannot be right",
    "flood": "its process ended",
    "die": f"its process ended with code -{signal.SIGKILL:d}",
    "sleep": "did not answer within",
}


@contextlib.contextmanager
def intercepted(engine: fb.Process, meddle: Callable[..., Any]) -> Iterator[None]:
    """`meddle(exchange, messages, limit)` stands between the server and its clients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._pool, "exchange", functools.partial(meddle, engine._pool.exchange))
        yield


def averaged(mode: str, engine: Any, steps: int = 3) -> fb.Result:
    problem = fb.single_level(distance, jnp.zeros(3))
    return fb.solve(problem, fb.Clients(jnp.zeros((3, 1, 3))), Average(mode), steps, engine=engine, every=1)


def test_honest_clients(processes: fb.Process) -> None:
    result = averaged("none", processes)
    np.testing.assert_allclose(result.x, 5.0, rtol=1e-6)
    assert result.ledger.up["v"] == 3 * 3 * 12
    assert not result.failures


@pytest.mark.parametrize("mode", REASONS)
def test_failing_client_is_reported_and_left_out(
    mode: str, processes: fb.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "sleep":
        monkeypatch.setattr(processes._pool, "timeout", 5.0)
    result = averaged(mode, processes)
    np.testing.assert_allclose(result.x, 6.0, rtol=1e-6)  # the mean of 0 and 4, three times
    assert not result.diverged
    assert result.ledger.up["v"] == 3 * 2 * 12, "only answers that came are billed"
    assert result.failures[0].startswith(f"client {VICTIM}: ")
    assert "Misbehave" in result.failures[0], "the program is named"
    assert np.any([_search(REASONS[mode], line) for line in result.failures]), result.failures
    np.testing.assert_allclose(averaged("none", processes, 1).x, 5 / 3, rtol=1e-6)  # the next run has it back


def test_below_min_clients_is_an_error_that_names_the_client(
    processes: fb.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "min_clients", 3)
    with pytest.raises(TooFewClientsError, match=r"2 of 3 clients answered, and min_clients is 3.*client 1"):
        averaged("raise", processes)


def test_killed_between_exchanges_run_goes_on_with_the_others(processes: fb.Process) -> None:
    """From the kill on, the iterates are those of a federation in which the dead client weighs nothing."""
    problem, clients = CASES["minimax"].make()
    algorithm = CASES["minimax"].algorithm()
    calls = []

    def killing(exchange: Any, messages: dict[int, bytes], limit: int) -> Any:
        calls.append(messages)
        if len(calls) == 2:  # the configuration came first: this is the first exchange of the first step
            victim = processes._pool.processes[VICTIM]
            os.kill(victim.pid, signal.SIGKILL)
            victim.wait()
        return exchange(messages, limit)

    with intercepted(processes, killing):
        result = fb.solve(problem, clients, algorithm, 5, engine=processes)
    without = fb.Clients(clients.lower, clients.upper, weights=[1.0, 0.0, 1.0])
    expected = fb.solve(problem, without, algorithm, 5)
    np.testing.assert_allclose(result.x, expected.x, rtol=1e-5)
    np.testing.assert_allclose(result.y, expected.y, rtol=1e-5, atol=1e-6)
    assert len(result.failures) == 1
    assert "its process ended" in result.failures[0]


def test_one_mean_is_one_round_trip(processes: fb.Process) -> None:
    problem, clients = CASES["minimax"].make()
    trips = []

    def counted(exchange: Any, messages: dict[int, bytes], limit: int) -> Any:
        trips.append(sorted(messages))
        return exchange(messages, limit)

    with intercepted(processes, counted):
        result = fb.solve(problem, clients, CASES["minimax"].algorithm(), 4, engine=processes)
    assert len(trips) == 1 + result.ledger.rounds, "one for the configuration, one for each round"


def test_divergence_is_no_failure_of_clients(processes: fb.Process) -> None:
    problem, clients = CASES["FedAvg"].make()
    algorithm = fb.FedAvg(1e18, steps=1)
    with pytest.warns(DivergenceWarning):
        remote = fb.solve(problem, clients, algorithm, 20, engine=processes)
    with pytest.warns(DivergenceWarning):
        local = fb.solve(problem, clients, algorithm, 20)
    assert remote.diverged
    assert local.diverged
    assert remote.steps == local.steps
    assert bool(jnp.all(jnp.isfinite(remote.x)))
    np.testing.assert_allclose(remote.x, local.x, rtol=1e-5)


def test_clients_forget_what_is_no_longer_used(processes: fb.Process) -> None:
    """What a client is told to store and to free, as its messages say, does not grow with the steps."""
    problem, clients = CASES["every-verb"].make()
    stored: set[int] = set()
    sizes = []

    def watched(exchange: Any, messages: dict[int, bytes], limit: int) -> Any:
        for verb, *rest in decode(messages[0])[0].get("commands", ()) if 0 in messages else ():
            if verb == "free":
                stored.difference_update(rest[0])
            elif verb != "get":
                stored.add(rest[0])
        return exchange(messages, limit)

    algorithm = EveryVerb(0.1)
    with intercepted(processes, watched), processes.connect(problem, clients, algorithm) as session:
        state, _ = session.init(jax.random.key(0))
        for step in range(6):
            state = session.advance(state, jax.random.key(0), step, 1, 1).state
            sizes.append(len(stored))
    assert sizes[-1] == sizes[2] > 0


def test_interrupted_exchange_leaves_no_stale_replies(processes: fb.Process) -> None:
    """An interrupt that reaches the server alone: the next run must not read the answers of this one."""

    def interrupted(exchange: Any, messages: dict[int, bytes], limit: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if "commands" in decode(messages[0])[0]:
                patch.setattr("fedbilevel.engine.process.wait", _interrupt)
            return exchange(messages, limit)

    with intercepted(processes, interrupted), pytest.raises(KeyboardInterrupt):
        averaged("none", processes)
    np.testing.assert_allclose(averaged("none", processes).x, 5.0, rtol=1e-6)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_client_that_died_between_two_runs_is_started_again(processes: fb.Process) -> None:
    averaged("none", processes)
    victim = processes._pool.processes[VICTIM]
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    result = averaged("none", processes)
    np.testing.assert_allclose(result.x, 5.0, rtol=1e-6)
    assert not result.failures


def test_client_that_does_not_even_read_is_given_up(
    processes: fb.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process with a message too large for the socket's buffer."""
    averaged("none", processes)
    monkeypatch.setattr(processes._pool, "timeout", 3.0)
    os.kill(processes._pool.processes[VICTIM].pid, signal.SIGSTOP)
    problem = fb.single_level(total, jnp.zeros(1_000_000))
    result = fb.solve(problem, fb.Clients(jnp.zeros((3, 1, 3))), Average("none"), 1, engine=processes)
    np.testing.assert_allclose(result.x[0], 2.0)
    assert "did not answer within 3 s" in result.failures[0]


def total(x: jax.Array, samples: jax.Array) -> jax.Array:
    return jnp.sum(x) + jnp.mean(samples)


def test_nothing_is_billed_or_queued_for_the_dead(processes: fb.Process) -> None:
    problem = fb.single_level(distance, jnp.zeros(3))
    clients = fb.Clients(jnp.zeros((3, 1, 3)))
    with processes.connect(problem, clients, Average("die")) as session:
        state, _ = session.init(jax.random.key(0))
        blocks = [session.advance(state, jax.random.key(0), step, 1, 1) for step in range(4)]
        down = [fb.Ledger.from_counts(block.counts).down["x"] for block in blocks]
        assert down == [36, 24, 24, 24]
        assert not session.federation.queues[VICTIM].commands  # type: ignore[attr-defined]


def test_set_up_that_fails_everywhere_says_why() -> None:
    with pytest.raises(
        TooFewClientsError, match=r"0 of 2 clients could be set up.*client 0: could not be set up"
    ):
        fb.solve(
            fb.single_level(distance, jnp.zeros(3)),
            fb.Clients(jnp.zeros((2, 1, 3))),
            fb.FedAvg(0.1),
            1,
            engine=fb.Process(worker="no_such_module"),
        )


def test_an_ordered_dict_keeps_its_order(processes: fb.Process) -> None:
    """Its leaves are in the order of insertion, a dict's in that of its keys."""
    x0 = OrderedDict(b=jnp.zeros(2), a=jnp.ones(2))
    problem, clients = fb.single_level(ordered_loss, x0), fb.Clients(jnp.ones((3, 1, 2)))
    remote = fb.solve(problem, clients, fb.FedAvg(0.1), 3, engine=processes)
    local = fb.solve(problem, clients, fb.FedAvg(0.1), 3)
    for name in x0:
        np.testing.assert_allclose(remote.x[name], local.x[name], rtol=1e-6)


def ordered_loss(x: Any, samples: jax.Array) -> jax.Array:
    return jnp.mean((x["a"] - 2 * samples) ** 2) + jnp.mean((x["b"] + samples) ** 2)


def test_settings_take_the_dtype_of_the_variables(processes: fb.Process) -> None:
    """float32 variables stay so in a float64 session, on both engines."""
    with jax.enable_x64(True):
        problem = fb.single_level(distance, jnp.zeros(3, jnp.float32))
        clients = fb.Clients(jnp.ones((3, 1, 3), jnp.float32))
        for engine in (processes, "simulator"):
            assert fb.solve(problem, clients, fb.FedAvg(0.1), 2, engine=engine).x.dtype == jnp.float32


@pytest.mark.parametrize("options", [{"dropout": 1.5}, {"min_clients": 0}, {"timeout": 0.0}])
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        fb.Process(**options)


def test_clients_share_a_cache_of_compiled_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's own if there is one, else one that goes with the pool; what the user says counts."""
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "7")
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    with fb.Process() as engine:
        folder = pathlib.Path(engine._pool._cache.name)  # type: ignore[union-attr]
        assert folder.is_dir()
        assert client_environment(str(folder))["JAX_COMPILATION_CACHE_DIR"] == before
        jax.config.update("jax_compilation_cache_dir", None)
        try:
            own = client_environment(str(folder))
        finally:
            jax.config.update("jax_compilation_cache_dir", before)
    assert own["JAX_COMPILATION_CACHE_DIR"] == str(folder)
    assert own["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"
    assert own["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] == "7"
    assert not folder.exists()


# ------------------------------------------------------------ what may travel


def test_lambda_gets_an_error_that_says_what_to_do() -> None:
    problem = fb.Problem(lambda x, y, s: jnp.sum(y), distance_of_two, jnp.zeros(2), jnp.zeros(2))
    with pytest.raises(PortableError, match=r"lambda.*top level of a module.*factory"):
        fb.solve(
            problem, fb.Clients(jnp.zeros((3, 1, 2))), fb.FedNest(0.1, 0.1, series="cg"), 1, engine="process"
        )


def distance_of_two(x: jax.Array, y: jax.Array, samples: jax.Array) -> jax.Array:
    return jnp.mean((x - samples) ** 2) + jnp.sum((y - x) ** 2)


def lambda_problem() -> fb.Problem:
    return fb.single_level(lambda x, samples: jnp.mean((x - samples) ** 2), jnp.zeros(2))


def test_importable_factory_makes_any_problem_travel(
    processes: fb.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "factory", lambda_problem)
    clients = fb.Clients(jnp.arange(6.0).reshape(3, 1, 2))
    result = fb.solve(lambda_problem(), clients, fb.FedAvg(0.5), 60, engine=processes)
    np.testing.assert_allclose(result.x, [2.0, 3.0], rtol=1e-5)


SCRIPT = """
import jax.numpy as jnp, fedbilevel as fb
def loss(x, samples): return jnp.mean((x - samples) ** 2)
def main():
    clients = fb.Clients(jnp.array([[[1.0]], [[3.0]]]))
    problem = fb.single_level(loss, jnp.zeros(1))
    print(float(fb.solve(problem, clients, fb.FedAvg(0.5), 3, engine='process').x[0]))
"""


def run_script(path: pathlib.Path, call: str) -> subprocess.CompletedProcess[str]:
    path.write_text(SCRIPT + call)
    return subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False, timeout=120
    )


def test_a_script_can_use_its_own_functions(tmp_path: pathlib.Path) -> None:
    """Functions of `__main__` travel too, with the engine by name and the library's own worker."""
    done = run_script(tmp_path / "script.py", "if __name__ == '__main__': main()")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert float(done.stdout) == pytest.approx(2.0)


def test_a_script_without_a_guard_is_told_so(tmp_path: pathlib.Path) -> None:
    done = run_script(tmp_path / "script.py", "main()")
    assert done.returncode != 0
    assert "if __name__ == '__main__':" in done.stderr


def _search(pattern: str, line: str) -> bool:
    return re.search(pattern, line, re.DOTALL) is not None


def test_what_all_can_make_from_a_seed_is_not_sent(
    processes: fb.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrix of a sketch has 820 kB; clients make it themselves, and compute what the simulator does."""
    sent, send = [], multiprocessing.connection.Connection.send_bytes

    def counted(self: Any, message: bytes, *rest: Any) -> None:
        sent.append(len(message))
        send(self, message, *rest)

    monkeypatch.setattr(multiprocessing.connection.Connection, "send_bytes", counted)
    problem = fb.Classification(fb.SlicedMLP((32, 3)), inputs=(60,), classes=3, client_metrics={})
    draws = np.random.default_rng(0)
    inputs, labels = draws.normal(size=(3, 12, 60)).astype(np.float32), draws.integers(0, 3, (3, 12))
    clients = fb.Clients({"inputs": inputs, "labels": labels.astype(np.int32)})
    method = fb.FedSep(fb.LinearSketch(100), fb.SGD(0.1), learn_steps=2)
    there, here = (
        fb.solve(problem, clients, method, 2, engine=engine) for engine in (processes, "simulator")
    )
    np.testing.assert_allclose(there.x, here.x, atol=1e-5)
    assert 0 < max(sent) < 100_000
