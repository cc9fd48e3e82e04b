"""Compiled programs are forgotten before they fill what a process may hold, and not earlier."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiment.tiny import plan
from fedbilevel.experiment import room, runner

linux = pytest.mark.skipif(not room.MAPS.exists(), reason="other systems have no such limit")


def pieces() -> int:
    return len(room.MAPS.read_text().splitlines())


@linux
@pytest.mark.parametrize(("limit", "forgotten"), [(10**9, False), (1, True)])
def test_programs_are_forgotten_where_they_fill_their_room(
    limit: int, forgotten: bool, monkeypatch: Any, tmp_path: pathlib.Path, compilations: Callable[[], int]
) -> None:
    (tmp_path / "limit").write_text(f"{limit}\n")
    monkeypatch.setattr(room, "LIMIT", tmp_path / "limit")
    doubled = jax.jit(lambda x: 2 * x)
    doubled(jnp.ones(3))
    full, before = pieces(), compilations()
    room.make_room()
    assert (pieces() < full) == forgotten
    assert doubled(jnp.ones(3)).tolist() == [2, 2, 2]
    assert (compilations() > before) == forgotten


def test_systems_without_the_limit_need_nothing(monkeypatch: Any, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(room, "LIMIT", tmp_path / "none")
    monkeypatch.setattr(jax, "clear_caches", lambda: pytest.fail("nothing is full"))
    room.make_room()


def test_an_experiment_makes_room_before_every_run(monkeypatch: Any, tmp_path: pathlib.Path) -> None:
    calls: list[int] = []
    monkeypatch.setattr(runner, "make_room", lambda: calls.append(len(calls)))
    tasks = [(plan(tmp_path, algorithm__upper_lr=lr), tmp_path / str(lr)) for lr in (0.05, 0.1)]
    for done, _ in enumerate(runner.run_all(tasks), start=1):
        assert len(calls) == done
    assert len(calls) == 2
