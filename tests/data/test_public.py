"""Public samples: drawn from the training samples, and taken away from them."""

import numpy as np
import pytest

from fedbilevel.data import DataError, Dataset, set_aside

INPUTS = np.arange(20.0).reshape(10, 2)
COLUMNS = {"inputs": INPUTS, "labels": np.arange(10) % 2, "owner": np.arange(10)}
WHOLE = Dataset("mine", COLUMNS, COLUMNS, ("even", "odd"))


def test_public_samples_and_the_rest_are_all_and_rows_stay_together() -> None:
    rest, public = set_aside(WHOLE, 3, seed=4)
    assert sorted([*rest.train["inputs"][:, 0], *public[:, 0]]) == INPUTS[:, 0].tolist()
    assert rest.train["inputs"].tolist() == INPUTS[rest.train["owner"]].tolist()
    assert rest.train["labels"].tolist() == (rest.train["owner"] % 2).tolist()
    assert rest.train["owner"].tolist() == sorted(rest.train["owner"]), "in their order"
    assert rest.test is COLUMNS


def test_the_seed_draws_them() -> None:
    first, same, other = (set_aside(WHOLE, 3, seed)[1] for seed in (4, 4, 5))
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("samples", [0, 10, True])
def test_some_must_be_left(samples: int) -> None:
    with pytest.raises(DataError, match="public samples are asked for, of 10 training samples"):
        set_aside(WHOLE, samples)
