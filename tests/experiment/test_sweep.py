"""Many runs at little cost: `jax.vmap` over step sizes, and no compilation for what is only data."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel import Clients, FedAvgS, FedNest, Ledger, Quadratic, Simulator, minimax, simulate, solve
from fedbilevel.algorithm.base import Variables

RATES = (0.05, 0.2, 1e18)  # the last one diverges in its second step, and must not disturb the others
KEY = jr.key(4)
STEPS = 3


def objective(x: Any, y: Any, samples: Any) -> Any:
    """Convex in x, concave in y; the samples pull at both."""
    return jnp.sum(x**2) / 2 + jnp.mean(samples @ (x - y)) - jnp.sum(y**2) / 2 + jnp.sum(x * y)


@pytest.fixture(scope="module")
def fed() -> Any:
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 2)), jnp.float32)
    problem = minimax(objective, np.ones(2, np.float32), np.zeros(2, np.float32))
    return Simulator().federation(problem, Clients(lower=rows, batch_size=2))


def method(upper_lr: Any) -> FedAvgS:
    return FedAvgS(upper_lr, 0.1, steps=(1, 2))


def run(fed: Any, algorithm: Any) -> Any:
    start = Variables(fed.problem.x0, fed.problem.y0)
    return simulate(fed, algorithm, start, KEY, 0, STEPS, STEPS)


def test_a_sweep_over_step_sizes_is_the_separate_runs(fed: Any) -> None:
    algorithms, rates = [method(rate) for rate in RATES], jnp.array(RATES)
    sweeps = [
        jax.tree.map(lambda *leaves: jnp.stack([jnp.float32(leaf) for leaf in leaves]), *algorithms),
        jax.vmap(method)(rates),
        jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.float32(leaf), 3), eqx.filter_vmap(method)(rates)),
    ]
    together, alone = eqx.filter_jit(jax.vmap(run, in_axes=(None, 0))), eqx.filter_jit(run)
    separate = [alone(fed, jax.tree.map(jnp.float32, algorithm)) for algorithm in algorithms]
    for sweep in sweeps:
        blocks = together(fed, jax.tree.map(jnp.float32, sweep))
        for index, block in enumerate(separate):
            np.testing.assert_allclose(blocks.state.x[index], block.state.x, rtol=1e-5)
            np.testing.assert_allclose(blocks.state.y[index], block.state.y, rtol=1e-5)
            mine = {entry: times[index] for entry, times in blocks.counts.items()}
            assert Ledger.from_counts(mine) == Ledger.from_counts(block.counts)
        assert blocks.finite.tolist() == [True, True, False]
        assert blocks.done.tolist() == [3, 3, 2]
    assert not np.allclose(separate[0].state.x, separate[1].state.x, rtol=1e-3)


# ------------------------------------------------------------------- no compilation


class Traces:
    """An objective that counts how often Python runs it."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, x: Any, y: Any, samples: Any) -> Any:
        self.count += 1
        return objective(x, y, samples)


def traces_of(
    counted: Traces,
    *,
    upper_lr: float = 0.1,
    shift: float = 0.0,
    steps: int = 4,
    x0: Any = np.ones(2, np.float32),
    **options: Any,
) -> int:
    """How often the objective was traced by a run, beside the check of its shape."""
    problem = minimax(counted, x0, jnp.zeros(2))
    clients = Clients(lower=jnp.full((2, 3, 2), shift, jnp.float32))
    problem.check(clients)  # the run's own check of the same shapes traces nothing more
    before = counted.count
    solve(problem, clients, FedAvgS(upper_lr, 0.1), steps, **{"every": 4} | options)
    return counted.count - before


def test_other_numbers_need_no_new_trace() -> None:
    counted = Traces()
    assert traces_of(counted) > 0
    assert traces_of(counted) == 0
    assert traces_of(counted, upper_lr=0.05) == 0
    assert traces_of(counted, shift=1.0) == 0
    assert traces_of(counted, x0=np.zeros(2, np.float32)) == 0
    assert traces_of(counted, steps=2) == 0
    assert traces_of(counted, steps=11) == 0
    assert traces_of(counted, seed=5) == 0
    assert traces_of(counted, every=3) > 0, "another capacity is another program"


def test_the_second_block_needs_no_new_trace_from_a_start_of_weak_type() -> None:
    counted = Traces()
    start = jnp.full(2, 1.0)
    assert start.weak_type, "like that of a Python number"
    first = traces_of(counted, x0=start, steps=4)
    assert first > 0
    assert traces_of(counted, x0=start, steps=8) == 0


def test_vmap_over_a_method_with_a_random_number_of_exchanges() -> None:
    """FedNest draws cohorts, batches and N' alike for every step size, so the bills are equal too."""
    known = Quadratic.random(jax.random.key(0), 4, 2, 3)
    fed = Simulator().federation(known.problem(), known.clients(samples=4, noise=0.3, batch_size=2))

    def run(rate: Any) -> Any:
        method = FedNest(rate, 0.1, smoothness=4.0, terms=3, cohort=3)
        return simulate(fed, method, method.init(fed, jax.random.key(0)), jax.random.key(1), 0, 3, 3)

    rates, one = jnp.array([0.01, 0.1]), jax.jit(run)
    together, alone = jax.jit(jax.vmap(run))(rates), [one(rate) for rate in rates]
    for index, single in enumerate(alone):
        np.testing.assert_allclose(together.state.x[index], single.state.x, rtol=1e-5)
        for entry, spent in single.counts.items():
            np.testing.assert_array_equal(together.counts[entry][index], spent)
