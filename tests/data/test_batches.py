"""Minibatches: whose samples they hold, how they are weighed, and what a pass visits."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel import Clients
from fedbilevel.data import Batch
from fedbilevel.data.batches import weighted

SIZES = (1, 2, 5)
KEY = jr.key(0)


def own(client: int) -> Any:
    """The samples of a client: 100 times its number, and up."""
    return 100.0 * client + np.arange(SIZES[client], dtype=np.float32)


def samples(batch_size: int | None) -> Any:
    return Clients(lower=[own(client) for client in range(3)], batch_size=batch_size).lower


def loss(y: Any, values: Any) -> Any:
    return jnp.mean((values - y) ** 2)


@eqx.filter_jit
def log_of_pass(data: Any, client: Any, key: Any) -> Any:
    """Samples (NaN where padded), shares and counts of the batches of a pass, and how many there were."""
    log = jnp.full((5, data.width), jnp.nan), jnp.zeros(5), jnp.zeros(5), jnp.zeros((), int)

    def note(batch: Batch, carry: Any) -> Any:
        seen, shares, counts, index = carry
        weight = 1.0 if batch.weight is None else jnp.where(batch.weight > 0, 1.0, jnp.nan)
        seen = seen.at[index].set(batch.samples * weight)
        return seen, shares.at[index].set(batch.share), counts.at[index].set(batch.count), index + 1

    return data.one_pass(client, key, note, log)


def visits(data: Any, client: int, key: Any) -> tuple[Any, Any, Any]:
    *logs, length = log_of_pass(data, jnp.asarray(client), key)
    seen, shares, counts = (np.asarray(log)[:length] for log in logs)
    return seen, shares, counts


# ------------------------------------------------------------------ minibatches


def test_a_batch_holds_only_own_samples() -> None:
    data = samples(2)
    for client in range(3):
        drawn = {value for seed in range(20) for value in data.batch(client, jr.key(seed)).samples.tolist()}
        assert drawn == set(own(client).tolist())


def test_a_client_no_larger_than_the_batch_uses_all_its_samples_once() -> None:
    data = samples(2)
    for client, expected in ((0, [0.0]), (1, [100.0, 101.0])):
        batch = data.batch(client, KEY)
        assert int(batch.count) == len(expected)
        np.testing.assert_allclose(
            batch.weight, [1 / len(expected)] * len(expected) + [0] * (2 - len(expected))
        )
        assert batch.samples[: len(expected)].tolist() == expected


def test_a_larger_client_draws_with_replacement_and_equal_weights() -> None:
    data = samples(2)
    batches = [data.batch(2, jr.key(seed)) for seed in range(40)]
    assert any(batch.samples[0] == batch.samples[1] for batch in batches)
    assert all(int(batch.count) == 2 and batch.weight.tolist() == [0.5, 0.5] for batch in batches)
    counts = np.unique([batch.samples for batch in batches], return_counts=True)[1]
    assert counts.min() > 5, "80 draws of five samples"


def test_a_full_batch_is_the_exact_mean_of_unequal_clients_and_so_is_its_gradient() -> None:
    data = samples(None)
    for client in range(3):
        batch = data.batch(client, KEY)
        value, slope = jax.value_and_grad(weighted(loss))(jnp.asarray(1.5), batch)
        np.testing.assert_allclose(value, np.mean((own(client) - 1.5) ** 2), rtol=1e-6)
        np.testing.assert_allclose(slope, -2 * np.mean(own(client) - 1.5), rtol=1e-6)
        assert int(batch.count) == SIZES[client]


def test_a_batch_size_above_every_size_is_a_full_batch() -> None:
    data = samples(99)
    assert data.width == 5
    batch = data.batch(1, KEY)
    np.testing.assert_allclose(weighted(loss)(0.0, batch), np.mean(own(1) ** 2), rtol=1e-6)


@pytest.mark.parametrize("batch_size", [None, 2, 4])
def test_equal_sizes_need_no_weights(batch_size: int | None) -> None:
    data = Clients(lower=jnp.arange(12.0).reshape(3, 4), batch_size=batch_size).lower
    batch = data.batch(1, KEY)
    assert batch.weight is None
    assert batch.count == data.width == (batch_size or 4)


def test_without_weights_the_function_sees_all_samples_at_once() -> None:
    shapes = []

    def note(y: Any, values: Any) -> Any:
        shapes.append(values.shape)
        return loss(y, values)

    weighted(note)(0.0, Batch(jnp.ones(4)))
    assert shapes == [(4,)]


class SquareOfMean:
    """No mean over samples: it says itself what it is on weighted ones."""

    def __call__(self, y: Any, values: Any) -> Any:
        return jnp.mean(values - y) ** 2

    def on_weighted(self, y: Any, values: Any, weight: Any) -> Any:
        return (weight @ (values - y)) ** 2


def test_a_function_can_say_what_it_is_on_weighted_samples() -> None:
    data = samples(None)
    for client in range(3):
        batch = data.batch(client, KEY)
        gap = np.mean(own(client) - 1.5)
        value, slope = jax.value_and_grad(weighted(SquareOfMean()))(jnp.asarray(1.5), batch)
        np.testing.assert_allclose(value, gap**2, rtol=1e-6)
        np.testing.assert_allclose(slope, -2 * gap, rtol=1e-6)
    of_five = data.batch(2, KEY)
    silent = weighted(SquareOfMean().__call__)(jnp.asarray(1.5), of_five)
    assert abs(float(silent) - np.mean(own(2) - 1.5) ** 2) > 1, "sample by sample it is another number"


def test_without_weights_nothing_else_is_asked() -> None:
    assert float(weighted(SquareOfMean())(1.0, Batch(jnp.array([2.0, 4.0])))) == 4.0


# ------------------------------------------------------------------- one pass


@pytest.mark.parametrize("client", range(3))
def test_a_pass_visits_every_sample_once_in_a_random_order(client: int) -> None:
    data = samples(2)
    orders = set()
    for seed in range(4):
        seen, _, counts = visits(data, client, jr.key(seed))
        flat = seen[~np.isnan(seen)]
        np.testing.assert_array_equal(np.sort(flat), own(client))
        assert counts.sum() == SIZES[client]
        orders.add(tuple(flat))
    assert client < 2 or len(orders) > 1


def test_the_short_last_batch_counts_by_its_size() -> None:
    data = samples(2)
    assert [int(data.batches_in_pass(client)) for client in range(3)] == [1, 1, 3]
    np.testing.assert_allclose(visits(data, 2, KEY)[1], [1, 1, 0.5])
    np.testing.assert_allclose(visits(data, 1, KEY)[1], [1])
    np.testing.assert_allclose(visits(data, 0, KEY)[1], [1])


def test_equal_clients_with_a_short_last_batch() -> None:
    data = Clients(lower=jnp.arange(6.0).reshape(2, 3), batch_size=2).lower
    assert data.batches_in_pass(0) == 2, "static, since all clients agree"
    seen, shares, counts = visits(data, 1, KEY)
    np.testing.assert_array_equal(np.sort(seen[~np.isnan(seen)]), [3, 4, 5])
    np.testing.assert_allclose(shares, [1, 0.5])
    np.testing.assert_allclose(counts, [2, 1])


def test_a_pass_over_whole_batches_needs_no_weights() -> None:
    data = Clients(lower=jnp.arange(8.0).reshape(2, 4), batch_size=2).lower
    weights = []
    data.one_pass(0, KEY, lambda batch, carry: weights.append(batch.weight) or carry, 0)
    assert weights == [None]
    seen, shares, _ = visits(data, 0, KEY)
    np.testing.assert_array_equal(np.sort(seen.ravel()), np.arange(4))
    np.testing.assert_allclose(shares, [1, 1])


# --------------------------------------------------------------- one client only


@pytest.mark.parametrize("batch_size", [2, None])
def test_one_client_alone_draws_what_it_draws_in_the_federation(batch_size: int | None) -> None:
    clients = Clients(lower=[own(client) for client in range(3)], batch_size=batch_size)
    for client in range(3):
        alone = clients.only(client)
        assert alone.n == 1
        assert alone.lower.flat.tolist() == own(client).tolist(), "nobody else's data"
        for level in ("lower", "upper"):
            mine, all_of_us = getattr(alone, level), getattr(clients, level)
            expected, batch = all_of_us.batch(client, KEY), mine.batch(0, KEY)
            assert jax.tree.all(jax.tree.map(np.array_equal, batch, expected))
    if batch_size:
        together, apart = visits(clients.lower, 2, KEY), visits(clients.only(2).lower, 0, KEY)
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(together, apart, strict=True))
