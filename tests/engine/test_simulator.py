"""The simulator: chunks change nothing, and a step costs what its cohort costs."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel import Clients, FedAvgS, Ledger, LFedNest, Problem, Simulator, minimax, simulate, solve
from fedbilevel.algorithm.base import Variables
from fedbilevel.fed.ledger import Entry
from fedbilevel.problem.quadratic import lower_objective, upper_objective
from fedbilevel.problem.structured import saddle_objective

KEY = jr.key(2)


def saddle() -> Problem:
    return minimax(saddle_objective, jnp.ones(2), jnp.array([0.5, 0.5]))


def saddle_clients() -> Clients:
    """Three clients with four noisy samples each, read two at a time."""
    draws = np.random.default_rng(0)
    rows = {
        "A": draws.normal(size=(3, 4, 2, 2)),
        "b": draws.normal(size=(3, 4, 2)),
        "penalty": np.ones((3, 4)),
    }
    return Clients({name: jnp.asarray(row, jnp.float32) for name, row in rows.items()}, batch_size=2)


def run(engine: Simulator) -> Any:
    """Two steps; client i makes i + 1 local ones."""
    return solve(saddle(), saddle_clients(), FedAvgS(0.1, 0.1, steps=(1, 2, 3)), 2, every=2, engine=engine)


@pytest.fixture(scope="module")
def at_once() -> Any:
    return run(Simulator())


@pytest.mark.parametrize("chunk", [1, 2])
def test_chunks_change_neither_iterates_nor_cost(at_once: Any, chunk: int) -> None:
    chunked = run(Simulator(chunk=chunk))
    np.testing.assert_allclose(chunked.x, at_once.x, rtol=1e-6)
    np.testing.assert_allclose(chunked.y, at_once.y, rtol=1e-6)
    assert chunked.ledger == at_once.ledger
    assert at_once.ledger.calls == {"f_x": 2 * 6, "f_y": 2 * 6}


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_has_at_least_one_client(chunk: int) -> None:
    with pytest.raises(ValueError, match=rf"chunk is {chunk}; it must be at least 1, or None"):
        Simulator(chunk=chunk)


@pytest.mark.parametrize("dropout", [-0.1, 1.0, 1.5, float("nan")])
def test_dropout_is_a_probability_below_one(dropout: float) -> None:
    with pytest.raises(ValueError, match="must be a probability below 1"):
        Simulator(dropout=dropout)


def test_a_run_with_dropout_costs_less_up_and_is_reproducible(at_once: Any) -> None:
    dropped, again = run(Simulator(dropout=0.5)), run(Simulator(dropout=0.5))
    np.testing.assert_array_equal(dropped.x, again.x)
    assert dropped.ledger == again.ledger
    assert dropped.ledger.down == at_once.ledger.down
    assert 0 < dropped.ledger.up["xy"] < at_once.ledger.up["xy"]
    assert dropped.ledger.calls["f_x"] < at_once.ledger.calls["f_x"]


# ---------------------------------------------------------------------- a session


def test_a_block_records_each_step_and_nothing_behind_the_last() -> None:
    with Simulator().connect(saddle(), saddle_clients(), FedAvgS(0.1, 0.1, steps=(1, 2, 3))) as session:
        state, cost = session.init(KEY)
        assert Ledger.from_counts(cost) == Ledger()
        block = session.advance(state, KEY, 0, 1, 2)
        assert (block.done, block.finite) == (1, True)
        assert np.asarray(block.counts[Entry("round")]).tolist() == [1, 0]
        rest = session.advance(block.state, KEY, 1, 1, 2)
        whole = session.advance(state, KEY, 0, 2, 2)
        later = session.advance(state, KEY, 1, 1, 2)
        assert session.failures == []
    np.testing.assert_array_equal(rest.state.x, whole.state.x)
    assert whole.done == 2
    assert not np.array_equal(later.state.y, block.state.y), "each step draws its own batches"


# ------------------------------------------------------------- the number of clients


def sizes_computed(jaxpr: Any) -> list[int]:
    """How many numbers each operation of a program produces, in all of its inner programs."""
    sizes = []
    for equation in jaxpr.eqns:
        inner = [
            value
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr)
            if is_jaxpr(value)
        ]
        for program in inner:
            sizes += sizes_computed(getattr(program, "jaxpr", program))
        if not inner:
            sizes += [int(np.prod(output.aval.shape)) for output in equation.outvars]
    return sizes


def is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def step_of(clients: int) -> list[int]:
    """Sizes of what one step of LFedNest computes, with cohorts of three among so many clients."""
    d, samples = 3, 4
    shapes = (
        {"A": (d, d), "B": (d, d), "b": (d,)},
        {"D": (d, d), "E": (d, d), "c": (d,), "e": (d,), "rho": ()},
    )
    rows = [{name: jnp.zeros((clients, samples, *s)) for name, s in part.items()} for part in shapes]
    problem = Problem(upper_objective, lower_objective, jnp.ones(d), jnp.zeros(d))
    fed = Simulator().federation(problem, Clients(*rows, batch_size=2))
    algorithm = LFedNest(0.1, 0.1, smoothness=5.0, cohort=3)
    state = Variables(problem.x0, problem.y0)
    return sizes_computed(
        jax.make_jaxpr(lambda state: simulate(fed, algorithm, state, KEY, 0, 1, 1).state)(state).jaxpr
    )


def test_a_step_computes_with_its_cohort_only() -> None:
    few, many = step_of(50), step_of(5000)
    assert len(few) == len(many) > 100
    # Who holds a published value is one bit for each client; all else is the cohort's.
    assert max(many) == 5000
    assert [size for size in many if size < 5000] == [size for size in few if size != 50]
