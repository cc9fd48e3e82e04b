"""Laws of the ledger: costs add, in any order, and a run costs what its parts cost."""

from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from hypothesis import given, strategies as st

from fedbilevel import Clients, Ledger, Problem, Simulator
from fedbilevel.algorithm.base import TwoVariables, Variables
from fedbilevel.draw import below
from fedbilevel.fed import Program
from fedbilevel.fed.ledger import ORACLES, Entry

amounts = st.integers(0, 2**40)
tables = st.dictionaries(st.sampled_from("xyqu"), amounts, max_size=4)
calls = st.dictionaries(st.sampled_from(ORACLES), amounts, max_size=4)
ledgers = st.builds(Ledger, amounts, tables, tables, tables, calls, amounts, tables)
entries = st.one_of(
    st.just(Entry("round")),
    st.just(Entry("samples")),
    st.builds(Entry, st.sampled_from(["down", "up", "edge"]), st.sampled_from("xy"), st.integers(1, 2**20)),
    st.builds(Entry, st.just("call"), st.sampled_from(ORACLES)),
)
counts = st.dictionaries(entries, st.integers(0, 2**31 - 1), max_size=6)


@given(ledgers, ledgers, ledgers)
def test_ledgers_add_in_any_order(a: Ledger, b: Ledger, c: Ledger) -> None:
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + Ledger() == a


@given(ledgers, ledgers)
def test_columns_and_bytes_add(a: Ledger, b: Ledger) -> None:
    both = (a + b).columns()
    assert both == {name: amount + b.columns()[name] for name, amount in a.columns().items()}
    assert (a + b).bytes == a.bytes + b.bytes
    assert a.bytes == sum(a.columns()[f"bytes_{direction}"] for direction in ("down", "up", "edge"))


@given(ledgers)
def test_entries_of_zero_do_not_matter(a: Ledger) -> None:
    zeros = Ledger(down={"never": 0}, up={"never": 0}, edge={"never": 0}, calls={"f": 0}, messages={"n": 0})
    assert a + zeros == a
    assert hash(a + zeros) == hash(a)
    assert str(a + zeros) == str(a)


@given(ledgers, st.sampled_from(["rounds", "samples", "down", "up", "edge", "calls", "messages"]))
def test_one_more_of_anything_is_another_ledger(a: Ledger, field: str) -> None:
    more = Ledger(**{field: 1 if field in ("rounds", "samples") else {"f": 1}})
    assert a + more != a
    assert a != a.columns()


@given(counts, counts)
def test_the_bill_of_two_lists_of_counts_is_the_sum_of_their_bills(a: Any, b: Any) -> None:
    together = {entry: a.get(entry, 0) + b.get(entry, 0) for entry in {*a, *b}}
    assert Ledger.from_counts(together) == Ledger.from_counts(a) + Ledger.from_counts(b)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), st.integers(1, 2**40))
def test_counts_of_many_steps_are_summed_without_overflow(times: list[int], unit: int) -> None:
    per_step = np.array(times, np.int32)
    assert Ledger.from_counts({Entry("up", "x", unit): per_step}) == Ledger(up={"x": sum(times) * unit})


def test_the_text_names_every_cost() -> None:
    text = str(Ledger(2, {"x": 1000}, {"y": 7}, {"z": 1}, {"g_y": 5}, 12, {"z": 3}))
    parts = ("2 rounds", "1,008 bytes", "12 samples", "x 1,000", "y 7", "z 1", "g_y 5", "links used 3 times")
    for part in parts:
        assert part in text


def distance(x: Any, y: Any, samples: Any) -> Any:
    return jnp.mean((samples - y) ** 2) / 2


class Slope(Program):
    def __call__(self, me: Any, *values: Any) -> Any:
        return me.g_y(0.0, values[0], me.batch("lower", me.key))


class Wander(TwoVariables):
    """A random number of exchanges a step, at least one."""

    def step(self, fed: Any, state: Variables, key: Any) -> Any:
        def exchange(i: Any, y: Any) -> Any:
            cohort = fed.everyone
            return y - 0.1 * cohort.mean(cohort.run(Slope(), cohort.send(y, "y"), key=key), "y")

        return state._replace(y=fed.loop(1 + below(key, (), 9), exchange, state.y)), {}


def test_two_steps_cost_what_each_of_them_costs() -> None:
    problem = Problem(distance, distance, x0=np.zeros(1), y0=np.zeros(()))
    key = jr.key(1)
    with Simulator().connect(problem, Clients(lower=jnp.ones((3, 2))), Wander()) as session:
        start, _ = session.init(key)
        both = session.advance(start, key, 0, 2, 2)
        first = session.advance(start, key, 0, 1, 2)
        second = session.advance(first.state, key, 1, 1, 2)
    whole, *parts = (Ledger.from_counts(block.counts) for block in (both, first, second))
    assert whole == parts[0] + parts[1]
    assert parts[0].rounds != parts[1].rounds, "choose a key for which the steps differ"
    assert [part.up for part in parts] == [{"y": part.rounds * 3 * 4} for part in parts]
    assert both.counts[Entry("round")].tolist() == [part.rounds for part in parts]
    np.testing.assert_array_equal(both.state.y, second.state.y)
