"""The extreme eigenvalues from products, against numpy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.adjoint.lanczos import Tridiagonal, lanczos, spectrum
from fedbilevel.fed import repeat

pytestmark = pytest.mark.usefixtures("float64")


def symmetric(eigenvalues, seed=0):
    size = len(eigenvalues)
    turn, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))
    return turn @ np.diag(eigenvalues) @ turn.T


@jax.jit
def padded(matrix, start, size):
    """Eight iterations on the leading block of a padded matrix: one compiled program for all sizes."""
    inside = jnp.arange(len(start)) < size

    def product(index, v, memo):
        return jnp.where(inside, matrix @ v, 0), memo + 1

    return lanczos(product, jnp.where(inside, start, 0), 0, 8, repeat)


def ends(matrix, start=None):
    """The spectrum after eight iterations; a matrix is padded to twelve rows."""
    size, width = len(matrix), 12
    wide = np.zeros((width, width))
    wide[:size, :size] = matrix
    direction = np.zeros(width)
    direction[:size] = np.random.default_rng(9).normal(size=size) if start is None else start
    found, products = padded(wide, direction, size)
    assert int(products) == 8
    return spectrum(found)


CASES = {
    "spread": (0.1, 0.5, 2.0, 3.0, 7.0, 20.0),
    "indefinite": (-4.0, -1.0, 0.5, 1.0, 2.0, 3.0),
    "negative": (-4.0, -3.0, -1.0),
    "repeated": (1.0, 1.0, 1.0, 5.0, 5.0, 5.0),
    "identity": (2.0, 2.0, 2.0, 2.0),
    "singular": (0.0, 0.0, 1.0, 3.0),
    "zero": (0.0, 0.0),
    "size one": (3.0,),
    "as many iterations as rows": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0),
    "ill-conditioned": (1e-8, 1e-3, 1.0, 1e4),
}


@pytest.mark.parametrize("case", CASES)
def test_both_ends_of_the_spectrum_are_found(case):
    """With no fewer iterations than distinct eigenvalues they are exact, and the bounds say so."""
    eigenvalues = CASES[case]
    found = ends(symmetric(eigenvalues))
    scale = max(1.0, max(map(abs, eigenvalues)))
    assert found.low == pytest.approx(min(eigenvalues), abs=1e-12 * scale)
    assert found.high == pytest.approx(max(eigenvalues), abs=1e-12 * scale)
    assert 0 <= found.low_error <= 1e-12 * scale
    assert 0 <= found.high_error <= 1e-12 * scale


@pytest.mark.parametrize("seed", range(5))
def test_bounds_hold_when_iterations_are_too_few(seed):
    """Twelve rows, eight iterations: an eigenvalue lies within the error, inside the true ends."""
    root = np.random.default_rng(seed).normal(size=(12, 12))
    values = np.linalg.eigvalsh(root + root.T)
    found = ends(root + root.T)
    assert np.min(np.abs(values - found.low)) <= found.low_error + 1e-12
    assert np.min(np.abs(values - found.high)) <= found.high_error + 1e-12
    assert values[0] - 1e-12 <= found.low <= found.high <= values[-1] + 1e-12
    assert found.high_error > 1e-12, "the bound must show that it is not exact"


def test_an_eigenvector_as_start_shows_its_own_eigenvalue():
    """The space is exhausted at once; what follows is rounding, and must be ignored."""
    matrix = np.diag([1.0, 2.0, 5.0])
    found = ends(matrix, start=[0.0, 3.0, 0.0])
    assert (found.low, found.high) == pytest.approx((2.0, 2.0), abs=1e-14)


def test_a_tree_and_a_python_loop_give_the_same():
    matrix = symmetric(CASES["indefinite"])
    flat = np.random.default_rng(9).normal(size=6)

    def product(index, v, memo):
        out = matrix @ jnp.concatenate([v["a"], v["b"].ravel()])
        return {"a": out[:2], "b": out[2:].reshape(2, 2)}, memo

    def python_loop(times, body, carry):
        for index in range(times):
            carry = body(index, carry)
        return carry

    start = {"a": jnp.asarray(flat[:2]), "b": jnp.asarray(flat[2:]).reshape(2, 2)}
    ours = spectrum(lanczos(product, start, (), 6, python_loop)[0])
    theirs = ends(matrix, start=flat)
    assert ours[:2] == pytest.approx(theirs[:2], abs=1e-12)


def test_what_follows_the_first_zero_is_ignored():
    """A tridiagonal matrix in two parts: only the part that the start reaches counts."""
    found = spectrum(Tridiagonal(np.array([2.0, 4.0, 100.0]), np.array([1.0, 0.0, 3.0])))
    assert (found.low, found.high) == pytest.approx((3 - 2**0.5, 3 + 2**0.5), abs=1e-14)
    assert (found.low_error, found.high_error) == (0, 0)
