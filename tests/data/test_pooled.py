"""All samples with one client: what it sees, and when that is the same problem."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel import Clients
from fedbilevel.data import DataError

KEY = jr.key(0)


def test_one_client_has_the_samples_of_all_at_every_level() -> None:
    levels = [
        [np.arange(3.0), np.arange(3.0, 6)],
        [np.arange(2.0), np.arange(7.0, 9)],
        [np.ones(1), np.ones(5)],
    ]
    clients = Clients(levels[0], levels[1], test=levels[2], batch_size=2)
    pooled = clients.pooled()
    assert pooled.n == 1
    assert pooled.whole().lower.batch(0, KEY).samples.tolist() == [0, 1, 2, 3, 4, 5]
    assert pooled.whole().upper.batch(0, KEY).samples.tolist() == [0, 1, 7, 8]
    assert pooled.test.batch(0, KEY).samples.tolist() == [1] * 6
    assert pooled.lower.width == 2
    assert pooled.weights is None


def test_minibatches_come_from_everybody() -> None:
    pooled = Clients(np.arange(6.0).reshape(3, 2), batch_size=2).pooled()
    drawn = jax.vmap(lambda key: pooled.lower.batch(0, key).samples)(jr.split(KEY, 100))
    assert set(np.asarray(drawn).ravel().tolist()) == set(range(6))


def test_rows_of_a_shared_copy_stay_what_they_are() -> None:
    pool = jnp.arange(10.0)
    pooled = Clients.indexed(pool, [[9, 1], [3, 2]], [[0], [5]]).pooled()
    assert pooled.lower.flat is pooled.upper.flat is pool
    assert pooled.lower.batch(0, KEY).samples.tolist() == [9, 1, 3, 2]
    assert pooled.upper.batch(0, KEY).samples.tolist() == [0, 5]


def test_weights_by_size_are_what_pooled_data_have() -> None:
    lower, upper = [np.ones(2), np.ones(6)], [np.ones(1), np.ones(3)]
    assert Clients(lower, upper, weights="size").pooled().lower.size.tolist() == [8]
    assert Clients(lower, upper, weights=[3, 9]).pooled().upper.size.tolist() == [4]


REFUSED = {
    "unequal sizes": (
        Clients([np.ones(2), np.ones(6)]),
        "client 0 has 0.25 of the lower-level .* 0.5 of the",
    ),
    "weights": (Clients(np.ones((2, 3)), weights=[1, 3]), "client 0 has 0.5 .* 0.25 of the weight"),
    "another split": (
        Clients([np.ones(2), np.ones(6)], np.ones((2, 3)), weights="size"),
        "upper-level samples and 0.25 of the weight",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_problem_is_refused(case: str) -> None:
    clients, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        clients.pooled()
