"""`diagnose`: curvature, heterogeneity and the error of hypergradients, against closed forms."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import (
    Clients,
    FedNest,
    LFedNest,
    Problem,
    Quadratic,
    diagnose,
    load,
    single_level,
    solve,
)
from fedbilevel.problem.quadratic import lower_objective, upper_objective

# All problems have these shapes, so that each kind of question is compiled once.
N, DX, DY = 2, 2, 3
X, Y = np.array([1.0, -1.0], np.float32), np.array([0.5, 0.0, -0.5], np.float32)
ACCURATE = FedNest(0.1, 0.1, series="cg", terms=6)
TOLERANCE = 1e-2


def quadratic(curvature: Any, alike: bool = False) -> Quadratic:
    """Two clients; the mean of their `A_i` has the given eigenvalues."""
    draws = np.random.default_rng(6)
    turn, _ = np.linalg.qr(draws.normal(size=(DY, DY)))
    mean = turn @ np.diag(curvature) @ turn.T
    apart = draws.normal(size=(DY, DY)) * (0 if alike else 0.25)
    tilt = np.stack([apart + apart.T, -apart - apart.T])

    def normal(*shape: int) -> Any:
        rows = draws.normal(size=(N, *shape))
        return np.broadcast_to(rows[:1], rows.shape) if alike else rows

    D = np.broadcast_to(np.eye(DY), (N, DY, DY))
    parts = (
        mean + tilt,
        normal(DY, DX),
        normal(DY),
        normal(DY),
        D,
        0.3 * normal(DX, DY),
        normal(DX),
        np.ones(N),
    )
    return Quadratic(*(jnp.asarray(part, jnp.float32) for part in parts))


def clients(quadratic: Quadratic, batch_size: int | None = None) -> Clients:
    levels = (("A", "B", "b"), ("D", "E", "c", "e", "rho"))
    rows = [{name: getattr(quadratic, name)[:, None] for name in names} for names in levels]
    return Clients(*rows, batch_size=batch_size)


PROBLEM = Problem(upper_objective, lower_objective, jnp.ones(DX), jnp.zeros(DY))


def examine(quadratic: Quadratic, algorithm: Any = ACCURATE) -> Any:
    return diagnose(PROBLEM, clients(quadratic), X, Y, algorithm=algorithm, tolerance=TOLERANCE)


@pytest.fixture(scope="module")
def regular() -> Any:
    given = quadratic([1.0, 2.0, 5.0])
    return given, examine(given)


@pytest.fixture(scope="module")
def indefinite() -> Any:
    given = quadratic([-1.0, 2.0, 5.0])
    return given, examine(given)


def test_both_ends_of_the_spectrum_are_those_of_numpy(regular: Any) -> None:
    given, found = regular
    low, *_, high = np.linalg.eigvalsh(np.asarray(given.A.mean(0), float))
    np.testing.assert_allclose([found.lambda_min, found.lambda_max], [low, high], rtol=1e-4)
    np.testing.assert_allclose(found.condition, high / low, rtol=1e-3)
    assert found.damping == 0
    assert found.smoothness >= high
    np.testing.assert_allclose(found.lower_lr, 1 / found.smoothness)


def test_the_step_size_of_the_lower_level_is_divided_among_local_steps(regular: Any) -> None:
    given, found = regular
    own = examine(given, algorithm=dataclasses.replace(ACCURATE, lower_steps=4))
    np.testing.assert_allclose(own.lower_lr, found.lower_lr / 4, rtol=1e-5)
    assert dataclasses.replace(ACCURATE, lower_steps=(1, 5, 2)).local_lower_steps == 5
    assert fb.FedBiO(0.1, 0.1, 0.1, sync_every=3).local_lower_steps == 3
    assert fb.CommFedBiO(0.1, 0.1, 0.1, topk=2, lower_steps=(2, 7)).local_lower_steps == 7
    assert fb.PDBO(fb.links.Ring(), 0.1, 9, terms=1).local_lower_steps == 1, "these are exchanges"


def test_the_spread_is_the_relative_deviation_of_the_clients(regular: Any) -> None:
    given, found = regular
    A, B, b, c, E, e = (np.asarray(getattr(given, name), float) for name in ("A", "B", "b", "c", "E", "e"))
    slopes = {
        "g_y": A @ Y - B @ X - b,
        "f_y": Y - c + np.einsum("nij,i->nj", E, X),
        "f_x": X - e + E @ Y,
    }
    for name, rows in slopes.items():
        centre = rows.mean(0)
        deviation = np.sqrt(np.mean(np.sum((rows - centre) ** 2, axis=1)))
        np.testing.assert_allclose(found.spread[name], deviation / np.linalg.norm(centre), rtol=1e-4)
    assert set(found.spread) == {*slopes, "g_yy", "g_xy"}
    assert found.spread["g_yy"] > 0.01
    assert found.spread["g_xy"] > 0.01


def test_clients_that_are_alike_have_no_spread() -> None:
    found = examine(quadratic([1.0, 2.0, 5.0], alike=True))
    assert max(found.spread.values()) < 1e-5


def test_the_suggested_numbers_of_terms_reach_the_tolerance(regular: Any, indefinite: Any) -> None:
    for given, found in (regular, indefinite):
        H = np.asarray(given.A.mean(0), float) + found.damping * np.eye(DY)
        bound = found.smoothness + found.damping
        left_over = np.eye(DY) - H / bound
        assert np.linalg.norm(np.linalg.matrix_power(left_over, found.terms), 2) <= TOLERANCE
        assert found.terms < 10 * np.linalg.cond(H) * np.log(1 / TOLERANCE), "and not far more than needed"
        root = np.sqrt(np.linalg.cond(H))
        assert 2 * ((root - 1) / (root + 1)) ** found.cg_terms <= TOLERANCE


def hypergradient(given: Quadratic, which: Any = slice(None)) -> Any:
    """`∇_x f − J u` at `(X, Y)` over some of the clients, in numpy."""
    names = ("A", "B", "c", "E", "e")
    A, B, c, E, e = (np.asarray(getattr(given, name), float)[which].mean(0) for name in names)
    u = np.linalg.solve(A, Y - c + E.T @ X)
    return X - e + E @ Y + B.T @ u


def test_the_accurate_hypergradient_is_the_closed_form(regular: Any) -> None:
    given, found = regular
    np.testing.assert_allclose(found.hypergradient_norm, np.linalg.norm(hypergradient(given)), rtol=1e-4)
    assert found.residual < 1e-4


def test_the_upper_step_size_is_one_over_the_curvature_of_h(regular: Any) -> None:
    given, found = regular
    A, B, E = (np.asarray(getattr(given, name), float).mean(0) for name in ("A", "B", "E"))
    slope = np.linalg.solve(A, B)  # of y*(x)
    hessian = np.eye(DX) + E @ slope + slope.T @ (slope + E.T)
    largest = np.linalg.eigvalsh(hessian)[-1]
    assert 0.95 / largest < found.upper_lr < 1.5 / largest


def test_conjugate_gradients_have_no_error_and_own_hypergradients_a_large_bias(regular: Any) -> None:
    given, found = regular
    assert found.estimator_error < 1e-3
    assert found.estimator_bias < 1e-3
    local = examine(given, LFedNest(0.1, 0.1, series="cg", terms=6))
    exact = hypergradient(given)
    own = np.mean([hypergradient(given, [client]) for client in range(N)], axis=0)
    expected = np.linalg.norm(own - exact) / np.linalg.norm(exact)
    assert expected > 0.1, "the clients of this test differ"
    np.testing.assert_allclose(local.estimator_error, expected, rtol=1e-3)
    np.testing.assert_allclose(local.estimator_bias, expected, rtol=1e-3)


def test_an_indefinite_g_is_damped_until_it_is_positive_definite(indefinite: Any) -> None:
    given, found = indefinite
    assert found.damping > 0
    shifted = np.asarray(given.A.mean(0), float) + found.damping * np.eye(DY)
    assert np.linalg.eigvalsh(shifted)[0] > 0
    np.testing.assert_allclose(found.lambda_min, -1, rtol=1e-3)
    assert "not strongly convex" in str(found)
    assert f"damping={found.damping:.4g}" in str(found)


def test_the_text_mentions_what_is_suggested(regular: Any) -> None:
    _, found = regular
    text = str(found)
    for name in ("smoothness", "lower_lr", "upper_lr"):
        assert f"{name}={getattr(found, name):.4g}" in text
    assert f"terms={found.terms}" in text
    assert f"{found.cg_terms} with" in text
    assert "damping" not in text
    assert "the given method's hypergradient" in text
    unmeasured = dataclasses.replace(found, upper_lr=None, residual=None, estimator_error=None)
    assert "upper_lr" not in str(unmeasured)
    assert "given method" not in str(unmeasured)


@pytest.mark.parametrize("reduce", [jnp.mean, jnp.sum])
def test_a_sum_over_samples_is_told_from_a_mean(reduce: Any) -> None:
    def f(x: Any, y: Any, samples: Any) -> Any:
        return reduce((samples @ y - x) ** 2) / 2

    def g(x: Any, y: Any, samples: Any) -> Any:
        return f(x, y, samples) + jnp.sum(y**2)  # what does not depend on samples counts once

    data = Clients(np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32))
    found = diagnose(Problem(f, g, 0.5, jnp.ones(3)), data, jnp.array(0.5), jnp.ones(3))
    assert found.no_means == (("upper", "lower") if reduce is jnp.sum else ())
    assert ("lower objective is no mean over samples" in str(found)) == (reduce is jnp.sum)


def test_the_measurement_is_billed(regular: Any) -> None:
    _, found = regular
    assert found.ledger.rounds > DY
    assert found.ledger.calls["g_yy"] > N * DY
    assert set(found.ledger.down) >= {"x", "y", "u"}


def test_auto_smoothness_bounds_the_largest_eigenvalue(regular: Any, tmp_path: Any) -> None:
    given, _ = regular
    measured = solve(PROBLEM, clients(given), FedNest(0.1, 0.1), 0)
    high = np.linalg.eigvalsh(np.asarray(given.A.mean(0), float))[-1]
    assert high <= measured.smoothness < 1.3 * high
    assert load(measured.save(tmp_path / "run")).smoothness == measured.smoothness
    assert solve(PROBLEM, clients(given), FedNest(0.1, 0.1, smoothness=7.0), 0).smoothness is None


def test_a_single_level_problem_has_nothing_to_diagnose() -> None:
    problem = single_level(lambda x, samples: jnp.sum(x**2), jnp.ones(2))
    with pytest.raises(ValueError, match="single-level problem has no lower level to diagnose"):
        diagnose(problem, Clients(lower=jnp.ones((2, 1, 1))), jnp.ones(2), ())
