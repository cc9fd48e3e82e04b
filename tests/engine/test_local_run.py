"""A client's program: traced once, and compiled once for all clients that share a cache."""

from __future__ import annotations

import fcntl
import pathlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import fedbilevel as fb
from conform.cases import distance
from fedbilevel.engine.local_run import LocalRun, rounded
from fedbilevel.fed import Program
from fedbilevel.tree import PyTree

traced: list[str] = []
seen: Counter[str] = Counter()
jax.monitoring.register_event_listener(lambda event, **_: seen.update([event.rsplit("/", 1)[-1]]))


class Shift(Program):
    """`x ↦ x + lr (id + its data)`."""

    lr: float
    name: str = eqx.field(static=True, default="one")

    def __call__(self, me: Any, *values: Any) -> PyTree:
        traced.append(self.name)
        data = me.batch("lower", me.key).samples
        return values[0] + self.lr * (me.id + data.sum())


@pytest.fixture
def cache(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A cache of compiled programs in which there is nothing yet."""
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    for folder in (tmp_path, before):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        compilation_cache.reset_cache()
        if folder is tmp_path:
            yield tmp_path


def ran(run: LocalRun, id: int, value: float, settings: Any = (0.5,)) -> Any:
    """What client `id`, whose one sample is `(value, 0, 0)`, makes of zeros."""
    clients = fb.Clients(jnp.array([[[value, 0.0, 0.0]]]))
    key = jax.random.key_data(jax.random.key(0))
    return run(clients, id, list(settings), key, jnp.zeros(3))[0]


def program(name: str = "one") -> LocalRun:
    return LocalRun(fb.single_level(distance, jnp.zeros(3)), Shift(0.5, name))


def test_the_trace_that_finds_shapes_serves_the_run() -> None:
    run, clients = program(), fb.Clients(jnp.zeros((1, 1, 3)))
    traced.clear()
    found = run.shapes(clients, 1, [0.5], [jax.ShapeDtypeStruct((3,), jnp.float32)])
    assert (found.shape, found.dtype) == ((3,), jnp.float32)
    np.testing.assert_allclose(ran(run, 1, 2.0), 1.5)
    np.testing.assert_allclose(ran(run, 2, 4.0, [0.25]), 1.5)
    assert traced == ["one"]
    ran(run, 1, 2.0, [np.float32(0.5)])
    assert traced == ["one"] * 2, "the control: a setting of another type is another program"


def test_what_one_client_compiled_the_next_one_reads(cache: pathlib.Path) -> None:
    """Ids, data and settings are not part of the program. The control: another static setting is."""
    np.testing.assert_allclose(ran(program(), 0, 1.0), 0.5)
    seen.clear()
    np.testing.assert_allclose(ran(program(), 2, 3.0, [0.1]), 0.5)
    assert seen["cache_hits"] == 1
    assert seen["cache_misses"] == 0


def test_data_of_about_the_same_size_have_the_same_shape_and_the_same_batches() -> None:
    rows = np.arange(20.0, dtype=np.float32).reshape(10, 2) + 1
    both = fb.Clients([rows[:3], rows[:4], rows[:5], rows], batch_size=2, test=[rows[:1]] * 4)
    own = [both.only(client) for client in range(4)]
    assert [len(rounded(each).lower.flat) for each in own] == [4, 4, 8, 10]
    assert [len(rounded(each).test.flat) for each in own] == [1] * 4
    for each in (own[0], own[0].whole(), own[2]):
        for key in jax.random.split(jax.random.key(1), 8):
            plain, padded = (c.lower.batch(0, key) for c in (each, rounded(each)))
            jax.tree.map(np.testing.assert_array_equal, plain, padded)


def test_who_compiles_is_alone(cache: pathlib.Path) -> None:
    """The others wait for whoever has the file, and go on when it is free."""
    run, done = program(), threading.Event()
    ran(run, 0, 1.0)
    (lock,) = cache.glob("compiling-*")
    other = threading.Thread(target=lambda: (ran(program(), 1, 1.0), done.set()))
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        other.start()
        ran(run, 1, 1.0)  # what is compiled waits for nobody
        ran(program("another"), 1, 1.0)  # nor does another program
        assert not done.wait(1.0)
    assert done.wait(60)
    other.join()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("jax_persistent_cache_min_compile_time_secs", 1.0), ("jax_enable_compilation_cache", False)],
)
def test_without_a_cache_of_all_programs_nobody_waits(setting: str, value: Any, cache: pathlib.Path) -> None:
    before = getattr(jax.config, setting)
    jax.config.update(setting, value)
    try:
        ran(program(), 0, 1.0)
    finally:
        jax.config.update(setting, before)
    assert not list(cache.glob("compiling-*"))
