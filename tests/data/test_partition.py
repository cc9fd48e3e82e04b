"""Partitions: the cases of the papers, their statistics, and what is refused."""

from typing import Any

import numpy as np
import pytest

from fedbilevel.data import DataError
from fedbilevel.data.partition import ClassesPerClient, Iid, Natural, Shards, at_least_one
from fedbilevel.data.random_shares import Dirichlet, Pachinko, QuantitySkew, _positive


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def label_counts(parts: Any, labels: Any) -> Any:
    return np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


def unevenness(parts: Any, labels: Any) -> float:
    """Mean total variation distance of the clients' labels from all labels."""
    counts = label_counts(parts, labels)
    shares = counts / counts.sum(axis=1, keepdims=True)
    return float(np.abs(shares - np.bincount(labels) / len(labels)).sum(axis=1).mean() / 2)


DIGITS = rng(7).integers(0, 10, 60_000)
FINE = rng(8).permutation(np.repeat(np.arange(100), 50))
TREE = {"labels": FINE, "coarse": FINE // 5}


# ------------------------------------------------------------------ the papers' cases


def test_shards_of_fedavg() -> None:
    """60,000 samples, 100 clients, 200 shards of 300: most clients see two classes."""
    parts = Shards(100)({"labels": DIGITS}, rng())
    assert {len(part) for part in parts} == {600}
    classes = (label_counts(parts, DIGITS) > 0).sum(axis=1)
    assert classes.max() <= 4
    assert np.median(classes) == 2


def test_equal_labels_keep_their_order_in_shards() -> None:
    parts = Shards(3, each=1)({"labels": np.array([1, 0, 1, 0, 0, 1])}, rng())
    assert sorted(part.tolist() for part in parts) == [[0, 4], [1, 3], [2, 5]]


def test_classes_are_not_always_paired_alike() -> None:
    parts = ClassesPerClient(100, 2)({"labels": DIGITS}, rng())
    pairs = {tuple(np.flatnonzero(row)) for row in label_counts(parts, DIGITS)}
    assert len(pairs) > 20


def test_a_class_too_small_for_all_its_clients_goes_to_some() -> None:
    labels = np.repeat([0, 1], [20, 2])
    parts = ClassesPerClient(4, 2)({"labels": labels}, rng())
    np.testing.assert_array_equal(np.sort(label_counts(parts, labels)[:, 1]), [0, 0, 1, 1])
    assert [np.sum(labels[part] == 0) for part in parts] == [5, 5, 5, 5]


def test_the_shares_of_a_class_have_the_moments_of_a_dirichlet() -> None:
    """Share of one of n clients: mean 1/n, variance (n−1)/(n²(nα+1))."""
    n, alpha = 5, 0.7
    labels = np.repeat(np.arange(400), 500)
    shares = label_counts(Dirichlet(n, alpha)({"labels": labels}, rng()), labels) / 500
    np.testing.assert_allclose(shares.mean(axis=1), 1 / n, atol=0.03)
    expected = (n - 1) / (n**2 * (n * alpha + 1))
    np.testing.assert_allclose(shares.var(axis=1), expected, rtol=0.25)


def test_concentration_goes_from_one_client_a_class_to_all_alike() -> None:
    spread = [unevenness(Dirichlet(10, a)({"labels": DIGITS}, rng()), DIGITS) for a in (0.01, 0.5, 1e4)]
    assert spread[0] > 0.7 > spread[1] > 0.2
    assert spread[2] < 0.02


def test_at_least_is_kept_where_a_draw_would_leave_most_clients_empty() -> None:
    parts = Dirichlet(100, 1e-3, at_least=20)({"labels": DIGITS}, rng())
    sizes = np.array([len(part) for part in parts])
    assert sizes.min() == 20
    assert sizes.sum() == len(DIGITS)


def test_samples_just_suffice_for_at_least() -> None:
    for partition in (Dirichlet(4, 0.01, at_least=3), QuantitySkew(4, 0.01, at_least=3)):
        assert [len(part) for part in partition({"labels": np.arange(12) % 2}, rng())] == [3, 3, 3, 3]


def test_quantity_skew_is_of_sizes_not_of_labels() -> None:
    parts = QuantitySkew(10, 0.5)({"labels": DIGITS}, rng(1))
    sizes = np.array([len(part) for part in parts])
    assert sizes.max() > 5 * np.median(sizes)
    large = [part for part in parts if len(part) > 1000]
    assert len(large) > 2
    assert unevenness(large, DIGITS) < 0.05


# -------------------------------------------------------------------------- pachinko


def test_pachinko_clients_have_few_superclasses_and_many_classes_within() -> None:
    counts = label_counts(Pachinko(50, 0.1, 10.0)(TREE, rng()), FINE)[:20]
    superclasses = counts.reshape(20, 20, 5).sum(axis=2)
    assert np.median(superclasses.max(axis=1)) > 30, "of 100 samples"
    main = counts.reshape(20, 20, 5)[np.arange(20), superclasses.argmax(axis=1)]
    assert np.median((main > 0).sum(axis=1)) == 5


def test_pachinko_with_small_fine_concentration_has_few_classes() -> None:
    many = label_counts(Pachinko(50, 0.1, 100.0)(TREE, rng()), FINE)[:20]
    few = label_counts(Pachinko(50, 0.1, 0.01)(TREE, rng()), FINE)[:20]
    assert np.mean((few > 0).sum(axis=1)) < 0.5 * np.mean((many > 0).sum(axis=1))


def test_pachinko_deals_like_drawing_one_by_one() -> None:
    """The first client's number of superclass 0, against a plain program of the reference's loop."""
    labels = np.repeat(np.arange(4), [2, 4, 6, 8])
    samples = {"labels": labels, "coarse": labels // 2}
    ours = [_firsts(Pachinko(2, 1.0, 1.0)(samples, rng(seed))[0], labels) for seed in range(1000)]
    plain = [_one_by_one(labels, 10, rng(10**6 + seed)) for seed in range(1000)]
    error = np.std(plain, axis=0) * np.sqrt(2 / 1000)
    assert np.all(np.abs(np.mean(ours, axis=0) - np.mean(plain, axis=0)) < 4 * error)
    # Without the superclasses, and with as many samples of every class, the means would be others.
    assert np.any(np.abs(np.mean(ours, axis=0) - 2.5) > 10 * error)


def _firsts(rows: Any, labels: Any) -> Any:
    return np.bincount(labels[rows], minlength=4)


def _one_by_one(labels: Any, size: int, rng: np.random.Generator) -> Any:
    left, taken = np.bincount(labels).reshape(2, 2), np.zeros((2, 2), int)
    coarse, fine = rng.dirichlet([1, 1]), rng.dirichlet([1, 1], 2)
    for _ in range(size):
        above = coarse * (left.sum(axis=1) > 0)
        first = rng.choice(2, p=above / above.sum())
        below = fine[first] * (left[first] > 0)
        second = rng.choice(2, p=below / below.sum())
        left[first, second] -= 1
        taken[first, second] += 1
    return taken.reshape(-1)


# --------------------------------------------------------------------------- natural


def test_natural_clients_are_the_largest_owners_in_order_of_their_numbers() -> None:
    samples = {"labels": np.zeros(9, int), "owner": np.array([5, 1, 5, 9, 1, 9, 5, 3, 9])}
    parts = Natural(clients=2)(samples, rng())
    assert [part.tolist() for part in parts] == [[0, 2, 6], [3, 5, 8]]
    parts = Natural(at_least=2)(samples, rng())
    assert [part.tolist() for part in parts] == [[1, 4], [0, 2, 6], [3, 5, 8]]
    assert len(Natural()(samples, rng())) == 4


def test_natural_clients_can_be_owners_at_random_with_enough_samples() -> None:
    owner = np.repeat(np.arange(30), np.arange(30) % 3 + 1)
    some, same, other = (
        [np.unique(owner[part]) for part in Natural(5, at_least=2, random=True)({"owner": owner}, rng(seed))]
        for seed in (1, 1, 2)
    )
    numbers = np.concatenate(some)
    assert numbers.tolist() == sorted(set(numbers.tolist())), "in the order of their numbers, each once"
    assert len(numbers) == 5
    assert np.all(numbers % 3 >= 1), "enough samples"
    assert numbers.tolist() == np.concatenate(same).tolist() != np.concatenate(other).tolist()
    draws = [Natural(5, 2, random=True)({"owner": owner}, rng(seed)) for seed in range(60)]
    drawn = {int(number) for parts in draws for part in parts for number in owner[part]}
    assert drawn == {number for number in range(30) if number % 3 >= 1}, "not the largest ones alone"


def test_of_equal_owners_those_with_lower_numbers_are_taken() -> None:
    parts = Natural(clients=2)({"owner": np.array([2, 1, 0])}, rng())
    assert [part.tolist() for part in parts] == [[2], [1]]


# --------------------------------------------------------------------------- refused

FOUR = {"labels": np.array([0, 1, 2, 3])}
REFUSED = {
    "no clients": (lambda: Iid(0), "Iid: clients is 0; it must be a whole number of at least 1"),
    "no shards": (lambda: Shards(2, each=0), "Shards: each is 0"),
    "at least none": (lambda: Dirichlet(2, 1.0, at_least=0), "Dirichlet: at_least is 0"),
    "no owners": (lambda: Natural(clients=0), "Natural: clients is 0"),
    "no concentration": (
        lambda: Dirichlet(2, 0.0),
        "Dirichlet: concentration is 0.0; it must be a positive, finite",
    ),
    "infinite": (lambda: QuantitySkew(2, np.inf), "concentration is inf"),
    "not a number": (lambda: Pachinko(2, 1.0, np.nan), "fine_concentration is nan"),
    "few samples": (
        lambda: Iid(5)(FOUR, rng()),
        r"Iid\(clients=5\) needs at least 5 samples; there are 4",
    ),
    "few for shards": (lambda: Shards(3)(FOUR, rng()), "needs at least 6 samples"),
    "few for at_least": (lambda: Dirichlet(2, 1.0, 3)(FOUR, rng()), "needs at least 6 samples"),
    "few for skew": (lambda: QuantitySkew(2, 1.0, 3)(FOUR, rng()), "needs at least 6 samples"),
    "few for pachinko": (lambda: Pachinko(5)(FOUR, rng()), "needs at least 5 samples"),
    "no columns": (lambda: Iid(1)({}, rng()), "there are 0"),
    "no labels": (
        lambda: Shards(1)({"inputs": np.zeros(4)}, rng()),
        r"Shards\(.*\) needs the column 'labels'; the samples have \['inputs'\]",
    ),
    "no superclasses": (lambda: Pachinko(2)(FOUR, rng()), "needs the column 'coarse'.*have .'labels'"),
    "no owner column": (lambda: Natural()(FOUR, rng()), "needs the column 'owner'"),
    "many labels a sample": (
        lambda: Dirichlet(2, 1.0)({"labels": np.zeros((4, 2))}, rng()),
        r"one value a sample in the column 'labels'; its shape is \(4, 2\)",
    ),
    "more classes than there are": (
        lambda: ClassesPerClient(2, 5)(FOUR, rng()),
        "cannot deal out 4 classes: give `each` of at most 4",
    ),
    "classes lost": (
        lambda: ClassesPerClient(3, 1)(FOUR, rng()),
        "3 clients together take at most 3, so that the others would be lost",
    ),
    "nothing left for a client": (
        lambda: ClassesPerClient(9, 1)(FOUR, rng()),
        r"leaves the clients \[.*\] without samples; ask for fewer",
    ),
    "too few owners": (
        lambda: Natural(clients=2, at_least=2)({"owner": np.array([0, 0, 1])}, rng()),
        "finds 1 owners with at least 2 samples; it needs 2",
    ),
    "no owner is large enough": (
        lambda: Natural(at_least=2)({"owner": np.array([0, 1])}, rng()),
        "finds 0 owners with at least 2 samples; it needs 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_dealt_out_is_refused_with_a_reason(case: str) -> None:
    build, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        build()


@pytest.mark.parametrize("value", ["10", 2.0, True, None])
def test_a_setting_of_the_wrong_kind_is_refused(value: Any) -> None:
    """Here annotations are checked before; a user's program has only these checks."""

    class Settings:
        clients = value
        concentration = "high"

    with pytest.raises(DataError, match=r"Settings: clients is .*whole number"):
        at_least_one(Settings(), "clients")
    with pytest.raises(DataError, match="concentration is 'high'"):
        _positive(Settings(), "concentration")


def test_whole_numbers_are_welcome_as_concentrations() -> None:
    assert len(Dirichlet(2, 1)({"labels": np.zeros(4, int)}, rng())) == 2
