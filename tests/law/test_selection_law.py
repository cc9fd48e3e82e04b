"""Laws of the choice of the largest: any numbers, any count, as a stable sort would choose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from fedbilevel.selection import best

SIZE = 9
chosen = jax.jit(jax.vmap(best, in_axes=(None, 0)))  # every count at once
COUNTS = np.arange(SIZE + 1)


def by_sort(scores):
    """Row k: the k largest; of equals the first."""
    order = np.argsort(-scores, kind="stable")
    ranks = np.argsort(order, kind="stable")
    return ranks[None] < COUNTS[:, None]


def numbers(kind):
    if np.issubdtype(kind, np.integer):
        return st.integers(-3, 3) | st.integers(-(2**30), 2**30)
    width = np.dtype(kind).itemsize * 8
    some = st.floats(
        width=width, allow_nan=False, allow_subnormal=False
    )  # a processor may round these to zero
    return some | st.sampled_from([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf])  # so that some are equal


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int32])
def test_the_choice_is_that_of_a_stable_sort(kind):
    @settings(max_examples=60, deadline=None)
    @given(hnp.arrays(kind, SIZE, elements=numbers(kind)))
    def law(scores):
        np.testing.assert_array_equal(chosen(jnp.asarray(scores), COUNTS), by_sort(scores))

    with jax.enable_x64(True):
        law()


def test_a_choice_has_no_derivative_that_costs_anything():
    """ZeroFL chooses inside the loss: its derivative must not sort or gather."""
    traced = jax.make_jaxpr(jax.grad(lambda y: jnp.sum(jnp.where(best(y, 2), y, 0) ** 2)))(jnp.arange(4.0))
    assert not {"sort", "gather", "scatter"} & {str(equation.primitive) for equation in traced.eqns}
    given_slope = jax.grad(lambda y: jnp.sum(jnp.where(best(y, 2), y, 0) ** 2))(
        jnp.array([3.0, 1.0, -4.0, 2.0])
    )
    assert given_slope.tolist() == [6.0, 0.0, 0.0, 4.0]
