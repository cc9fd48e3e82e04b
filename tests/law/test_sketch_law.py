"""Laws of sketches: any kind, any vectors, any client's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from fedbilevel.local.count_sketch import CountSketch, SparseJL
from fedbilevel.local.sketch import SRHT, Gaussian

FEW = settings(max_examples=15, deadline=None)
# One shape: JAX compiles its operations anew for every other. 13 is no power of two.
D, P = 13, 6
KINDS = {
    "gaussian": Gaussian(P),
    "regenerated": Gaussian(P, memory=0),
    "srht": SRHT(P),
    "sparse": SparseJL(P, nonzeros=4),
}
# Sums of these are exact in float32 wherever the entries of S are; elsewhere rounding is small.
numbers = st.integers(-50, 50)
thetas = hnp.arrays(np.float32, D, elements=numbers)
omegas = hnp.arrays(np.float32, P, elements=numbers)
seeds = st.integers(0, 3)
ids = st.integers(0, 2**31 - 1)  # every one is another sketch, and none is another program


@functools.cache
def operator(kind):
    """Compiled `(theta, omega, id) -> (Sθ, Sᵀω)`."""
    sketch = KINDS[kind]

    @jax.jit
    def both(theta, omega, id):
        own = sketch.operator(D, sketch.stored(D, theta.dtype, id), id)
        return own.forward(theta), own.adjoint(omega)

    return both


def products(kind, id, theta, omega):
    return [np.asarray(out, float) for out in operator(kind)(theta, omega, id)]


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(theta=thetas, omega=omegas, id=ids)
def test_the_adjoint_is_the_transpose(kind, theta, omega, id):
    """`⟨Sθ, ω⟩ = ⟨θ, Sᵀω⟩`."""
    image, back = products(kind, id, theta, omega)
    size = np.linalg.norm(theta) * np.linalg.norm(omega)
    assert abs(image @ omega.astype(float) - theta.astype(float) @ back) <= 1e-5 * size


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(theta=thetas, other=thetas, id=ids)
def test_products_are_linear(kind, theta, other, id):
    zero = np.zeros(P, np.float32)
    image = [products(kind, id, vector, zero)[0] for vector in (theta, other, 2 * theta - other)]
    scale = np.linalg.norm(theta) + np.linalg.norm(other)
    assert np.max(abs(image[2] - (2 * image[0] - image[1]))) <= 1e-5 * scale


@FEW
@given(theta=thetas, other=thetas, seed=seeds)
def test_tables_of_one_seed_add_up(theta, other, seed):
    """Exactly: sums of small whole numbers."""
    sketch = CountSketch(rows=3, columns=4, seed=seed)
    a, b, both = (np.asarray(sketch.sketch(jnp.asarray(v))) for v in (theta, other, theta + other))
    assert np.array_equal(a + b, both)


@FEW
@given(place=st.integers(0, D - 1), value=numbers, seed=seeds)
def test_a_lone_entry_is_read_back_exactly(place, value, seed):
    sketch, vector = CountSketch(rows=3, columns=4, seed=seed), np.zeros(D, np.float32)
    vector[place] = value
    estimate = np.asarray(sketch.estimate(sketch.sketch(jnp.asarray(vector)), D))
    assert estimate[place] == value
