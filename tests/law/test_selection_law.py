"""Laws of the choice of the largest: any numbers, any count, as a stable sort would choose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from fedbilevel.selection import _chosen, best

SIZE = 9
chosen = jax.jit(jax.vmap(best, in_axes=(None, 0)))  # every count at once
COUNTS = np.arange(SIZE + 1)


def by_sort(scores):
    """Row k: the k largest; of equals the first."""
    known = np.where(np.isnan(scores), -np.inf, scores).astype(float)
    order = np.argsort(-known, kind="stable")
    ranks = np.argsort(order, kind="stable")
    return ranks[None] < COUNTS[:, None]


def numbers(kind):
    if np.issubdtype(kind, np.unsignedinteger):
        return st.integers(0, np.iinfo(kind).max)
    if np.issubdtype(kind, np.integer):
        return st.integers(-3, 3) | st.integers(-(2**30), 2**30)
    width = np.dtype(kind).itemsize * 8
    # Without subnormal ones, which a processor may round to zero; and with some that are often equal.
    some = st.floats(width=width, allow_nan=False, allow_subnormal=False)
    return some | st.sampled_from([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, -np.nan])


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int32, np.uint8, np.uint32])
def test_the_choice_is_that_of_a_stable_sort(kind):
    @settings(max_examples=60, deadline=None)
    @given(hnp.arrays(kind, SIZE, elements=numbers(kind)))
    def law(scores):
        np.testing.assert_array_equal(chosen(jnp.asarray(scores), COUNTS), by_sort(scores))

    with jax.enable_x64(True):
        law()


def test_a_choice_has_no_derivative_that_costs_anything():
    """ZeroFL chooses inside the loss: its derivative must not sort or gather."""

    def loss(y):
        return jnp.sum(jnp.where(best(y, 2), y, 0) ** 2)

    def by_sorting(y):
        return jnp.sum(jnp.where(y >= jnp.sort(y)[-2], y, 0) ** 2)

    y = jnp.array([3.0, 1.0, -4.0, 2.0])
    assert jax.grad(loss)(y).tolist() == jax.grad(by_sorting)(y).tolist() == [6.0, 0.0, 0.0, 4.0]
    traced, other = (str(jax.make_jaxpr(jax.grad(function))(y)) for function in (loss, by_sorting))
    assert "sort" in other
    assert not any(name in traced for name in ("sort", "gather", "scatter"))


def test_arrays_of_numpy_and_calls_one_by_one():
    """What is wider than JAX's own numbers is narrowed first; a second call compiles nothing."""
    wide = np.array([1.0, 3.0, 2.0])
    assert best(wide, 1).tolist() == [False, True, False]
    known = _chosen._cache_size()
    assert best(wide + 1, 1).tolist() == [False, True, False]
    assert _chosen._cache_size() == known
