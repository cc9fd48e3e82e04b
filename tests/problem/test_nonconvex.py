"""The nonconvex problem: its closed forms against derivatives that know nothing of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.problem.nonconvex import Nonconvex

pytestmark = pytest.mark.usefixtures("all_float64")

CLIENTS, DX, DY = 4, 3, 5


@pytest.fixture(scope="module")
def known(all_float64: None) -> Nonconvex:
    return Nonconvex.random(jax.random.key(3), CLIENTS, DX, DY)


@pytest.fixture(scope="module")
def x(all_float64: None) -> jax.Array:
    return jnp.asarray(np.random.default_rng(7).normal(size=DX))


def objectives(known: Nonconvex, **options: Any) -> tuple[Any, Any]:
    """f and g as functions of (client, x, y), on all of a client's samples."""
    problem, clients = known.problem(), known.clients(**options)

    def of(function: Any, level: str) -> Any:
        data = getattr(clients, level)
        return lambda client, x, y: function(x, y, data.batch(client, jax.random.key(0)).samples)

    return of(problem.upper, "upper"), of(problem.lower, "lower")


def mean(function: Any) -> Any:
    return lambda x, y: jnp.mean(jax.vmap(lambda client: function(client, x, y))(jnp.arange(CLIENTS)))


def implicit(f: Any, g: Any, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """y*, u* and the hypergradient of f and g by dense derivatives; one Newton step solves g."""
    y = jnp.zeros(DY)
    y = y - jnp.linalg.solve(jax.hessian(g, 1)(x, y), jax.grad(g, 1)(x, y))
    f_x, f_y = jax.grad(f, (0, 1))(x, y)
    u = jnp.linalg.solve(jax.hessian(g, 1)(x, y), f_y)
    return y, u, f_x - jax.jacobian(jax.grad(g, 1))(x, y).T @ u


def close(a: Any, b: Any, tolerance: float) -> bool:
    return bool(np.max(np.abs(np.asarray(a) - np.asarray(b))) <= tolerance)


def test_closed_forms_are_the_derivatives_of_the_objectives(known: Nonconvex, x: jax.Array) -> None:
    f, g = objectives(known, samples=3, noise=0.4)
    y, u, h = jax.jit(lambda x: implicit(mean(f), mean(g), x))(x)
    assert close(known.lower_solution(x), y, 1e-12)
    assert close(known.adjoint(x), u, 1e-12)
    assert close(known.hypergradient(x), h, 1e-12)

    @jax.jit
    def own(x: jax.Array) -> jax.Array:
        each = jax.vmap(lambda i: implicit(lambda x, y: f(i, x, y), lambda x, y: g(i, x, y), x)[2])
        return jnp.mean(each(jnp.arange(CLIENTS)), axis=0)

    assert close(known.own_hypergradient(x), own(x), 1e-12)
    assert not close(known.own_hypergradient(x), known.hypergradient(x), 1e-2), "clients differ"


def test_hypergradient_is_the_slope_of_the_value(known: Nonconvex, x: jax.Array) -> None:
    f, _ = objectives(known)
    value = jax.jit(jax.vmap(lambda x: mean(f)(x, known.lower_solution(x))))
    width = 1e-5
    slope = (value(x + width * np.eye(DX)) - value(x - width * np.eye(DX))) / (2 * width)
    assert close(known.hypergradient(x), slope, 1e-9)


def test_it_is_nonconvex_with_bounded_gradients(known: Nonconvex) -> None:
    along = np.linspace(-4, 4, 81)[:, None] * np.ones(DX)
    curvature = np.linalg.eigvalsh(jax.jit(jax.vmap(jax.jacobian(known.hypergradient)))(along))
    assert curvature.min() < -1e-2
    assert curvature.max() > 1e-2
    f, _ = objectives(known)
    slope = jax.jit(jax.vmap(lambda t: jax.grad(f, (1, 2))(0, t * jnp.ones(DX), t * jnp.ones(DY))))
    assert max(np.abs(leaf).max() for leaf in slope(np.logspace(0, 4))) <= 1, "φ' is at most one"


def test_samples_scatter_as_much_as_said_around_the_clients_own_values(known: Nonconvex) -> None:
    clients = known.clients(samples=4000, noise=0.4)
    rows = {
        name: np.asarray(leaf).reshape(CLIENTS, 4000, -1)
        for name, leaf in {**clients.lower.flat, **clients.upper.flat}.items()
    }
    for name in ("a", "s", "b", "c"):
        assert close(rows[name].mean(1), getattr(known, name), 1e-12)
    for name in ("tilt", "push"):
        assert close(rows[name].mean(1), 0, 1e-12)
    for name, unit in {"a": known.a, "s": known.s, "b": 1, "tilt": 1, "push": 1}.items():
        assert close(rows[name].std(1) / np.asarray(unit), 0.4, 0.02), name
    assert rows["a"].min() > 0
    with pytest.raises(ValueError, match=r"noise is 0\.6; it must lie between 0 and"):
        known.clients(noise=0.6)


def test_the_metric_is_of_the_lower_level_asked_for(known: Nonconvex, x: jax.Array) -> None:
    local = dataclasses.replace(known, lower="local")
    for one, h in ((known, known.hypergradient(x)), (local, known.own_hypergradient(x))):
        metric = one.problem().metrics["stationarity"]
        assert metric(x, jnp.zeros(DY)) == pytest.approx(float(jnp.sum(h**2)), rel=1e-12)
    with pytest.raises(ValueError, match='lower is \'own\'; it must be "global" or "local"'):
        dataclasses.replace(known, lower="own")


def test_one_client_with_all_samples_has_the_same_hypergradient(known: Nonconvex, x: jax.Array) -> None:
    f, g = objectives(known, samples=3, noise=0.4, pooled=True)
    h = jax.jit(lambda x: implicit(lambda x, y: f(0, x, y), lambda x, y: g(0, x, y), x)[2])(x)
    assert close(known.hypergradient(x), h, 1e-12)
