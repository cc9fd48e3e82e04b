"""Laws of partitions, splits and label noise: nothing lost, nothing twice, the same with the same seed."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from fedbilevel.data.partition import ClassesPerClient, Iid, Natural, Shards, groups
from fedbilevel.data.random_shares import Dirichlet, Pachinko, QuantitySkew
from fedbilevel.data.split import LabelNoise, LongTail, Split

FEW = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**32 - 1)
clients = st.integers(1, 6)
concentrations = st.floats(1e-4, 1e4)


@st.composite
def tables(draw: Any, classes: int = 5, least: int = 12) -> dict[str, Any]:
    """Samples of up to so many classes, some perhaps absent; superclasses of two; owners."""
    total = draw(st.integers(least, 60))
    rng = np.random.default_rng(draw(seeds))
    labels = rng.integers(0, classes, total)
    return {"labels": labels, "coarse": labels // 2, "owner": rng.integers(0, 7, total)}


def parts_of(partition: Any, samples: Any, seed: int) -> list[Any]:
    return partition(samples, np.random.default_rng(seed))


def check_law(parts: list[Any], total: int, complete: bool = True) -> None:
    """Row numbers in range, each client's ascending, none empty, none twice and (if complete) none lost."""
    together = np.concatenate(parts)
    assert together.dtype == np.int64
    assert together.min() >= 0
    assert together.max() < total
    assert all(len(part) and np.all(np.diff(part) > 0) for part in parts)
    assert len(np.unique(together)) == len(together), "a row was given twice"
    assert not complete or len(together) == total, "a row was lost"


PARTITIONS = {
    "iid": st.builds(Iid, clients),
    "shards": st.builds(Shards, clients, st.integers(1, 2)),
    "dirichlet": st.builds(Dirichlet, clients, concentrations, st.integers(1, 2)),
    "quantity": st.builds(QuantitySkew, clients, concentrations, st.integers(1, 2)),
    "pachinko": st.builds(Pachinko, clients, concentrations, concentrations),
}


@pytest.mark.parametrize("name", PARTITIONS)
@FEW
@given(data=st.data(), samples=tables(), seed=seeds)
def test_nothing_is_lost_and_nothing_given_twice(name: str, data: Any, samples: Any, seed: int) -> None:
    partition = data.draw(PARTITIONS[name])
    parts = parts_of(partition, samples, seed)
    assert len(parts) == partition.clients
    check_law(parts, len(samples["labels"]))
    again = parts_of(partition, samples, seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize(
    "partition",
    [Iid(4), Shards(4), ClassesPerClient(4), Dirichlet(4, 0.5), QuantitySkew(4, 1.0), Pachinko(4)],
    ids=lambda partition: type(partition).__name__,
)
def test_another_seed_gives_another_partition(partition: Any) -> None:
    labels = np.repeat(np.arange(8), 50)
    samples = {"labels": labels, "coarse": labels // 2}
    found = {tuple(map(tuple, parts_of(partition, samples, seed))) for seed in range(5)}
    assert len(found) == 5


@pytest.mark.parametrize(
    "broken",
    [
        [np.array([0, 1]), np.array([1, 2, 3])],
        [np.array([0, 1]), np.array([3])],
        [np.array([0, 1, 2, 3]), np.zeros(0, np.int64)],
        [np.array([0, 1]), np.array([2, 4])],
        [np.array([0, -1]), np.array([2, 3])],
        [np.array([1, 0]), np.array([2, 3])],
    ],
    ids=["twice", "lost", "empty", "beyond", "negative", "unordered"],
)
def test_the_law_notices_a_broken_partition(broken: Any) -> None:
    with pytest.raises(AssertionError):
        check_law(broken, 4)


# ------------------------------------------------------------------- special laws


@FEW
@given(tables(), clients, seeds)
def test_iid_and_pachinko_clients_are_of_one_size(samples: Any, n: int, seed: int) -> None:
    for partition in (Iid(n), Pachinko(n)):
        sizes = [len(part) for part in parts_of(partition, samples, seed)]
        assert max(sizes) - min(sizes) <= 1


@FEW
@given(tables(), clients, st.integers(1, 2), seeds)
def test_a_shard_is_a_run_of_the_sorted_labels(samples: Any, n: int, each: int, seed: int) -> None:
    order = np.argsort(samples["labels"], kind="stable")
    place = np.argsort(order)
    for part in parts_of(Shards(n, each), samples, seed):
        runs = 1 + np.count_nonzero(np.diff(np.sort(place[part])) > 1)
        assert runs <= each


@FEW
@given(seeds, st.integers(2, 8), st.integers(1, 8), st.integers(1, 4))
def test_every_client_has_so_many_classes_spread_evenly(seed: int, classes: int, n: int, each: int) -> None:
    each = min(max(each, -(-classes // n)), classes)
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), 11))
    parts = parts_of(ClassesPerClient(n, each), {"labels": labels}, seed)
    check_law(parts, len(labels))
    counts = np.stack([np.bincount(labels[part], minlength=classes) for part in parts])
    assert np.all((counts > 0).sum(axis=1) == each)
    holders = (counts > 0).sum(axis=0)
    assert holders.max() - holders.min() <= 1
    for column in counts.T:
        assert column[column > 0].max() - column[column > 0].min() <= 1


@FEW
@given(tables(), clients, concentrations, st.integers(1, 2), seeds)
def test_every_client_has_at_least_so_many(
    samples: Any, n: int, concentration: float, least: int, seed: int
) -> None:
    for partition in (Dirichlet(n, concentration, least), QuantitySkew(n, concentration, least)):
        assert min(len(part) for part in parts_of(partition, samples, seed)) >= least


@FEW
@given(tables(), st.integers(1, 3), st.integers(1, 3), seeds)
def test_natural_clients_are_the_largest_owners(samples: Any, n: int, least: int, seed: int) -> None:
    owner = samples["owner"]
    owned = [len(rows) for rows in groups(owner) if len(rows) >= least]
    assume(len(owned) >= n)
    parts = parts_of(Natural(n, least), samples, seed)
    check_law(parts, len(owner), complete=False)
    owners = [set(owner[part].tolist()) for part in parts]
    assert all(len(one) == 1 for one in owners)
    assert sorted(map(min, owners)) == list(map(min, owners))
    assert sorted(map(len, parts)) == sorted(owned)[-n:]
    check_law(parts_of(Natural(), samples, seed), len(owner))


# ------------------------------------------------- long tails, splits, label noise


@FEW
@given(tables(), st.floats(0.01, 1), st.booleans(), seeds)
def test_a_long_tail_keeps_the_largest_class_and_all_get_rarer(
    samples: Any, factor: float, shuffle: bool, seed: int
) -> None:
    tail = LongTail(factor, shuffle=shuffle)
    kept = tail(samples, np.random.default_rng(seed))
    check_law([kept], len(samples["labels"]), complete=False)
    available = [len(rows) for rows in groups(samples["labels"])]
    assert [len(rows) for rows in groups(samples["labels"][kept])] == tail.sizes(available)
    wanted = LongTail(factor, most=max(available)).sizes([max(available)] * len(available))
    assert wanted == sorted(wanted, reverse=True)
    assert wanted[0] == max(available)


@FEW
@given(st.integers(3, 50), st.floats(0, 0.49), st.floats(0, 0.49), st.booleans(), seeds)
def test_a_split_loses_nothing(total: int, validation: float, test: float, shuffle: bool, seed: int) -> None:
    rows = np.arange(total, dtype=np.int64) * 3
    parts = Split(validation, test, shuffle)(rows, np.random.default_rng(seed))
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), rows)
    for part, share in zip(parts, (1 - validation - test, validation, test), strict=True):
        assert bool(len(part)) == (share > 0)
        assert abs(len(part) - share * total) <= 2
        assert np.all(np.diff(part) > 0)
    if not shuffle:
        np.testing.assert_array_equal(np.concatenate(parts), rows)


@FEW
@given(tables(), clients, st.floats(0, 1), st.floats(0, 1), seeds)
def test_exactly_so_many_labels_are_wrong(samples: Any, n: int, rate: float, until: float, seed: int) -> None:
    labels, owned = samples["labels"], parts_of(Iid(n), samples, seed)
    noise = LabelNoise(rate, until)
    noisy, corrupted = noise(labels, owned, 5, np.random.default_rng(seed))
    np.testing.assert_array_equal(noisy != labels, corrupted)
    assert noisy.min() >= 0
    assert noisy.max() < 5
    for rows, expected in zip(owned, noise.rates(n), strict=True):
        assert corrupted[rows].sum() == round(expected * len(rows))
