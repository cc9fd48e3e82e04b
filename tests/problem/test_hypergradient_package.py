"""The library's hypergradient against optimistix, an independent package for implicit differentiation."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix
import pytest

import fedbilevel as fb
from fedbilevel.problem.quadratic import lower_objective, upper_objective

pytestmark = pytest.mark.usefixtures("float64")

RTOL = 1e-8


def mean_over(data, function):
    """`mean_i function(x, y, data_i)` over clients of any sizes."""
    return lambda x, y: sum(function(x, y, own) for own in data) / len(data)


def independent(upper, lower, upper_data, lower_data, x, y0):
    """`d/dx mean f_i(x, y*(x))`: optimistix finds y* and differentiates it implicitly.

    As the root of `∇_y g`, not as a minimum: near it g is flat to rounding, and y right to 1e-8 only.
    """
    f, g = mean_over(upper_data, upper), mean_over(lower_data, lower)

    @eqx.filter_jit
    @jax.grad
    def slope(x):
        found = optimistix.root_find(
            lambda y, x: jax.grad(g, 1)(x, y),
            optimistix.Newton(rtol=1e-12, atol=1e-12),
            y0,
            args=x,
            adjoint=optimistix.ImplicitAdjoint(),
        )
        return f(x, found.value)

    return np.asarray(slope(x))


@eqx.filter_jit
def hypergradient(algorithm, *arguments):
    return algorithm.hypergradient(*arguments)


def ours(upper, lower, upper_data, lower_data, x, y):
    """The library's, from exchanges with the clients: products only, conjugate gradients."""
    problem = fb.Problem(upper, lower, x, y)
    federation = fb.Simulator().federation(problem, fb.Clients(lower_data, upper_data))
    algorithm = fb.FedNest(0.0, 0.0, series="cg", terms=3 * y.size)
    return np.asarray(hypergradient(algorithm, federation, problem.x0, problem.y0, jax.random.key(0)))


def close(a, b, tolerance=RTOL):
    return np.linalg.norm(np.asarray(a) - np.asarray(b)) <= tolerance * np.linalg.norm(b)


# ------------------------------------------------------------------ quadratic


def test_quadratic():
    clients, dx, dy = 2, 3, 4
    quadratic = jax.tree.map(np.asarray, fb.Quadratic.random(jax.random.key(1), clients, dx, dy))
    lower_data, upper_data = (
        [{name: getattr(quadratic, name)[i : i + 1] for name in names} for i in range(clients)]
        for names in ("ABb", ("D", "E", "c", "e", "rho"))
    )
    x = jnp.array([0.5, -1.0, 2.0])
    parts = (upper_objective, lower_objective, upper_data, lower_data, x)
    expected = independent(*parts, jnp.zeros(dy))
    y = quadratic.lower_solution(x)
    assert close(ours(*parts, y), expected)
    assert close(quadratic.hypergradient(x), expected)
    assert not close(ours(*parts, y + 0.1), expected, 1e-3), "away from y* it is another vector"
    assert not close(quadratic.own_hypergradient(x), expected, 1e-2)


# ------------------------------------------------------------------ ridge regression

SIZES = (6, 4)  # unequal: the library pads, the reference does not
FEATURES = 3


def regression(sizes, seed):
    """Per client features and targets, each client with its own truth."""
    draw = np.random.default_rng(seed)
    data = []
    for size in sizes:
        a = draw.normal(size=(size, FEATURES))
        data.append({"a": a, "t": a @ draw.normal(size=FEATURES) + 0.1 * draw.normal(size=size)})
    return data


def squared(x, y, samples):
    return jnp.mean((samples["a"] @ y - samples["t"]) ** 2) / 2


def ridge(x, y, samples):
    return squared(x, y, samples) + jnp.exp(x) * jnp.sum(y**2) / 2


def test_ridge_penalty():
    """x is the log of the penalty; `dh/dx = −e^x y*ᵀ(S + e^x I)⁻¹ ∇f(y*)` in closed form."""
    train, valid = regression(SIZES, 0), regression(SIZES[::-1], 1)
    x = np.array(-0.7)

    def moments(data):
        S = np.mean([d["a"].T @ d["a"] / len(d["t"]) for d in data], axis=0)
        return S, np.mean([d["a"].T @ d["t"] / len(d["t"]) for d in data], axis=0)

    (S, r), (S_valid, r_valid) = moments(train), moments(valid)
    H = S + np.exp(x) * np.eye(FEATURES)
    y = np.linalg.solve(H, r)
    closed = -np.exp(x) * y @ np.linalg.solve(H, S_valid @ y - r_valid)

    parts = (squared, ridge, valid, train, x)
    assert close(ours(*parts, y), closed, 1e-12)
    assert close(independent(*parts, np.zeros(FEATURES)), closed)


# ------------------------------------------------------------------ logistic regression


def logistic(x, y, samples):
    return jnp.mean(jnp.logaddexp(0, -jnp.sign(samples["t"]) * (samples["a"] @ y)))


def penalised(x, y, samples):
    return logistic(x, y, samples) + jnp.sum(jnp.exp(x) * y**2) / 2


def logistic_minimiser(data, x):
    """`y*(x)` to rounding: Newton's method, by hand."""
    a = np.concatenate([own["a"] for own in data])
    sign = np.concatenate([np.sign(own["t"]) for own in data])
    weight = np.concatenate([np.full(len(own["t"]), 1 / len(own["t"]) / len(data)) for own in data])
    y = np.zeros(FEATURES)
    for _ in range(20):
        wrong = 1 / (1 + np.exp(sign * (a @ y)))
        slope = np.exp(x) * y - (weight * wrong * sign) @ a
        y = y - np.linalg.solve(np.diag(np.exp(x)) + (weight * wrong * (1 - wrong)) * a.T @ a, slope)
    return y


def test_logistic_penalties():
    """A penalty for every feature; no closed form, and H depends on y."""
    train, valid = regression(SIZES, 2), regression(SIZES[::-1], 3)
    x = np.array([-1.0, -2.0, -3.0])
    parts = (logistic, penalised, valid, train, x)
    assert close(ours(*parts, logistic_minimiser(train, x)), independent(*parts, np.zeros(FEATURES)))
