"""The problems with known answers: their closed forms against derivatives that know nothing of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.problem.quadratic import lower_objective, upper_objective

pytestmark = pytest.mark.usefixtures("float64")

CLIENTS, DX, DY = 4, 3, 4


@pytest.fixture
def quadratic():
    return jax.tree.map(np.asarray, fb.Quadratic.random(jax.random.key(1), CLIENTS, DX, DY))


@pytest.fixture
def point():
    draw = np.random.default_rng(7)
    return jnp.asarray(draw.normal(size=DX)), jnp.asarray(draw.normal(size=DY))


def rows(quadratic):
    """Every client as one sample: the mean over samples is the mean over clients."""
    return {name: getattr(quadratic, name) for name in quadratic.__dataclass_fields__ if name != "lower"}


def close(a, b, tolerance):
    return np.max(np.abs(np.asarray(a) - np.asarray(b))) <= tolerance


def test_closed_forms_are_the_derivatives_of_the_objectives(quadratic, point):
    """y*, u* and the hypergradient from dense jax derivatives of the two objective functions."""
    data, (x, y) = rows(quadratic), point

    @jax.jit
    def dense(x, y):
        f_x, f_y = jax.grad(upper_objective, (0, 1))(x, y, data)
        g_y, H = jax.grad(lower_objective, 1)(x, y, data), jax.hessian(lower_objective, 1)(x, y, data)
        J = jax.jacobian(jax.grad(lower_objective, 1))(x, y, data)  # (dy, dx)
        return f_x, f_y, g_y, H, J

    f_x, f_y, g_y, H, J = map(np.asarray, dense(x, y))
    best = y - np.linalg.solve(H, g_y)  # one Newton step is exact
    assert close(quadratic.lower_solution(x), best, 1e-13)
    assert close(quadratic.upper_slope(x, y), f_y, 1e-13)
    u = jnp.asarray(np.linalg.solve(H, f_y))
    assert close(quadratic.adjoint_at(x, y), u, 1e-13)
    assert close(quadratic.hypergradient_at(x, y, u), f_x - J.T @ u, 1e-13)

    f_x, f_y, *_ = map(np.asarray, dense(x, best))
    assert close(quadratic.hypergradient(x), f_x - J.T @ np.linalg.solve(H, f_y), 1e-13)
    assert not close(quadratic.hypergradient(x), f_x, 1e-2)


def test_hypergradient_is_the_slope_of_the_value(quadratic, point):
    """Central differences of `mean f_i(x, y*(x))`: exact for a quadratic, whatever the step."""
    x, data = point[0], rows(quadratic)

    @jax.jit
    @jax.vmap
    def value(x):
        return upper_objective(x, quadratic.lower_solution(x), data)

    above, below = value(x + 0.5 * np.eye(DX)), value(x - 0.5 * np.eye(DX))
    assert close(quadratic.hypergradient(x), above - below, 1e-12)


def test_solution_is_where_the_hypergradient_vanishes(quadratic):
    assert close(quadratic.hypergradient(quadratic.solution()), 0, 1e-13)
    assert close(quadratic.own_hypergradient(quadratic.own_solution()), 0, 1e-13)
    assert not close(quadratic.own_solution(), quadratic.solution(), 1e-2)


def test_one_client_alone_has_its_own_answers(quadratic, point):
    x = point[0]
    alone = [quadratic.only(client) for client in range(CLIENTS)]
    assert close(quadratic.own_lower_solutions(x), [q.lower_solution(x) for q in alone], 1e-13)
    assert close(quadratic.own_hypergradient(x), np.mean([q.hypergradient(x) for q in alone], axis=0), 1e-13)
    assert close(alone[2].own_solution(), alone[2].solution(), 1e-12)


def test_random_clients_differ_unless_asked_to_be_alike(quadratic):
    eigenvalues = np.linalg.eigvalsh(quadratic.A)
    assert close(eigenvalues, np.linspace(1, 4, DY), 1e-12)
    same = fb.Quadratic.random(jax.random.key(1), CLIENTS, DX, DY, alike=True)
    for field, leaf in rows(same).items():
        assert close(leaf, np.asarray(leaf)[:1], 0), field
    for field, leaf in rows(quadratic).items():
        assert not close(leaf, leaf[:1], 1e-2), field
    assert close(same.own_solution(), same.solution(), 1e-12)


def test_samples_scatter_around_the_clients_own_values(quadratic):
    clients = jax.tree.map(jnp.asarray, quadratic).clients(samples=3, noise=0.5, key=jax.random.key(4))
    flat = {**clients.lower.flat, **clients.upper.flat}
    for name, leaf in flat.items():
        own = getattr(quadratic, name)
        copies = np.asarray(leaf).reshape(CLIENTS, 3, *own.shape[1:])
        assert close(copies.mean(1), own, 1e-13)
        assert (np.std(copies, axis=1).max() > 0.1) == (name in ("b", "c", "e"))


def test_problem_starts_away_from_the_solution_and_measures_the_way(quadratic):
    problem = quadratic.problem()
    error = problem.metrics["error"]
    assert error(problem.x0, problem.y0) == pytest.approx(np.linalg.norm(1 - quadratic.solution()), rel=1e-14)
    assert error(quadratic.solution(), problem.y0) == 0


def test_the_error_is_that_of_the_lower_level_asked_for(quadratic):
    local = dataclasses.replace(jax.tree.map(jnp.asarray, quadratic), lower="local")
    problem = local.problem()
    assert close(problem.metrics["error"](quadratic.own_solution(), problem.y0), 0, 1e-14)
    assert problem.metrics["error"](quadratic.solution(), problem.y0) > 1e-2
    with pytest.raises(ValueError, match='lower is \'own\'; it must be "global" or "local"'):
        fb.Quadratic.random(jax.random.key(1), CLIENTS, DX, DY, lower="own")


def test_one_client_with_all_samples_has_the_same_objectives(quadratic, point):
    """f, g and their gradients on pooled data are the means over the clients."""
    known = jax.tree.map(jnp.asarray, quadratic)
    several, pooled = (known.clients(samples=3, noise=0.5, pooled=pool) for pool in (False, True))
    problem = known.problem()

    @functools.partial(jax.jit, static_argnames="level")
    def both(clients, level):
        function, data = getattr(problem, level), getattr(clients, level)
        batches = jax.vmap(lambda client: data.batch(client, jax.random.key(0)).samples)(
            jnp.arange(clients.n)
        )
        return jax.vmap(lambda own: jax.value_and_grad(function, (0, 1))(*point, own))(batches)

    assert pooled.n == 1
    for level in ("lower", "upper"):
        each, together = both(several, level), both(pooled, level)
        for ours, theirs in zip(jax.tree.leaves(together), jax.tree.leaves(each), strict=True):
            assert close(ours[0], theirs.mean(0), 1e-12)
            assert not close(ours[0], theirs[0], 1e-2), "clients differ"


# ------------------------------------------------------------------ saddle points and compositions


@pytest.mark.parametrize("centred", [True, False])
def test_saddle_point_is_stationary_in_both_variables(centred):
    saddle = fb.Saddle.random(jax.random.key(2), CLIENTS, DX, spread=10.0, centred=centred)
    problem, clients = saddle.problem(), saddle.clients()
    x, y = saddle.solution()
    assert problem.structure == "minimax"
    f_x, f_y = jax.jit(jax.grad(lambda xy: problem.upper(*xy, clients.upper.flat)))((x, y))
    assert close(f_x, 0, 1e-13)
    assert close(f_y, 0, 1e-13)
    assert close(jnp.concatenate([x, y]), 0, 1e-13) == centred
    curvature = jax.jit(jax.hessian(lambda y: problem.lower(x, y, clients.lower.flat)))(y)
    assert close(curvature, np.eye(DX), 1e-13), "g = −f is what y minimises"


def test_composition_is_least_squares():
    composition = fb.Composition.random(jax.random.key(2), CLIENTS, DX, DY)
    problem, clients = composition.problem(), composition.clients()
    assert problem.structure == "compositional"
    R, s, t = (np.asarray(leaf).mean(0) for leaf in (composition.R, composition.s, composition.t))
    best = np.linalg.lstsq(R, t - s, rcond=None)[0]
    assert close(composition.solution(), best, 1e-12)

    @jax.jit
    def slope_of_lower(y):  # g_i is the client's own: its row alone
        own = [jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], clients.lower.flat) for i in range(CLIENTS)]
        slopes = [jax.grad(problem.lower, 1)(jnp.asarray(best), y, data) for data in own]
        return jnp.mean(jnp.stack(slopes), axis=0)

    assert close(slope_of_lower(jnp.asarray(R @ best + s)), 0, 1e-13)
    assert not close(slope_of_lower(jnp.zeros(DY)), 0, 1e-2)
