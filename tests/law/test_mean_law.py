"""Laws of the mean, of links and of codecs."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from fedbilevel import Clients, Problem, Simulator
from fedbilevel.fed import Complete, Dense, Given

N, D = 4, 3
FEW = settings(max_examples=25, deadline=None)
numbers = st.floats(-100, 100, width=32)
rows = hnp.arrays(np.float32, (N, D), elements=numbers)
weights = hnp.arrays(np.float32, (N,), elements=st.floats(0, 10, width=32)).filter(lambda w: w.sum() > 0.1)


def nothing(x: Any, y: Any, samples: Any) -> Any:
    return jnp.mean(samples) * 0.0


EVERYONE = (
    Simulator()
    .federation(Problem(nothing, nothing, x0=0.0, y0=0.0), Clients(lower=jnp.zeros((N, 1))))
    .everyone
)


def mean(values: Any, weight: Any = None, codec: Any = None) -> Any:
    return np.asarray(EVERYONE.mean(EVERYONE.deal(values, "v"), "v", weight=weight, codec=codec))


def push(values: Any, links: Any) -> Any:
    mixed = EVERYONE.push(EVERYONE.deal(values, "v"), links, "v")
    return np.asarray(EVERYONE.gather(mixed, "v")[0])


@FEW
@given(rows, weights)
def test_mean_is_the_weighted_average_of_numpy(values: Any, weight: Any) -> None:
    np.testing.assert_allclose(mean(values), values.mean(0), rtol=1e-5, atol=1e-4)
    expected = np.average(values, axis=0, weights=weight)
    np.testing.assert_allclose(mean(values, weight), expected, rtol=1e-5, atol=1e-4)


@FEW
@given(rows, rows, numbers, weights)
def test_mean_is_linear(a: Any, b: Any, factor: float, weight: Any) -> None:
    factor = np.float32(factor)
    together = mean(factor * a + b, weight)
    np.testing.assert_allclose(together, factor * mean(a, weight) + mean(b, weight), rtol=1e-4, atol=0.05)


@FEW
@given(rows, weights, st.permutations(range(N)))
def test_mean_does_not_depend_on_the_order_of_clients(values: Any, weight: Any, order: Any) -> None:
    shuffled = mean(values[order], weight[order])
    np.testing.assert_allclose(shuffled, mean(values, weight), rtol=1e-5, atol=1e-4)


@FEW
@given(hnp.arrays(np.float32, (D,), elements=numbers), weights)
def test_the_mean_of_equal_values_is_that_value(value: Any, weight: Any) -> None:
    np.testing.assert_allclose(mean(np.tile(value, (N, 1)), weight), value, rtol=1e-5, atol=1e-6)


@FEW
@given(rows)
def test_complete_links_are_the_mean_at_every_client(values: Any) -> None:
    np.testing.assert_allclose(push(values, Complete()), np.tile(mean(values), (N, 1)), rtol=1e-5, atol=1e-4)


@FEW
@given(rows, st.lists(st.tuples(st.permutations(range(N)), st.floats(0.1, 1)), min_size=1, max_size=4))
def test_doubly_stochastic_links_preserve_the_sum(values: Any, mixture: Any) -> None:
    total = sum(share for _, share in mixture)
    matrix = sum(share / total * np.eye(N)[order] for order, share in mixture)
    np.testing.assert_allclose(push(values, Given(matrix)).sum(0), values.sum(0), rtol=1e-4, atol=1e-3)


@FEW
@given(rows)
def test_the_dense_codec_is_the_identity(values: Any) -> None:
    tree = {"a": values, "b": (values[0], 3)}
    message = Dense().decode(Dense().encode(tree))
    assert message["b"][1] == 3
    np.testing.assert_array_equal(message["a"], values)
    np.testing.assert_array_equal(mean(values, codec=Dense()), mean(values))
