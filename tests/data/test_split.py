"""Long tails, splits and label noise: the papers' numbers, exact counts, and what is refused."""

import numpy as np
import pytest

from fedbilevel.data import DataError
from fedbilevel.data.split import LabelNoise, LongTail, Split

MNIST = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# ------------------------------------------------------------------------ long tails


def test_the_long_tail_of_mnist() -> None:
    """FedNest: class 0 has 6,000 samples (as far as there are), class 1 has 3,597, class 9 only 60."""
    tail = LongTail(factor=0.01, most=6000)
    assert tail.sizes([6000] * 10) == [6000, 3597, 2157, 1293, 775, 465, 279, 167, 101, 60]
    assert tail.sizes(MNIST)[:2] == [5923, 3597]


def test_a_whole_number_is_not_rounded_up() -> None:
    for factor in np.arange(1, 100) / 100:
        assert LongTail(float(factor), most=100).sizes([100, 100])[1] == round(100 * factor)


def test_the_largest_class_is_the_measure_and_no_class_vanishes() -> None:
    assert LongTail(0.01).sizes([8, 20, 20]) == [8, 2, 1]
    assert LongTail(1).sizes([8, 20, 20]) == [8, 20, 20]
    assert LongTail(0.5).sizes([7]) == [7]


def test_classes_that_do_not_occur_are_not_counted() -> None:
    kept = LongTail(0.25)({"labels": np.array([9] * 4 + [2] * 4)}, rng())
    assert kept.tolist() == [0, 4, 5, 6, 7]


def test_a_class_keeps_its_first_samples_or_random_ones() -> None:
    labels = np.arange(200) % 2
    first = LongTail(0.1)({"labels": labels}, rng())
    assert first[labels[first] == 1].tolist() == list(range(1, 21, 2))
    shuffled = LongTail(0.1, shuffle=True)({"labels": labels}, rng())
    assert len(shuffled) == len(first) == 110
    assert shuffled[labels[shuffled] == 1].max() > 21
    assert np.all(np.diff(shuffled) > 0)


# ---------------------------------------------------------------------------- splits


def test_a_split_in_order_has_training_samples_first_and_test_samples_last() -> None:
    train, validation, test = Split(0.2, 0.3, shuffle=False)(np.arange(10, 20), rng())
    assert train.tolist() == [10, 11, 12, 13, 14]
    assert validation.tolist() == [15, 16]
    assert test.tolist() == [17, 18, 19]


def test_a_gap_keeps_the_parts_of_an_ordered_split_apart() -> None:
    parts = Split(0.25, 0.25, shuffle=False, gap=3)(np.arange(10, 32), rng())
    assert [part.tolist() for part in parts] == [[*range(10, 18)], [*range(21, 25)], [*range(28, 32)]]
    train, validation, test = Split(0.0, 0.5, shuffle=False, gap=2)(np.arange(10), rng())
    assert (train.tolist(), validation.tolist(), test.tolist()) == ([0, 1, 2, 3], [], [6, 7, 8, 9])
    windows = np.lib.stride_tricks.sliding_window_view(np.arange(2000), 81)[::10]
    ends = [windows[part] for part in Split(0.2, 0.2, shuffle=False, gap=8)(np.arange(len(windows)), rng())]
    seen = [set(part.ravel().tolist()) for part in ends]
    assert sum(map(len, seen)) == len(set.union(*seen)), "no character belongs to two parts"
    with pytest.raises(DataError, match="only parts in order"):
        Split(0.2, gap=1)
    with pytest.raises(DataError, match="8 samples cannot be split into 3 parts"):
        Split(0.2, 0.2, shuffle=False, gap=3)(np.arange(8), rng())


def test_a_random_split_depends_on_the_seed_only() -> None:
    one, same, other = (Split(0.5)(np.arange(40), rng(seed)) for seed in (1, 1, 2))
    assert one[0].tolist() == same[0].tolist() != other[0].tolist()
    assert [len(part) for part in one] == [20, 20, 0]


@pytest.mark.parametrize(
    ("split", "total", "sizes"),
    [
        (Split(0.2), 600, [480, 120, 0]),
        (Split(0.2), 2, [1, 1, 0]),
        (Split(0.01, 0.01), 5, [3, 1, 1]),
        (Split(0.9, 0.05), 3, [1, 1, 1]),
        (Split(0.0, 0.25), 8, [6, 0, 2]),
        (Split(0.0), 1, [1, 0, 0]),
    ],
    ids=str,
)
def test_every_part_that_is_asked_for_gets_a_sample(split: Split, total: int, sizes: list[int]) -> None:
    assert [len(part) for part in split(np.arange(total), rng())] == sizes


# ----------------------------------------------------------------------- label noise

HALVES = [np.arange(0, 500), np.arange(500, 1000)]
LABELS = np.arange(1000, dtype=np.int32) % 4


def test_wrong_labels_are_other_classes_uniformly() -> None:
    labels = np.full(30_000, 2, np.int32)
    noisy, corrupted = LabelNoise(0.9)(labels, [np.arange(30_000)], 4, rng())
    assert noisy.dtype == np.int32
    assert corrupted.sum() == 27_000
    np.testing.assert_allclose(np.bincount(noisy[corrupted], minlength=4), [9000, 9000, 0, 9000], atol=400)
    assert np.all(labels == 2), "the given labels are not touched"


def test_rates_of_clients_are_one_for_all_one_for_each_or_spread_in_equal_steps() -> None:
    assert LabelNoise(0.4).rates(3).tolist() == [0.4, 0.4, 0.4]
    assert LabelNoise((0.1, 0.9)).rates(2).tolist() == [0.1, 0.9]
    np.testing.assert_allclose(LabelNoise(0.0, until=0.8).rates(5), [0, 0.2, 0.4, 0.6, 0.8])
    assert LabelNoise(0.3, until=0.8).rates(1).tolist() == [0.3]
    _, corrupted = LabelNoise((0.1, 0.9))(LABELS, HALVES, 4, rng())
    assert [corrupted[rows].sum() for rows in HALVES] == [50, 450]


def test_rows_of_nobody_stay_right() -> None:
    _, corrupted = LabelNoise(1.0)(LABELS, HALVES[1:], 4, rng())
    assert not corrupted[:500].any()
    assert corrupted[500:].all()


def test_the_wrong_labels_of_a_client_do_not_depend_on_the_other_rates() -> None:
    one, _ = LabelNoise((0.0, 0.5))(LABELS, HALVES, 4, rng())
    other, _ = LabelNoise((0.7, 0.5))(LABELS, HALVES, 4, rng())
    np.testing.assert_array_equal(one[500:], other[500:])
    assert np.any(one[:500] != other[:500])


# --------------------------------------------------------------------------- refused

REFUSED = {
    "factor 0": (lambda: LongTail(0.0), "factor is 0.0; it must be above 0 and at most 1"),
    "factor above 1": (lambda: LongTail(100), "factor is 100"),
    "factor nan": (lambda: LongTail(np.nan), "factor is nan"),
    "most 0": (lambda: LongTail(most=0), "most is 0"),
    "tail without labels": (lambda: LongTail()({"inputs": np.zeros(3)}, rng()), "needs the column 'labels'"),
    "tail of nothing": (lambda: LongTail()({"labels": np.zeros(0, int)}, rng()), "needs samples"),
    "all for validation": (lambda: Split(0.5, 0.5), "together below 1, so that samples remain for training"),
    "negative share": (lambda: Split(-0.1), "shares from 0 on"),
    "nan share": (lambda: Split(test=np.nan), "shares from 0 on"),
    "too few to split": (
        lambda: Split(0.2, 0.1)(np.arange(2), rng()),
        r"2 samples cannot be split into 3 parts by Split\(.*at_least",
    ),
    "nothing to split": (lambda: Split(0.0)(np.arange(0), rng()), "0 samples cannot be split into 1 parts"),
    "rate above 1": (lambda: LabelNoise(1.5), r"LabelNoise\(rate=1.5.*between 0 and 1"),
    "one rate above 1": (lambda: LabelNoise((0.1, 2.0)), "between 0 and 1"),
    "until below 0": (lambda: LabelNoise(0.1, until=-1.0), "between 0 and 1"),
    "rates and until": (lambda: LabelNoise((0.1, 0.2), until=0.5), "not both"),
    "rates of others": (
        lambda: LabelNoise((0.1, 0.2, 0.3))(LABELS, HALVES, 4, rng()),
        "3 rates for 2 clients; give one for each",
    ),
    "one class": (lambda: LabelNoise(0.1)(LABELS * 0, HALVES, 1, rng()), "at least two classes"),
    "labels beyond": (
        lambda: LabelNoise(0.1)(LABELS, HALVES, 3, rng()),
        r"labels from 0 to 2; they lie in 0\.\.3",
    ),
    "real labels": (
        lambda: LabelNoise(0.1)(LABELS / 2, HALVES, 4, rng()),
        "whole numbers, one a sample; they have the type float64",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused_with_a_reason(case: str) -> None:
    build, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        build()
