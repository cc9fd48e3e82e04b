"""The process engine: failures are reported, left out of the mean, and survived."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import signal
import subprocess
import sys
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
from fedbilevel.engine.wire import decode
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
    problem, clients = CASES["FedNest"].make()
    trips = []

    def counted(exchange: Any, messages: dict[int, bytes], limit: int) -> Any:
        trips.append(sorted(messages))
        return exchange(messages, limit)

    with intercepted(processes, counted):
        result = fb.solve(problem, clients, CASES["FedNest"].algorithm(), 4, engine=processes)
    assert len(trips) == 1 + result.ledger.rounds, "one for the configuration, one for each round"


def test_divergence_is_no_failure_of_clients(processes: fb.Process) -> None:
    problem, clients = CASES["FedAvg"].make()
    algorithm = fb.FedAvg(1e18, steps=1)
    remote = fb.solve(problem, clients, algorithm, 20, engine=processes)
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


def test_a_script_can_use_its_own_functions(tmp_path: pathlib.Path) -> None:
    """Functions of `__main__` travel too, with the engine by name and the library's own worker."""
    script = tmp_path / "script.py"
    script.write_text(
        "import jax.numpy as jnp, fedbilevel as fb\n"
        "def loss(x, samples): return jnp.mean((x - samples) ** 2)\n"
        "if __name__ == '__main__':\n"
        "    clients = fb.Clients(jnp.array([[[1.0]], [[3.0]]]))\n"
        "    problem = fb.single_level(loss, jnp.zeros(1))\n"
        "    result = fb.solve(problem, clients, fb.FedAvg(0.5), 3, engine='process')\n"
        "    print(float(result.x[0]))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(2.0)


def _search(pattern: str, line: str) -> bool:
    return re.search(pattern, line, re.DOTALL) is not None
