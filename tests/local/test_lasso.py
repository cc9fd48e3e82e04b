"""The LASSO decoder's arithmetic: against scikit-learn, against finite differences, against dense algebra."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.local.lasso import active_set, lasso, lasso_adjoint, least_squares, soft
from fedbilevel.local.sketch import Operator

pytestmark = pytest.mark.usefixtures("float64")

D, P, MANY = 40, 16, 2000  # after so many steps both methods are there, to rounding
PENALTY = 0.2


@functools.cache
def drawn():
    """S with entries `N(0, 1/d)`, and ω of a sparse θ with a little noise."""
    draw = np.random.default_rng(0)
    S = draw.normal(size=(P, D)) / np.sqrt(D)
    theta = np.zeros(D)
    theta[draw.choice(D, 5, replace=False)] = 3 * draw.normal(size=5)
    return S, S @ theta + 0.05 * draw.normal(size=P)


def rate(S):
    return 1 / np.linalg.norm(S, 2) ** 2


@functools.partial(jax.jit, static_argnames="method")
def solved(S, omega, penalty, lr, steps, method="ista"):
    start = jnp.zeros(S.shape[1])
    return lasso(Operator.of(S), omega, start, penalty=penalty, lr=lr, steps=steps, method=method)


@functools.partial(jax.jit, static_argnames="iterations")
def encoded(S, omega, theta, change, penalty, lr, iterations=200):
    active = active_set(Operator.of(S), omega, theta, penalty=penalty, lr=lr)
    return active, lasso_adjoint(Operator.of(S), active, change, iterations)


def relative(a, b):
    return np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b))


def test_the_threshold():
    v = jnp.array([-2.0, -0.5, 0.0, 0.3, 1.5])
    assert np.allclose(soft(v, 0.5), [-1.5, 0, 0, 0, 1.0], atol=0)


# --------------------------------------------------------------------- decode


@pytest.mark.parametrize("method", ["ista", "fista"])
def test_it_converges_to_scikit_learns(method):
    linear_model = pytest.importorskip("sklearn.linear_model")
    S, omega = drawn()
    # Its objective is divided by the number of rows.
    theirs = linear_model.Lasso(alpha=PENALTY / P, fit_intercept=False, tol=1e-14, max_iter=100_000)
    theirs.fit(S, omega)
    ours = np.asarray(solved(S, omega, PENALTY, rate(S), MANY, method))
    assert 0 < np.count_nonzero(ours) < P
    assert np.array_equal(ours != 0, theirs.coef_ != 0)
    assert np.max(abs(ours - theirs.coef_)) <= 1e-6


@pytest.mark.parametrize("method", ["ista", "fista"])
def test_what_it_converges_to_is_optimal(method):
    """`Sᵀ(ω − Sθ)` is β sign(θ) where θ is not zero, and at most β in size elsewhere."""
    S, omega = drawn()
    theta = np.asarray(solved(S, omega, PENALTY, rate(S), MANY, method))
    slope = S.T @ (omega - S @ theta)
    on = theta != 0
    assert np.max(abs(slope[on] - PENALTY * np.sign(theta[on]))) <= 1e-9
    assert np.max(abs(slope[~on])) < PENALTY


def test_one_step_is_the_papers():
    S, omega = drawn()
    lr = rate(S)
    theta = soft(jnp.asarray(lr * S.T @ omega), lr * PENALTY)
    assert np.allclose(solved(S, omega, PENALTY, lr, 1), theta, atol=1e-15)
    theta = soft(theta + lr * S.T @ (omega - S @ theta), lr * PENALTY)
    assert np.allclose(solved(S, omega, PENALTY, lr, 2), theta, atol=1e-15)


def test_acceleration_gets_further_in_as_many_steps():
    S, omega = drawn()
    costs = {}
    for method in ("ista", "fista"):
        theta = np.asarray(solved(S, omega, PENALTY, rate(S), 40, method))
        costs[method] = 0.5 * np.sum((S @ theta - omega) ** 2) + PENALTY * np.sum(abs(theta))
    best = np.asarray(solved(S, omega, PENALTY, rate(S), MANY))
    least = 0.5 * np.sum((S @ best - omega) ** 2) + PENALTY * np.sum(abs(best))
    assert costs["fista"] - least < 0.5 * (costs["ista"] - least)


def test_steps_that_are_too_long_diverge():
    """The bound `2/‖S‖²` is sharp: the control of what `SketchLasso` refuses."""
    S, omega = drawn()
    assert np.max(abs(solved(S, omega, 0.0, 1.99 * rate(S), MANY))) < 1e3
    assert not np.max(abs(np.asarray(solved(S, omega, 0.0, 2.05 * rate(S), MANY)))) < 1e3


# --------------------------------------------------------------------- encode


def by_differences(S, omega, penalty, change, width=1e-4):
    """`(∂θ/∂ω)ᵀ Δθ`, one ω after the other, of the converged decoder."""
    away = width * np.eye(P)
    run = jax.vmap(lambda omega: solved(S, omega, penalty, rate(S), MANY))
    ahead, behind = jnp.split(run(jnp.concatenate([omega + away, omega - away])), 2)
    assert penalty == 0 or np.array_equal(ahead != 0, behind != 0)  # no kink between
    return np.asarray((ahead - behind) @ change) / (2 * width)


@pytest.mark.parametrize("penalty", [PENALTY, 0.0])
def test_encode_is_the_derivative_of_the_converged_decoder(penalty):
    """With β > 0 fewer than p entries are active; with β = 0 all d are, more than p."""
    S, omega = drawn()
    change = np.random.default_rng(1).normal(size=D)
    theta = solved(S, omega, penalty, rate(S), MANY)
    active, found = encoded(S, omega, theta, change, penalty, rate(S))
    assert np.sum(active) < P if penalty else np.sum(active) == D
    assert relative(found, by_differences(S, omega, penalty, change)) <= 1e-7


@pytest.mark.parametrize(("steps", "penalty"), [(1, 0.01), (MANY, PENALTY)])
def test_encode_is_the_pseudo_inverse(steps, penalty):
    """After one step more than p entries are active; after many, fewer."""
    S, omega = drawn()
    change = np.random.default_rng(2).normal(size=D)
    theta = solved(S, omega, penalty, rate(S), steps)
    active, found = encoded(S, omega, theta, change, penalty, rate(S))
    A = np.asarray(active)
    assert (np.sum(A) > P) == (steps == 1)
    assert relative(found, np.linalg.pinv(S[:, A].T) @ change[A]) <= 1e-10


def test_encode_is_the_papers_matrix_with_its_sign_put_right():
    """`γSU(I − (I − γSᵀS)U)⁻¹`, which the paper calls −∂θ/∂ω: it is ∂θ/∂ω."""
    S, omega = drawn()
    change, lr = np.random.default_rng(3).normal(size=D), rate(S)
    theta = solved(S, omega, PENALTY, lr, MANY)
    active, found = encoded(S, omega, theta, change, PENALTY, lr)
    U = np.diag(np.asarray(active, float))
    papers = lr * S @ U @ np.linalg.inv(np.eye(D) - (np.eye(D) - lr * S.T @ S) @ U)
    assert relative(found, papers @ change) <= 1e-9


def test_where_nothing_is_active_nothing_is_encoded():
    S, omega = drawn()
    active, found = encoded(S, omega, jnp.zeros(D), jnp.ones(D), 100.0, rate(S))
    assert not np.any(active)
    assert np.array_equal(found, np.zeros(P))


# -------------------------------------------------------------- least squares

SHAPES = {"tall": (9, 4, 4), "wide": (4, 9, 4), "square": (5, 5, 5), "deficient": (9, 6, 3)}


@pytest.mark.parametrize("shape", SHAPES)
def test_least_squares_of_least_norm(shape):
    rows, columns, rank = SHAPES[shape]
    draw = np.random.default_rng(4)
    left, right = (np.linalg.qr(draw.normal(size=(n, rank)))[0] for n in (rows, columns))
    A = left @ np.diag(np.linspace(1, 3, rank)) @ right.T
    b = draw.normal(size=rows)
    found = jax.jit(lambda A, b: least_squares(Operator.of(A), b, 30))(A, b)
    assert relative(found, np.linalg.pinv(A) @ b) <= 1e-12


def test_least_squares_of_tiny_numbers_in_single_precision():
    """Squares of 10⁻²⁵ are below what float32 can hold."""
    draw = np.random.default_rng(5)
    A, b = (draw.normal(size=shape).astype(np.float32) for shape in ((12, 4), (12,)))
    found = jax.jit(lambda A, b: least_squares(Operator.of(A), b, 30))(A, np.float32(1e-25) * b)
    assert found.dtype == np.float32
    assert relative(np.asarray(found, float) * 1e25, np.linalg.pinv(A) @ b) <= 1e-5


def test_the_solution_for_nothing_is_nothing():
    found = least_squares(Operator.of(jnp.ones((3, 2))), jnp.zeros(3), 5)
    assert np.array_equal(found, np.zeros(2))


def test_without_a_penalty_everything_is_active_and_the_adjoint_linear():
    """At θ = 0 too, where no threshold could say so: `(∂θ/∂ω)ᵀ Δθ = (SSᵀ)⁻¹ S Δθ`."""
    S, _ = drawn()
    change = np.random.default_rng(1).normal(size=D)
    _, found = encoded(S, np.zeros(P), np.zeros(D), change, 0.0, rate(S))
    np.testing.assert_allclose(found, np.linalg.solve(S @ S.T, S @ change), atol=1e-9)
