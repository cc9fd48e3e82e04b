"""Iterative differentiation through push-sum: forward = backward = automatic differentiation of the steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.adjoint import Equilibrium
from fedbilevel.algorithm import ITD
from fedbilevel.algorithm.sgp import PushSum
from fedbilevel.fed.ledger import Ledger, as_arrays, metering
from fedbilevel.problem.oracle import Client

pytestmark = pytest.mark.usefixtures("all_float64")

NODES, STEPS, RATE = 3, 3, 0.1
COUNTS = (2.0, 1.0, 0.5)  # how much nodes count


@pytest.fixture(scope="module")
def known(all_float64: None) -> fb.Quadratic:
    return fb.Quadratic.random(jr.key(0), NODES, 2, 4)


@pytest.fixture(scope="module")
def x(all_float64: None) -> jax.Array:
    return jr.normal(jr.key(5), (NODES, 2))


@pytest.fixture(scope="module")
def found(known: fb.Quadratic, x: jax.Array) -> Callable[[str, str], tuple[Any, Ledger]]:
    """What ITD finds, by mode and order of the steps, and its bill; every program is compiled once."""
    return functools.cache(lambda mode, when: hypergradient(known, x, mode, when))


def hypergradient(known: fb.Quadratic, x: jax.Array, mode: Any, when: Any) -> tuple[Any, Ledger]:
    @jax.jit
    def compiled(x: jax.Array) -> tuple[Any, Any]:
        fed = fb.Simulator().federation(known.problem(), known.clients(weights=COUNTS))
        with metering() as meter:
            there = [fed.everyone.take(fed.keep(v)) for v in (x, jnp.zeros((NODES, 4)), jnp.ones(NODES))]
            at = Equilibrium(*there, there[2], fb.links.Stochastic(), RATE, when)
            found = fed.everyone.gather(ITD(STEPS, mode).hypergradient(fed, at, jr.key(3)), "h")[0]
        return found, as_arrays(meter.counts)

    found, counted = compiled(x)
    return found, Ledger.from_counts(counted)


def cost_after_the_steps(known: fb.Quadratic, x: jax.Array, when: Any, counts: jax.Array) -> jax.Array:
    """The weighted mean outer cost after the steps that ITD makes, as a plain function of all x."""
    problem = known.problem()
    clients = eqx.tree_at(lambda clients: clients.weights, known.clients(weights=COUNTS), counts)
    fed = fb.Simulator().federation(problem, clients)
    push, k_steps = PushSum(fb.links.Stochastic(), when), jr.split(jr.key(3))[1]
    with metering():
        own = fed.everyone.take(fed.keep(x))
        first = jnp.broadcast_to(problem.y0, (NODES, 4)), jnp.ones(NODES)
        held = fed.everyone.take(fed.keep(first))
        for t in range(STEPS):
            held = push.exchange(fed, own, held, RATE, t, jr.fold_in(k_steps, t))
        z, w = held.value
        y = z / w[:, None]
        nodes = [Client(problem, clients, i, i, jr.key(0)) for i in range(NODES)]
        costs = [me.f(x[i], y[i], me.batch("upper", me.key)) for i, me in enumerate(nodes)]
    return jnp.average(jnp.stack(costs), weights=counts)


@pytest.mark.parametrize("when", ["before", "after"])
def test_both_modes_are_the_derivative_of_the_steps(
    known: fb.Quadratic, x: jax.Array, found: Any, when: str
) -> None:
    """By the nodes' weights. Negative control: as if all counted alike it is another one."""
    derivative = jax.jit(jax.grad(lambda x, counts: cost_after_the_steps(known, x, when, counts)))
    truth, alike = (derivative(x, jnp.asarray(counts)) for counts in (COUNTS, (1.0,) * NODES))
    assert np.abs(alike - truth).max() > 0.05
    for mode in ("backward", "forward"):
        np.testing.assert_allclose(found(mode, when)[0], truth, rtol=1e-12, atol=1e-13)


def test_what_forward_mode_sends_grows_with_nodes_and_hyperparameters(found: Any) -> None:
    forward, backward = (found(mode, "after")[1] for mode in ("forward", "backward"))
    assert forward.edge["tangents"] == forward.edge["z"] // (4 + 1) * NODES * 2 * 4
    assert backward.rounds == 2 * STEPS + 1  # the last one is the test's own reading
    assert forward.rounds == 2 * STEPS + 2
    assert (forward.up["sum"], forward.down["sum"]) == (8 * NODES * NODES * 2, 8 * NODES * 2)
    assert forward.calls["g_yy"] == NODES * STEPS * NODES * 2
    assert forward.calls["g_xy"] == NODES * STEPS * 2


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="mode is 'sideways'"):
        ITD(3, "sideways")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps is 0"):
        ITD(0)
