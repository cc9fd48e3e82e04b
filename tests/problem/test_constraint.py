"""Convex sets: projections onto them, and FedNest inside them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fedbilevel as fb
from fedbilevel.algorithm.base import Variables
from fedbilevel.problem.quadratic import lower_objective, upper_objective
from fedbilevel.problem.structured import saddle_objective

pytestmark = pytest.mark.usefixtures("float64")

CLIENTS, DX, DY = 4, 3, 4
CAPACITY = 400


# Set, whether a flat vector lies in it, and a random member.
SETS = {
    "simplex": (
        fb.Simplex(),
        lambda v: np.all(v >= 0) and abs(v.sum() - 1) < 1e-12,
        lambda draw: draw.dirichlet(np.ones(7)),
    ),
    "simplex of total 3": (
        fb.Simplex(3.0),
        lambda v: np.all(v >= 0) and abs(v.sum() - 3) < 1e-12,
        lambda draw: 3 * draw.dirichlet(np.ones(7)),
    ),
    "box": (
        fb.Box(-0.5, 0.25),
        lambda v: np.all(v >= -0.5) and np.all(v <= 0.25),
        lambda draw: draw.uniform(-0.5, 0.25, size=7),
    ),
    "positive": (fb.Positive(), lambda v: np.all(v >= 0), lambda draw: draw.exponential(size=7)),
}


def tree_of(vector):
    return {"a": jnp.asarray(vector[:3]), "b": (jnp.asarray(vector[3:]).reshape(2, 2),)}


@pytest.mark.parametrize("name", SETS)
def test_projection_is_the_nearest_point_of_the_set(name):
    """Feasible, idempotent, and `⟨v − Pv, z − Pv⟩ ≤ 0` for members z, which only the nearest point is."""
    constraint, inside, member = SETS[name]
    project, draw = jax.jit(constraint), np.random.default_rng(0)
    for scale in (0.1, 1.0, 10.0, 1.0):
        vector = scale * draw.normal(size=7)
        tree = project(tree_of(vector))
        assert jax.tree.structure(tree) == jax.tree.structure(tree_of(vector))
        found = np.asarray(ravel_pytree(tree)[0])
        assert inside(found)
        assert inside(vector) == np.allclose(vector, found, rtol=0, atol=1e-14)
        assert np.allclose(ravel_pytree(project(tree))[0], found, rtol=0, atol=1e-14)
        for _ in range(20):
            assert (vector - found) @ (member(draw) - found) <= 1e-12
        z = member(draw)
        assert np.allclose(ravel_pytree(project(tree_of(z)))[0], z, rtol=0, atol=1e-14), "members stay"


def test_a_box_may_have_bounds_for_every_entry():
    box = fb.Box({"a": np.array([0.0, -1.0])}, {"a": np.array([1.0, -0.5])})
    assert np.array_equal(box({"a": jnp.array([2.0, 2.0])})["a"], [1.0, -0.5])


# ------------------------------------------------------------------ FedNest inside a set


def run(problem, clients, algorithm):
    """x at the start, after each of a few steps, and after many."""
    with fb.Simulator().connect(problem, clients, algorithm) as session:
        state, path = session.init(jax.random.key(0))[0], []
        for count in (1, 1, 1, 1, CAPACITY - 4):
            path.append(np.asarray(state.x))
            state = session.advance(Variables(*state), jax.random.key(0), 0, count, CAPACITY).state
    return [*path, np.asarray(state.x)]


def constrained_minimiser(project, slope, bend):
    """Of `½xᵀ(bend)x + slopeᵀx`, by projected descent: a strongly convex one has just this minimiser."""
    assert np.all(np.linalg.eigvalsh((bend + bend.T) / 2) > 0)
    x = np.zeros(len(slope))
    for _ in range(2000):
        x = project(x - 0.1 * (slope + bend @ x))
    return x


def onto_simplex(v):
    """The nearest point of the simplex: lower all entries until the positive ones sum to one."""
    high = np.sort(v)[::-1]
    drops = (np.cumsum(high) - 1) / np.arange(1, len(v) + 1)
    return np.maximum(v - drops[high > drops][-1], 0)


FIELDS = ("A B b", "D E c e rho")


def test_bilevel_run_in_a_box():
    """Every x is feasible and the last is the constrained optimum; the solution itself lies outside."""
    low, high = -0.5, 0.7
    quadratic = jax.tree.map(np.asarray, fb.Quadratic.random(jax.random.key(1), CLIENTS, DX, DY))
    parts = ({name: getattr(quadratic, name)[:, None] for name in names.split()} for names in FIELDS)
    problem = fb.Problem(
        upper_objective, lower_objective, np.ones(DX), np.zeros(DY), constraint=fb.Box(low, high)
    )
    algorithm = fb.FedNest(0.2, 0.2, upper_steps=3, lower_steps=2, series="cg", terms=6)
    path = run(problem, fb.Clients(*parts), algorithm)
    assert all(np.all(x >= low) and np.all(x <= high) for x in path)

    slope = np.asarray(quadratic.hypergradient(jnp.zeros(DX)))
    bend = np.stack([np.asarray(quadratic.hypergradient(e)) - slope for e in jnp.eye(DX)], axis=1)
    best = constrained_minimiser(lambda x: np.clip(x, low, high), slope, bend)
    assert np.allclose(path[-1], best, rtol=0, atol=1e-10)
    free = np.asarray(quadratic.solution())
    assert np.any((free < low) | (free > high))
    assert not np.allclose(best, np.clip(free, low, high), atol=1e-4), "more than clipping is asked for"


def test_minimax_run_on_a_simplex():
    """`min over the simplex, max over y`: `h(x) = ½‖b̄ − Āx‖² + (λ/2)‖x‖²`."""
    draw = np.random.default_rng(2)
    A, b, penalty = draw.normal(size=(CLIENTS, DY, DX)), draw.normal(size=(CLIENTS, DY)), 1.0
    data = {"A": A[:, None], "b": b[:, None], "penalty": np.full((CLIENTS, 1), penalty)}
    problem = fb.minimax(saddle_objective, np.ones(DX), np.zeros(DY), constraint=fb.Simplex())
    algorithm = fb.FedNest(0.1, 0.5, upper_steps=2, lower_steps=3)
    path = run(problem, fb.Clients(data), algorithm)
    assert all(np.all(x >= -1e-15) and abs(x.sum() - 1) < 1e-12 for x in path)

    A, b = A.mean(0), b.mean(0)
    bend = A.T @ A + penalty * np.eye(DX)
    assert np.allclose(path[-1], constrained_minimiser(onto_simplex, -A.T @ b, bend), rtol=0, atol=1e-10)
    free = np.linalg.solve(bend, A.T @ b)
    assert abs(free.sum() - 1) > 0.1
    assert np.count_nonzero(path[-1] > 1e-9) < DX, "the optimum lies on the edge"
