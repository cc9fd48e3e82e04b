"""Loops: they compute what a Python loop computes, and book what it would spend."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel import Clients, Ledger, Problem, Simulator
from fedbilevel.fed import Program, branch, repeat
from fedbilevel.fed.ledger import Entry, as_arrays, count, metering

KEY = jr.key(1)
CALL = Entry("call", "g_y")


def distance(x: Any, y: Any, samples: Any) -> Any:
    return jnp.mean((samples - y) ** 2) / 2


class Steps(Program):
    """`id + 1` gradient steps, each of them `inner` times over: returns y."""

    inner: int = eqx.field(static=True)

    def __call__(self, me: Any, *values: Any) -> Any:
        batch = me.batch("lower", me.key)

        def step(i: Any, y: Any) -> Any:
            return y - 0.1 * me.g_y(0.0, y, batch)

        return repeat(me.id + 1, lambda i, y: repeat(self.inner, step, y), values[0])


@pytest.fixture(scope="module")
def fed() -> Any:
    problem = Problem(distance, distance, x0=0.0, y0=0.0)
    return Simulator().federation(problem, Clients(lower=jnp.arange(3.0)[:, None] + 1))


def exchange(fed: Any) -> Any:
    def body(i: Any, y: Any) -> Any:
        cohort = fed.everyone
        return cohort.mean(cohort.run(Steps(1), cohort.send(y, "y"), key=jr.fold_in(KEY, i)), "y") + i

    return body


def test_a_loop_of_the_federation_is_a_python_loop(fed: Any) -> None:
    body = exchange(fed)
    with metering() as looped:
        result = fed.loop(3, body, jnp.asarray(0.5))
    with metering() as unrolled:
        expected = jnp.asarray(0.5)
        for i in range(3):
            expected = body(i, expected)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert Ledger.from_counts(looped.counts) == Ledger.from_counts(unrolled.counts)
    assert Ledger.from_counts(looped.counts) == Ledger(
        rounds=3, down={"y": 3 * 3 * 4}, up={"y": 3 * 3 * 4}, calls={"g_y": 3 * 6}, samples=3 * 6
    )


def test_a_random_number_of_iterations_is_booked_exactly(fed: Any) -> None:
    @jax.jit
    def run(times: Any) -> Any:
        with metering() as meter:
            fed.loop(times, exchange(fed), jnp.asarray(0.5))
        return {str(entry.kind): times for entry, times in meter.counts.items()}

    for times in (0, 1, 4):
        assert run(times) == {"down": 3 * times, "up": 3 * times, "round": times} | {
            "call": 6 * times,
            "samples": 6 * times,
        }


def test_per_client_and_nested_numbers_of_iterations_are_booked_exactly(fed: Any) -> None:
    everyone = fed.everyone
    with metering() as meter:
        out = everyone.run(Steps(2), everyone.send(0.0, "y"), key=KEY)
    rows, _ = everyone.gather(out, "y")
    expected = [(i + 1) * (1 - 0.9 ** (2 * (i + 1))) for i in range(3)]
    np.testing.assert_allclose(rows, expected, rtol=1e-5)
    assert int(meter.counts[CALL]) == 2 * (1 + 2 + 3)


def test_repeat_is_a_python_loop_and_books_its_body() -> None:
    def body(i: Any, carry: Any) -> Any:
        count(CALL, i)
        return {"sum": carry["sum"] + i, "last": i}

    with metering() as meter:
        result = repeat(5, body, {"sum": 0, "last": -1})
    assert (int(result["sum"]), int(result["last"])) == (10, 4)
    assert int(meter.counts[CALL]) == 10


def test_a_loop_of_no_iterations_changes_nothing_and_costs_nothing() -> None:
    def body(i: Any, carry: Any) -> Any:
        count(CALL)
        return carry + 1

    with metering() as meter:
        assert repeat(0, body, jnp.asarray(7)) == 7
    assert Ledger.from_counts(meter.counts) == Ledger()


def test_the_body_of_nested_loops_is_traced_once() -> None:
    traces = []

    def body(i: Any, carry: Any) -> Any:
        traces.append(i)
        return carry + 1

    nested = repeat(2, lambda i, c: repeat(3, lambda j, c: repeat(4, body, c), c), jnp.asarray(0))
    assert nested == 24
    assert len(traces) == 1


@pytest.mark.parametrize("chosen", [0, 1])
def test_a_branch_returns_and_bills_the_chosen_one(chosen: int) -> None:
    def cheap() -> Any:
        count(Entry("call", "f"))
        return 1.0

    def dear() -> Any:
        count(Entry("call", "g"), 5)
        return 2.0

    with metering() as meter:
        found = branch(jnp.asarray(chosen), [cheap, dear])
    assert float(found) == 1.0 + chosen
    expected = {"f": 1} if chosen == 0 else {"g": 5}
    assert {e.label: int(n) for e, n in meter.counts.items() if int(n)} == expected


def test_a_branch_under_vmap_bills_each_client_its_own() -> None:
    def one(index: Any) -> Any:
        with metering() as meter:
            out = branch(index, [lambda: index * 2, lambda: repeated(index)])
        return out, as_arrays(meter.counts)

    def repeated(index: Any) -> Any:
        count(Entry("call", "g"), index)
        return index * 3

    out, counts = jax.vmap(one)(jnp.asarray([0, 1, 1]))
    assert out.tolist() == [0, 3, 3]
    assert counts[Entry("call", "g")].tolist() == [0, 1, 1]
