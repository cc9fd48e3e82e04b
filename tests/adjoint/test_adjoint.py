"""Solvers of `H u = b` from products alone, on the server (Python loop) and in a compiled program alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.adjoint import ConjugateGradients, Neumann
from fedbilevel.fed import repeat

pytestmark = pytest.mark.usefixtures("float64")

SIZE = 4
EIGENVALUES = (0.5, 1.0, 2.0, 5.0)
BOUND = 6.0
KEY = 0


@pytest.fixture
def b():
    return np.array([1.0, -2.0, 0.5, 3.0])


def matrix(eigenvalues=EIGENVALUES):
    """A full symmetric matrix with these eigenvalues."""
    turn, _ = np.linalg.qr(np.random.default_rng(3).normal(size=(SIZE, SIZE)))
    return turn @ np.diag(eigenvalues) @ turn.T


def python_loop(times, body, carry):
    for index in range(int(times)):
        carry = body(index, carry)
    return carry


def solve(adjoint, H, b, seed=KEY, loop=python_loop):
    """The solve; its memo counts the products."""

    def product(index, v, memo):
        return H @ v, memo + 1

    return adjoint.solve(product, jnp.asarray(b), 0, jax.random.key(seed), loop)


def truncated(H, bound, terms, b):
    """`H⁻¹(I − (I − H/ℓ)^N) b`."""
    left = np.linalg.matrix_power(np.eye(SIZE) - H / bound, terms)
    return np.linalg.solve(H, b - left @ b)


def close(a, b, tolerance):
    return np.max(np.abs(np.asarray(a) - np.asarray(b))) <= tolerance


# ------------------------------------------------------------------ Neumann


@pytest.mark.parametrize("terms", [1, 2, 7])
@pytest.mark.parametrize("damping", [0.0, 0.8])
def test_truncated_sum_has_its_closed_form(b, terms, damping):
    solved = solve(Neumann(terms, BOUND, damping=damping), matrix(), b)
    H = matrix() + damping * np.eye(SIZE)
    assert close(solved.u, truncated(H, BOUND + damping, terms, b), 1e-13)
    assert not close(solved.u, truncated(H, BOUND + damping, terms + 1, b), 1e-3)
    assert solved.memo == terms - 1


def test_long_sum_is_the_solution(b):
    assert close(solve(Neumann(400, BOUND), matrix(), b).u, np.linalg.solve(matrix(), b), 1e-12)


@pytest.mark.parametrize("damping", [0.0, 0.8])
def test_sampled_term_averages_to_the_sum(b, damping):
    """Enumeration: one draw for every N' in {0..N−1}, all equally likely, none left out."""
    terms, draws = 5, {}
    for seed in range(80):
        solved = solve(Neumann(terms, BOUND, sampled=True, damping=damping), matrix(), b, seed)
        draws.setdefault(solved.memo, np.asarray(solved.u))
    assert sorted(draws) == list(range(terms))
    mean = np.mean(list(draws.values()), axis=0)
    assert close(mean, solve(Neumann(terms, BOUND, damping=damping), matrix(), b).u, 1e-13)
    del draws[0]
    assert not close(np.mean(list(draws.values()), axis=0), mean, 1e-3)


def test_all_lengths_are_equally_likely():
    terms, draws = 5, 5000
    adjoint = Neumann(terms, BOUND, sampled=True)

    def length(key):
        return adjoint.solve(lambda index, v, memo: (v, memo + 1), jnp.ones(1), 0, key, repeat).memo

    lengths = jax.jit(jax.vmap(length))(jax.random.split(jax.random.key(0), draws))
    counts = np.bincount(np.asarray(lengths), minlength=terms)
    assert len(counts) == terms
    assert np.max(np.abs(counts - draws / terms)) < 5 * np.sqrt(draws / terms)


def test_a_series_that_cannot_converge_says_so(b):
    """`adjoint_growth` is above 1 when ℓ is below half the largest eigenvalue, and not when it fits."""
    assert solve(Neumann(20, 2.0), matrix(), b).report["adjoint_growth"] > 1
    assert solve(Neumann(20, BOUND), matrix(), b).report["adjoint_growth"] <= 1
    indefinite = matrix((-1.0, 1.0, 2.0, 5.0))
    assert solve(Neumann(20, BOUND), indefinite, b).report["adjoint_growth"] > 1
    assert solve(Neumann(20, BOUND, damping=1.5), indefinite, b).report["adjoint_growth"] <= 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Neumann(0, BOUND), "terms is 0; it must be a whole number of at least 1"),
        (lambda: Neumann("5", BOUND), "terms is '5'; it must be a whole number"),
        (lambda: Neumann(5, -1.0), "smoothness is -1.0; it must be a number above 0"),
        (lambda: Neumann(5, BOUND, damping=-1.0), "damping is -1.0; it must be a number of at least 0"),
        (lambda: ConjugateGradients(0), "terms is 0; it must be a whole number of at least 1"),
        (lambda: ConjugateGradients(3, -0.1), "damping is -0.1; it must be a number of at least 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


# ------------------------------------------------------------------ conjugate gradients


@pytest.mark.parametrize("damping", [0.0, 0.8])
def test_conjugate_gradients_are_exact_after_as_many_iterations_as_dimensions(b, damping):
    exact = np.linalg.solve(matrix() + damping * np.eye(SIZE), b)
    solved = solve(ConjugateGradients(SIZE, damping), matrix(), b)
    assert close(solved.u, exact, 1e-12)
    assert solved.memo == SIZE
    assert not close(solve(ConjugateGradients(SIZE - 1, damping), matrix(), b).u, exact, 1e-4)


def test_more_iterations_do_no_harm(b):
    solved = solve(ConjugateGradients(10 * SIZE), matrix(), b)
    assert close(solved.u, np.linalg.solve(matrix(), b), 1e-13)
    assert 0 < solved.report["adjoint_curvature"] <= max(EIGENVALUES)


def test_iterations_among_rounding_errors_raise_no_alarm(b):
    """κ = 10⁶, ten times the iterations of exact arithmetic: the residual stays at rounding."""
    H = matrix((1e-3, 1.0, 30.0, 1e3))
    solved = solve(ConjugateGradients(10 * SIZE), H, b)
    assert close(H @ solved.u, b, 1e-9)  # eps·‖H‖‖u‖ is 1e-10
    assert solved.report["adjoint_curvature"] > 0.9e-3


def test_as_many_iterations_as_distinct_eigenvalues_suffice(b):
    H = matrix((1.0, 1.0, 3.0, 3.0))
    assert close(solve(ConjugateGradients(2), H, b).u, np.linalg.solve(H, b), 1e-13)


@pytest.mark.parametrize("eigenvalues", [(-1.0, 1.0, 2.0, 5.0), (-1.0, -2.0, -3.0, -4.0)])
def test_negative_curvature_is_reported_and_stops_the_solve(b, eigenvalues):
    short, long = (solve(ConjugateGradients(terms), matrix(eigenvalues), b) for terms in (SIZE, 20))
    assert short.report["adjoint_curvature"] <= 0
    assert np.all(np.isfinite(long.u))
    assert np.array_equal(short.u, long.u)
    damping = 1 - min(eigenvalues)
    cured = solve(ConjugateGradients(SIZE, damping), matrix(eigenvalues), b)
    assert cured.report["adjoint_curvature"] > 0
    assert close(cured.u, np.linalg.solve(matrix(eigenvalues) + damping * np.eye(SIZE), b), 1e-12)


@pytest.mark.parametrize("adjoint", [Neumann(5, BOUND), ConjugateGradients(5)], ids=["sum", "cg"])
def test_nothing_to_solve_gives_zero_and_no_alarm(adjoint):
    solved = solve(adjoint, matrix(), np.zeros(SIZE))
    assert np.array_equal(solved.u, np.zeros(SIZE))
    assert not np.any(np.isnan(list(solved.report.values())))
    assert solved.report.get("adjoint_growth", 0) <= 1
    assert solved.report.get("adjoint_curvature", 1) > 0


def test_scale_of_the_system_does_not_matter(b):
    """Tiny right-hand sides and huge matrices are solved to the same relative accuracy."""
    exact = np.linalg.solve(matrix(), b)
    solved = solve(ConjugateGradients(SIZE), 1e8 * matrix(), 1e-100 * b)
    assert close(1e108 * np.asarray(solved.u), exact, 1e-12)


# ------------------------------------------------------------------ both loops, and trees

ADJOINTS = {
    "sum": Neumann(6, BOUND, damping=0.3),
    "sampled": Neumann(6, BOUND, sampled=True, damping=0.3),
    "cg": ConjugateGradients(6, 0.3),
}


@pytest.mark.parametrize("name", ADJOINTS)
def test_compiled_and_python_loops_agree_on_a_tree(b, name):
    """A dict as y, `repeat` under jit, a Python loop outside: the same u, products and report."""
    adjoint, H = ADJOINTS[name], matrix()
    tree = {"first": jnp.asarray(b[:1]), "rest": jnp.asarray(b[1:]).reshape(3, 1)}

    def product(index, v, memo):
        flat = H @ jnp.concatenate([v["first"], v["rest"][:, 0]])
        return {"first": flat[:1], "rest": flat[1:, None]}, memo + 1

    def go(loop):
        return adjoint.solve(product, tree, jnp.asarray(0), jax.random.key(4), loop)

    outside, inside = go(python_loop), jax.jit(lambda: go(repeat))()
    flat = solve(adjoint, H, b, seed=4)
    for solved in (outside, inside):
        assert solved.u["rest"].shape == (3, 1)
        assert close(jnp.concatenate([solved.u["first"], solved.u["rest"][:, 0]]), flat.u, 1e-14)
        assert int(solved.memo) == flat.memo
        assert set(solved.report) == set(flat.report)
        for key, value in flat.report.items():
            assert solved.report[key] == pytest.approx(float(value), rel=1e-12)
    assert flat.memo > 0
