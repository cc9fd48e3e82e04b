"""Sketches: their entries, what they keep, what they weigh."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.local.count_sketch import CountSketch, SparseJL
from fedbilevel.local.sketch import SRHT, Gaussian, Operator, power_iteration, walsh_hadamard

D, P, DRAWS = 12, 5, 2000
KINDS = {
    "gaussian": Gaussian(P, seed=3),
    "regenerated": Gaussian(P, seed=3, memory=0),
    "srht": SRHT(P, seed=3),
    "sparse": SparseJL(P, seed=3, nonzeros=2),
}


def matrix(sketch, d=D, id=None, dtype=jnp.float32):
    """S, column by column; one compilation for all ids but None."""
    return np.asarray(_matrix(sketch, d, jnp.dtype(dtype), id), float).T


@eqx.filter_jit
def _matrix(sketch, d, dtype, id):
    operator = sketch.operator(d, sketch.stored(d, dtype, id), id)
    return jax.vmap(operator.forward)(jnp.eye(d, dtype=dtype))


@pytest.fixture
def theta():
    return jnp.asarray(np.random.default_rng(0).normal(size=D), jnp.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_are_kept_in_the_mean(kind, theta):
    """`E‖Sθ‖² = (p/d)‖θ‖²`, over sketches of so many clients; within five standard errors."""
    sketch = KINDS[kind]

    def squared(id):
        return jnp.sum(sketch.apply(theta, sketch.stored(D, id=id), id) ** 2)

    lengths = np.asarray(jax.jit(jax.vmap(squared))(jnp.arange(DRAWS)), float)
    error = np.std(lengths) / np.sqrt(DRAWS)
    assert abs(np.mean(lengths) - P / D * float(theta @ theta)) <= 5 * error
    assert error < 0.05 * np.mean(lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sketch_is_its_seed_and_a_clients_own_is_another(kind):
    sketch = KINDS[kind]
    assert np.array_equal(matrix(sketch), matrix(sketch))
    zero, one = (matrix(sketch, id=jnp.asarray(id)) for id in range(2))
    assert not np.array_equal(matrix(sketch), zero)
    assert not np.array_equal(zero, one)
    assert not np.array_equal(matrix(sketch), matrix(type(sketch)(P, seed=4)))


# ------------------------------------------------------------------- Gaussian


@pytest.mark.parametrize("size", [7, 1500])
def test_what_is_not_stored_is_made_again_with_the_same_entries(size):
    """1500 rows of 2000 entries are three blocks, the last one shorter."""
    d = 2000
    theta, omega = (jnp.asarray(np.random.default_rng(1).normal(size=n), jnp.float32) for n in (d, size))
    kept, anew = Gaussian(size, seed=5), Gaussian(size, seed=5, memory=0)
    stored = kept.stored(d)
    assert stored.shape == (size, d)
    assert anew.stored(d) == ()
    for product in (lambda s, w: s.apply(theta, w), lambda s, w: s.adjoint(omega, d, w)):
        one, other = (
            np.asarray(jax.jit(lambda s=s, w=w, p=product: p(s, w))())
            for s, w in ((kept, stored), (anew, ()))
        )
        assert np.max(abs(one - other)) <= 1e-5 * np.max(abs(one))


def test_entries_are_normal_with_variance_one_over_d():
    entries = np.asarray(Gaussian(300).stored(400), float) * np.sqrt(400)
    count = entries.size
    assert abs(np.mean(entries)) <= 5 / np.sqrt(count)
    assert abs(np.mean(entries**2) - 1) <= 5 * np.sqrt(2 / count)
    assert abs(np.mean(entries**4) - 3) <= 5 * np.sqrt(96 / count)
    # Independent from row to row, and within one.
    assert np.max(abs(np.mean(entries[1:] * entries[:-1], axis=1))) <= 5 / np.sqrt(400)
    assert np.max(abs(np.mean(entries[:, 1:] * entries[:, :-1], axis=0))) <= 5 / np.sqrt(300)


def test_entries_do_not_depend_on_the_dtype(float64):
    single, double = (np.asarray(Gaussian(P).stored(D, dtype), float) for dtype in ("float32", "float64"))
    assert np.array_equal(single, double)


def test_a_matrix_of_eight_gigabytes_is_never_made():
    """d = 10⁵, p = 2·10⁴: a product with S or Sᵀ takes far less than 1 GiB."""
    d, p = 100_000, 20_000
    sketch = Gaussian(p)
    stored = jax.eval_shape(lambda: sketch.stored(d))
    assert stored == ()
    theta, omega = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in (d, p))
    for product, vector in (
        (lambda theta: sketch.apply(theta, ()), theta),
        (lambda omega: sketch.adjoint(omega, d, ()), omega),
    ):
        needs = jax.jit(product).lower(vector).compile().memory_analysis()
        total = needs.temp_size_in_bytes + needs.output_size_in_bytes + needs.argument_size_in_bytes
        assert 4 * (d + p) <= total < 2**26


def test_memory_counts_the_vectors_own_itemsize(float64):
    sketch = Gaussian(P, memory=4 * P * D)
    assert sketch.stored(D, jnp.float32).dtype == jnp.float32
    assert sketch.stored(D, jnp.float64) == ()


# ----------------------------------------------------------------------- norm


@pytest.mark.parametrize("kind", ["gaussian", "srht", "sparse"])
def test_the_norm_is_that_of_the_matrix(kind):
    d, p = 100, 20
    sketch = {"gaussian": Gaussian(p), "srht": SRHT(p), "sparse": SparseJL(p)}[kind]
    exact = np.linalg.norm(matrix(sketch, d), 2) ** 2
    found = float(jax.jit(lambda: sketch.norm_squared(d, sketch.stored(d)))())
    assert 0.95 * exact <= found <= exact * (1 + 1e-5)


def test_the_norm_of_a_matrix_that_is_not_stored_is_its_limit():
    d, p = 2000, 200
    S = np.asarray(Gaussian(p).stored(d), float)
    exact = np.linalg.eigvalsh(S @ S.T)[-1]
    assert abs(float(Gaussian(p, memory=0).norm_squared(d, ())) - exact) <= 0.03 * exact


def test_power_iteration_finds_a_gap_to_rounding(float64):
    turn, _ = np.linalg.qr(np.random.default_rng(2).normal(size=(4, 4)))
    S = turn @ np.diag([3.0, 1.0, 0.5, 0.2]) @ np.eye(4, 6)
    found = power_iteration(Operator.of(jnp.asarray(S)), jnp.ones(4))
    assert abs(float(found) - 9) <= 1e-12


# ----------------------------------------------------------------------- SRHT


def test_the_transform_is_the_hadamard_matrix():
    two = np.array([[1, 1], [1, -1]])
    eight = np.kron(two, np.kron(two, two))
    assert np.array_equal(np.asarray(jax.vmap(walsh_hadamard)(jnp.eye(8))), eight)


def test_rows_are_orthogonal_for_a_power_of_two():
    S = matrix(SRHT(10), d=16)
    assert np.max(abs(S @ S.T - np.eye(10))) <= 1e-6
    assert np.allclose(abs(S), 1 / 4)


def test_all_rows_of_a_power_of_two_lose_nothing():
    """p = d: without repetition every row is there, so that S is a rotation."""
    S = matrix(SRHT(16), d=16)
    assert np.max(abs(S.T @ S - np.eye(16))) <= 1e-6


# --------------------------------------------------------------------- sparse


@pytest.mark.parametrize(("size", "nonzeros"), [(7, 3), (8, 4), (5, 5), (4, 1)])
def test_every_column_has_so_many_entries_of_one_size(size, nonzeros):
    S = matrix(SparseJL(size, nonzeros=nonzeros), d=40)
    assert np.array_equal(np.count_nonzero(S, axis=0), np.full(40, nonzeros))
    assert np.allclose(abs(S[S != 0]), np.sqrt(size / (40 * nonzeros)))
    assert np.all(np.count_nonzero(S, axis=1) > 0)


# ---------------------------------------------------------------- count sketch


def test_heavy_entries_are_found():
    """Ten large entries among 10⁴ small ones, in a table of 7 × 1000.

    A small entry passes for a large one if it shares a column with one in four of seven rows: a chance of
    `35 (10/1000)⁴` each, 0.4 % for all of them. (With 5 × 500 it is one sketch in eight.)
    """
    draw = np.random.default_rng(4)
    vector = 0.01 * draw.normal(size=10_000).astype(np.float32)
    places = draw.choice(10_000, 10, replace=False)
    vector[places] = draw.choice([-1, 1], 10) * (2 + draw.uniform(size=10))
    sketch = CountSketch(rows=7, columns=1000, seed=1)
    table = sketch.sketch(jnp.asarray(vector))
    assert table.shape == (7, 1000)
    values, found = sketch.heavy(table, 10_000, k=10)
    assert set(np.asarray(found).tolist()) == set(places.tolist())
    assert np.max(abs(np.asarray(values) - vector[np.asarray(found)])) <= 0.3


def test_a_table_is_what_its_definition_says():
    d, sketch = 30, CountSketch(rows=2, columns=4, seed=7)
    units = np.asarray(jax.vmap(sketch.sketch)(jnp.eye(d)))
    assert np.array_equal(np.count_nonzero(units, axis=2), np.ones((d, 2)))
    assert set(np.unique(units)) == {-1.0, 0.0, 1.0}
    vector = np.random.default_rng(5).normal(size=d).astype(np.float32)
    table = np.asarray(sketch.sketch(jnp.asarray(vector)))
    assert np.allclose(table, np.einsum("i,irc->rc", vector, units), atol=1e-5)
    by_hand = np.median(np.einsum("rc,irc->ri", table, units), axis=0)
    assert np.allclose(np.asarray(sketch.estimate(jnp.asarray(table), d)), by_hand, atol=1e-5)


# --------------------------------------------------------------------- errors

WRONG = {
    "no rows": (lambda: Gaussian(0), "size is 0; it must be a whole number of at least 1"),
    "a seed that is none": (lambda: SRHT(3, seed=-1), "seed is -1"),
    "larger than the vector": (lambda: SRHT(13).stored(12), "give a size of at most 12"),
    "a column of more entries than rows": (lambda: SparseJL(3, nonzeros=4), "give at most 3"),
    "no columns": (lambda: CountSketch(3, 0), "columns is 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_explained(case):
    make, words = WRONG[case]
    with pytest.raises(ValueError, match=words):
        make()
