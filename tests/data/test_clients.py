"""The clients' data: how they can be given, how they are stored, and what is refused."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel import Clients
from fedbilevel.data import DataError

KEY = jr.key(0)
LISTED = [{"a": np.full((size, 2), size, np.float32), "b": np.arange(size)} for size in (3, 1, 2)]


class Pair(NamedTuple):
    inputs: Any
    labels: Any


# ------------------------------------------------------------------ how given


def test_lists_of_unequal_sizes_are_stored_without_padding() -> None:
    clients = Clients(lower=LISTED)
    assert clients.n == 3
    assert clients.lower.flat["a"].shape == (6, 2)
    assert clients.lower.size.tolist() == [3, 1, 2]
    assert clients.lower.start.tolist() == [0, 3, 4]
    batch = clients.lower.batch(2, KEY)
    np.testing.assert_array_equal(batch.samples["a"][:2], np.full((2, 2), 2))


def test_the_upper_level_defaults_to_the_lower_and_may_differ() -> None:
    same = Clients(lower=LISTED)
    assert same.upper is same.lower
    other = Clients(lower=LISTED, upper=[np.ones(4), np.ones(2), np.ones(1)])
    assert other.upper.size.tolist() == [4, 2, 1]


@pytest.mark.parametrize("library", [np, jnp], ids=["numpy", "jax"])
def test_stacked_data_have_one_row_a_client(library: Any) -> None:
    rows = library.arange(12.0).reshape(3, 2, 2)
    clients = Clients(lower=Pair(rows, rows[..., 0]))
    assert clients.n == 3
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(clients.lower.flat))
    batch = clients.lower.batch(1, KEY)
    np.testing.assert_array_equal(batch.samples.inputs, rows[1])
    np.testing.assert_array_equal(batch.samples.labels, rows[1, :, 0])


def test_stacked_numpy_data_can_be_read_by_all_clients_at_once() -> None:
    data = Clients(lower=np.arange(6.0).reshape(3, 2)).lower
    batches = jax.vmap(lambda client: data.batch(client, KEY))(jnp.arange(3))
    np.testing.assert_array_equal(batches.samples, np.arange(6.0).reshape(3, 2))


def test_indexed_clients_share_one_copy() -> None:
    pool = jnp.arange(10.0)
    clients = Clients.indexed(pool, [[9, 1], [1, 2, 3]], [[0], [5, 4]])
    assert clients.lower.flat is clients.upper.flat is pool
    np.testing.assert_array_equal(clients.lower.batch(0, KEY).samples[:2], [9, 1])
    np.testing.assert_array_equal(clients.lower.batch(1, KEY).samples, [1, 2, 3])
    np.testing.assert_array_equal(clients.upper.batch(1, KEY).samples, [5, 4])
    alone = clients.only(1)
    assert alone.lower.flat.tolist() == [1, 2, 3]
    assert alone.upper.flat.tolist() == [5, 4]


def test_indexed_clients_have_one_level_of_data_by_default() -> None:
    clients = Clients.indexed(jnp.arange(4.0), [[3], [0]], batch_size=1)
    assert clients.upper.batch(0, KEY).samples.tolist() == [3]
    assert clients.upper.batch_size == 1


def test_whole_means_full_batches_and_keeps_the_weights() -> None:
    clients = Clients(lower=LISTED, batch_size=1, weights=[1, 2, 3])
    assert clients.whole().lower.width == 3
    assert clients.whole().weights.tolist() == [1, 2, 3]
    assert Clients(lower=LISTED, batch_size=1).whole().weights is None


def test_weights_are_uniform_by_size_or_given() -> None:
    assert Clients(lower=LISTED).weights is None
    np.testing.assert_allclose(Clients(lower=LISTED, weights="size").weights, [1.5, 0.5, 1.0])
    assert Clients(lower=LISTED, weights=[0, 1, 3]).weights.tolist() == [0, 1, 3]


def test_validation_data_are_for_metrics_alone_and_come_along_everywhere() -> None:
    pool = {"a": jnp.arange(10.0)}
    clients = Clients.indexed(pool, [[0, 1], [2, 3]], validation=[[9], [8, 7]], batch_size=1)
    assert clients.upper is clients.lower
    assert clients.test.rows is clients.lower.rows, "by default metrics see the upper level's, as without"
    assert clients.has_validation
    assert clients.validation.width == 2, "minibatches are for training"
    assert clients.validation.flat["a"] is clients.lower.flat["a"]
    for same in (clients, clients.whole(), clients.batched(2)):
        np.testing.assert_array_equal(same.validation.batch(1, KEY).samples["a"], [8, 7])
    assert clients.only(1).validation.flat["a"].tolist() == [8, 7]
    together = clients.pooled().validation.batch(0, KEY).samples
    np.testing.assert_array_equal(together["a"], [9, 8, 7])
    without = Clients(lower=LISTED, weights="size")
    for same in (without, without.only(0), without.whole(), without.pooled(), Clients.indexed(pool, [[1]])):
        assert not same.has_validation


# --------------------------------------------------------------------- refused

REFUSED = {
    "validation of others": (
        lambda: Clients(lower=LISTED, validation=LISTED[:2]),
        "3 clients with lower-level data and 2 with validation-level data",
    ),
    "other validation": (
        lambda: Clients(lower=LISTED, validation=[{"a": np.ones((1, 2))}] * 3),
        "validation samples have the structure .*same metrics read both",
    ),
    "empty list": (
        lambda: Clients(lower=[]),
        "list of lower-level data is empty; there must be at least one",
    ),
    "empty upper list": (lambda: Clients(lower=LISTED, upper=[]), "upper-level data is empty"),
    "other structures": (
        lambda: Clients(lower=[{"a": np.ones(2)}, {"b": np.ones(2)}]),
        "client 1's lower-level data have the structure .*must be alike",
    ),
    "other shapes": (
        lambda: Clients(lower=[np.ones((2, 3)), np.ones((2, 4))]),
        "lower-level samples differ in shape",
    ),
    "ragged leaves": (
        lambda: Clients(lower=[{"a": np.ones(2), "b": np.ones(3)}]),
        "client 0's lower-level data must share a leading axis of samples.*'2', '3'",
    ),
    "scalar leaf": (lambda: Clients(lower=[1.0, 2.0]), "must share a leading axis of samples"),
    "no samples": (
        lambda: Clients(lower=[np.ones((2, 1)), np.ones((0, 1))]),
        r"clients \[1\] have no lower-level samples; leave them out",
    ),
    "no stacked samples": (lambda: Clients(lower=np.ones((2, 0, 3))), r"clients \[0, 1\] have no"),
    "no stacked clients": (lambda: Clients(lower=np.ones((0, 2, 3))), "at least one client"),
    "ragged stack": (
        lambda: Clients(lower={"a": np.ones((2, 3)), "b": np.ones((2, 4))}),
        "one leading shape .*For clients of unequal size pass a list",
    ),
    "flat stack": (lambda: Clients(lower=np.ones(3)), "one leading shape"),
    "batch size 0": (
        lambda: Clients(lower=LISTED, batch_size=0),
        "batch_size is 0; it must be a whole number of at least 1",
    ),
    "batch size -1": (lambda: Clients(lower=LISTED, batch_size=-1), "batch_size is -1"),
    "levels": (
        lambda: Clients(lower=LISTED, upper=LISTED[:2]),
        "3 clients with lower-level data and 2 with upper-level data; every client needs both",
    ),
    "weights name": (
        lambda: Clients(lower=LISTED, weights="sizes"),
        'weights is "sizes"; it must be "uniform", "size" or a vector',
    ),
    "weights shape": (lambda: Clients(lower=LISTED, weights=[1, 2]), r"each of the 3 clients.*shape \(2,\)"),
    "negative weights": (lambda: Clients(lower=LISTED, weights=[1, 2, -1]), "finite non-negative"),
    "infinite weights": (lambda: Clients(lower=LISTED, weights=[1, 2, np.inf]), "finite non-negative"),
    "zero weights": (lambda: Clients(lower=LISTED, weights=[0, 0, 0]), "not all zero"),
    "indexed row": (
        lambda: Clients.indexed(jnp.ones(3), [[0], [3]]),
        r"row numbers must lie in 0\.\.2; found 0\.\.3",
    ),
    "indexed negative": (lambda: Clients.indexed(jnp.ones(3), [[0], [-1]]), r"found -1\.\.0"),
    "indexed nobody": (lambda: Clients.indexed(jnp.ones(3), []), "at least one client"),
    "indexed no samples": (lambda: Clients.indexed(jnp.ones(3), [[0], []]), r"clients \[1\] have no"),
    "indexed batch size": (lambda: Clients.indexed(jnp.ones(3), [[0]], batch_size=0), "batch_size is 0"),
    "indexed ragged data": (
        lambda: Clients.indexed({"a": jnp.ones(3), "b": jnp.ones(2)}, [[0], [2]]),
        "share a leading axis",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_data_that_do_not_fit_are_refused_with_a_reason(case: str) -> None:
    build, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        build()


def test_test_data_are_all_samples_whatever_the_batches() -> None:
    """Metrics of a client are of all of its samples; only training sees minibatches."""
    clients = Clients([np.arange(6.0), np.arange(9.0)], batch_size=2)
    for these in (clients, clients.whole(), clients.only(1)):
        assert these.test.batch_size is None
    own = clients.only(1)
    assert own.test.flat is own.upper.flat, "no second copy"
    assert own.test.batch(0, jax.random.key(0)).samples.tolist() == list(range(9))
    assert own.upper.batch_size == 2


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int32])
def test_shared_data_are_a_copy_of_what_was_given(dtype):
    """Wherever the given array begins in memory: JAX would share one that is aligned."""
    for begin in range(0, 64, 4):
        memory = np.zeros(1024, np.uint8)[begin : begin + 512]
        given = memory.view(dtype).reshape(-1, 4)
        clients = Clients.indexed(given, [[0, 1], [2]])
        given[...] = 1
        assert not np.any(clients.lower.flat)
