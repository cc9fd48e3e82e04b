"""From a data set to clients, and the statistics of what came out."""

import itertools
import pathlib
from typing import Any

import jax
import jax.random as jr
import matplotlib.image
import numpy as np
import pytest

from fedbilevel import Clients
from fedbilevel.data import DataError
from fedbilevel.data.dataset import Dataset
from fedbilevel.data.describe import Statistics, describe
from fedbilevel.data.federate import federate
from fedbilevel.data.partition import Iid, Natural, Shards
from fedbilevel.data.random_shares import Dirichlet
from fedbilevel.data.split import LabelNoise, LongTail, Split

TOTAL = 240
LABELS = np.arange(TOTAL, dtype=np.int64) * 7 % 4
# The input of a sample is its row number, so that it can be recognised wherever it ends up.
TRAIN = {"inputs": np.arange(TOTAL, dtype=np.float32)[:, None], "labels": LABELS}
MINE = Dataset("mine", TRAIN, {name: column[:5] for name, column in TRAIN.items()}, ("a", "b", "c", "d"))


def rows(level: Any) -> list[list[int]]:
    """The rows of the data set that each client has at a level."""
    flat = np.asarray(level.flat["inputs"])[:, 0].astype(int)
    parts = np.split(np.asarray(level.rows), np.asarray(level.start)[1:])
    return [flat[part].tolist() for part in parts]


def joined(parts: Any) -> list[int]:
    return sorted(itertools.chain(*parts))


# ------------------------------------------------------------------------------ stages


def test_clients_see_inputs_with_their_labels() -> None:
    clients = federate(MINE, Iid(6), batch_size=8)
    assert clients.n == 6
    assert sorted(clients.lower.flat) == ["inputs", "labels"]
    assert clients.lower.flat["labels"].dtype == np.int32
    batch = clients.lower.batch(3, jr.key(0)).samples
    np.testing.assert_array_equal(batch["labels"], LABELS[np.asarray(batch["inputs"])[:, 0].astype(int)])
    assert joined(rows(clients.lower)) == list(range(TOTAL))


def test_without_a_split_both_levels_share_the_samples() -> None:
    clients = federate(MINE, Iid(3))
    assert clients.upper is clients.lower
    assert clients.test.rows is clients.upper.rows
    only_test = federate(MINE, Iid(3), split=Split(0.0, test=0.5))
    assert only_test.upper is only_test.lower
    assert [len(part) for part in rows(only_test.test)] == [40, 40, 40]


def test_a_split_divides_every_client_into_levels_of_one_shared_copy() -> None:
    clients, own = federate(MINE, Shards(4), split=Split(0.2, 0.1)), federate(MINE, Shards(4))
    assert clients.lower.flat["inputs"] is clients.upper.flat["inputs"] is clients.test.flat["inputs"]
    parts = [rows(level) for level in (clients.lower, clients.upper, clients.test)]
    assert [[len(part) for part in level] for level in parts] == [[42] * 4, [12] * 4, [6] * 4]
    together = [joined(levels) for levels in zip(*parts, strict=True)]
    assert together == [sorted(part) for part in rows(own.lower)]


def test_validation_samples_can_be_for_metrics_alone() -> None:
    usual = federate(MINE, Shards(4), split=Split(0.2, 0.1))
    clients = federate(MINE, Shards(4), split=Split(0.2, 0.1), upper="training")
    assert clients.upper is clients.lower
    assert rows(clients.lower) == rows(usual.lower)
    assert rows(clients.validation) == rows(usual.upper)
    assert rows(clients.test) == rows(usual.test)
    assert not usual.has_validation
    assert not federate(MINE, Shards(4), upper="training").has_validation


def test_a_share_is_drawn_from_all_samples_and_leaves_the_other_draws_alone() -> None:
    clients = federate(MINE, Iid(4), share=0.25, seed=1)
    kept = joined(rows(clients.lower))
    assert len(kept) == len(set(kept)) == len(clients.lower.flat["labels"]) == TOTAL // 4
    assert max(kept) > TOTAL // 2, "not the first ones"
    assert kept != joined(rows(federate(MINE, Iid(4), share=0.25, seed=2).lower))
    assert rows(federate(MINE, Iid(4), share=1).lower) == rows(federate(MINE, Iid(4)).lower)
    tail = federate(MINE, Iid(2), share=0.25, long_tail=LongTail(0.5))
    assert len(tail.lower.flat["labels"]) < TOTAL // 4, "the tail is of the share"


def test_the_test_samples_can_be_dealt_out_too() -> None:
    """In the order of the split, an owner's training samples come before its test samples."""
    train = {**TRAIN, "owner": np.arange(TOTAL) % 2, "extra": np.zeros(TOTAL)}
    test = {
        "inputs": np.arange(1000, 1020, dtype=np.float32)[:, None],
        "labels": np.arange(20) % 4,
        "owner": np.arange(20) % 2,
    }
    owned = Dataset("mine", train, test, MINE.classes)
    clients = federate(owned, Natural(), with_test=True, split=Split(0.2, 10 / 130, shuffle=False))
    assert rows(clients.test) == [list(range(1000, 1020, 2)), list(range(1001, 1020, 2))]
    assert joined(rows(clients.lower) + rows(clients.upper)) == list(range(TOTAL))
    few = federate(owned, Iid(2), with_test=True, share=0.5)
    assert len(joined(rows(few.lower))) == 130
    assert any(row >= 1000 for row in joined(rows(few.lower)))
    for level in (few.lower,):
        labels = np.asarray(level.flat["labels"])
        source = np.asarray(level.flat["inputs"])[:, 0].astype(int)
        wanted = [LABELS[row] if row < TOTAL else (row - 1000) % 4 for row in source]
        np.testing.assert_array_equal(labels, wanted)


def test_the_long_tail_comes_first_and_only_used_samples_are_stored() -> None:
    tail = LongTail(factor=0.1)
    clients = federate(MINE, Iid(5), long_tail=tail, split=Split(0.2))
    kept = tail(TRAIN, np.random.default_rng(0))
    assert clients.lower.flat["labels"].shape == kept.shape
    assert np.bincount(clients.lower.flat["labels"]).tolist() == tail.sizes([60] * 4)
    assert joined(rows(clients.lower) + rows(clients.upper)) == kept.tolist()


def test_samples_that_a_partition_leaves_out_are_not_stored() -> None:
    owned = Dataset("mine", {**TRAIN, "owner": np.arange(TOTAL) // 50}, MINE.test, MINE.classes)
    clients = federate(owned, Natural(clients=2))
    assert len(clients.lower.flat["inputs"]) == 100
    assert rows(clients.lower) == [list(range(50)), list(range(50, 100))]


def test_only_training_labels_are_corrupted() -> None:
    clients = federate(MINE, Iid(4), split=Split(0.5), noise=LabelNoise((0.0, 0.2, 0.5, 1.0)))
    corrupted, labels = (np.asarray(clients.lower.flat[name]) for name in ("corrupted", "labels"))
    assert corrupted.dtype == bool
    source = np.asarray(clients.lower.flat["inputs"])[:, 0].astype(int)
    np.testing.assert_array_equal(labels != LABELS[source], corrupted)
    training = np.split(np.asarray(clients.lower.rows), np.asarray(clients.lower.start)[1:])
    assert [corrupted[part].sum() for part in training] == [0, 6, 15, 30]
    assert corrupted.sum() == 51
    assert not corrupted[np.asarray(clients.upper.rows)].any()


def of_training(clients: Clients, name: str) -> list[Any]:
    """A column of the training samples of each client."""
    lower = clients.lower
    column = np.asarray(lower.flat[name])[np.asarray(lower.rows)]
    return [part.tolist() for part in np.split(column, np.asarray(lower.start)[1:])]


def test_places_number_the_training_samples_of_each_client_or_of_all() -> None:
    options: Any = {"split": Split(0.3)}
    own, joint = (federate(MINE, Dirichlet(4, 0.5), places=kind, **options) for kind in ("own", "all"))
    sizes = np.asarray(own.lower.size).tolist()
    assert len(set(sizes)) > 1, "clients differ"
    assert of_training(own, "place") == [list(range(size)) for size in sizes]
    assert list(itertools.chain(*of_training(joint, "place"))) == list(range(sum(sizes)))
    assert rows(own.lower) == rows(federate(MINE, Dirichlet(4, 0.5), **options).lower)
    assert own.lower.flat["place"].dtype == np.int32
    held_out = np.asarray(joint.upper.rows)
    assert not np.asarray(joint.upper.flat["place"])[held_out].any()


def test_numbered_samples_know_their_client_at_every_level() -> None:
    clients = federate(MINE, Dirichlet(4, 0.5), split=Split(0.3, 0.2), numbered=True)
    for level in (clients.lower, clients.upper, clients.test):
        for client in range(4):
            drawn = level.batch(client, jr.key(0))
            assert set(np.asarray(drawn.samples["client"]).tolist()) == {client}
    assert sorted(clients.lower.flat) == ["client", "inputs", "labels"]


def test_stages_draw_from_streams_of_their_own() -> None:
    plain = federate(MINE, Dirichlet(5, 0.5), split=Split(0.2))
    noisy = federate(MINE, Dirichlet(5, 0.5), split=Split(0.2), noise=LabelNoise(0.3))
    assert rows(noisy.lower) == rows(plain.lower)
    finer = federate(MINE, Dirichlet(5, 0.5), split=Split(0.4, 0.1), noise=LabelNoise(0.3))
    levels = [rows(level) for level in (finer.lower, finer.upper, finer.test)]
    own = [joined(parts) for parts in zip(*levels, strict=True)]
    assert own == [joined(parts) for parts in zip(rows(plain.lower), rows(plain.upper), strict=True)]


def test_the_seed_decides() -> None:
    options: Any = {"split": Split(0.2), "noise": LabelNoise(0.3)}
    one, same, other = (federate(MINE, Iid(5), seed=seed, **options) for seed in (3, 3, 4))
    alike = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), one, same)
    assert all(jax.tree.leaves(alike))
    assert rows(one.lower) != rows(other.lower)
    assert not np.array_equal(one.lower.flat["labels"], other.lower.flat["labels"])


def test_a_function_is_a_partition_too() -> None:
    clients = federate(MINE, lambda samples, rng: [np.array([2, 1]), np.array([7])], weights="size")
    assert rows(clients.lower) == [[2, 1], [7]]
    np.testing.assert_allclose(clients.weights, [4 / 3, 2 / 3])


def test_targets_of_a_regression_stay_as_they_are() -> None:
    columns = {"inputs": np.zeros((4, 1), np.float32), "labels": np.array([0.5, 1.5, 2.5, 3.5], np.float32)}
    clients = federate(Dataset("mine", columns, columns, ()), Iid(2))
    assert np.sort(clients.lower.flat["labels"]).tolist() == [0.5, 1.5, 2.5, 3.5]


def test_classes_without_names_are_counted_by_their_labels() -> None:
    nameless = Dataset("mine", TRAIN, MINE.test, ())
    noisy = federate(nameless, Iid(2), noise=LabelNoise(1.0))
    assert np.bincount(noisy.lower.flat["labels"]).shape == (4,)


REFUSED: dict[str, Any] = {
    "class": (lambda: federate(MINE, Iid), r"partition is the class Iid itself; make one: Iid\(...\)"),
    "split class": (lambda: federate(MINE, Iid(2), split=Split), "split is the class Split itself"),
    "noise class": (lambda: federate(MINE, Iid(2), noise=LabelNoise), "noise is the class LabelNoise"),
    "tail class": (lambda: federate(MINE, Iid(2), long_tail=LongTail), "long_tail is the class LongTail"),
    "twice": (
        lambda: federate(MINE, lambda samples, rng: [np.array([1, 2]), np.array([2])]),
        r"gave some samples twice.*Clients\.indexed",
    ),
    "beyond": (
        lambda: federate(MINE, lambda samples, rng: [np.array([1, TOTAL])]),
        f"rows from 1 to {TOTAL}; there are {TOTAL} samples",
    ),
    "negative": (lambda: federate(MINE, lambda samples, rng: [np.array([-1])]), "rows from -1 to -1"),
    "empty": (
        lambda: federate(MINE, lambda samples, rng: [np.array([1]), np.array([], int)]),
        r"the clients \[1\] have no training samples",
    ),
    "nobody": (lambda: federate(MINE, lambda samples, rng: []), "at least one client"),
    "too small to split": (
        lambda: federate(MINE, lambda samples, rng: [np.array([1, 2]), np.array([3])], split=Split(0.5)),
        "client 1: 1 samples cannot be split into 2 parts",
    ),
    "unequal levels": (
        lambda: federate(MINE, Iid(2), split=lambda rows, rng: (rows, rows[rows == 0], rows[:0])),
        r"the clients \[.\] have no validation samples, others have",
    ),
    "rates": (lambda: federate(MINE, Iid(2), noise=LabelNoise((0.1,))), "1 rates for 2 clients"),
    "upper": (
        lambda: federate(MINE, Iid(2), upper="trainings"),
        "upper is 'trainings'; it must be .*did you mean 'training'",
    ),
    "share": (lambda: federate(MINE, Iid(2), share=0.0), "share is 0.0; it must be above 0 and at most 1"),
    "places": (lambda: federate(MINE, Iid(2), places="each"), 'places is \'each\'; it must be "own", "all"'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_refused_with_a_reason(case: str) -> None:
    build, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        build()


# -------------------------------------------------------------------------- statistics

UNLIKE = Clients(
    [{"labels": np.array([0, 0, 1])}, {"labels": np.array([1])}],
    upper=[{"labels": np.array([2])}, {"labels": np.array([0, 1])}],
)


def test_samples_are_counted_by_client_class_and_level() -> None:
    found = describe(UNLIKE)
    assert found.lower.tolist() == [[2, 1, 0], [0, 1, 0]]
    assert found.upper.tolist() == [[0, 0, 1], [1, 1, 0]]
    assert found.counts.tolist() == [[2, 1, 1], [1, 2, 0]]
    assert found.test is None
    assert found.sizes.tolist() == [4, 3]
    assert found.classes_per_client.tolist() == [3, 2]
    # Overall 3/7, 3/7, 1/7: client 0 is off by 1/14 + 5/28 + 3/28, client 1 by 2/21 + 5/21 + 3/21; halved.
    np.testing.assert_allclose(found.distances, [5 / 28, 5 / 21])
    assert found.heterogeneity == pytest.approx((5 / 28 + 5 / 21) / 2)


def test_samples_that_both_levels_share_count_once() -> None:
    data = {"labels": np.array([0, 1, 1, 0])}
    shared = describe(federate(MINE, Iid(3), batch_size=2))
    assert shared.counts.sum() == shared.lower.sum() == shared.upper.sum() == TOTAL
    partly = describe(Clients.indexed(data, [[0, 1], [2, 2]], [[1, 2], [3, 2]]))
    assert partly.counts.tolist() == [[1, 2], [1, 2]]
    assert describe(Clients.indexed(data, [[0, 1]]).whole()).counts.tolist() == [[1, 1]]


def test_the_clients_own_test_data_are_counted_apart() -> None:
    found = describe(federate(MINE, Iid(4), split=Split(0.2, 0.1)))
    assert found.test is not None
    assert found.test.sum() == 24
    assert found.counts.sum() == TOTAL - 24
    assert "besides, 24 to test" in str(found)
    assert "besides" not in str(describe(federate(MINE, Iid(4))))
    assert describe(federate(MINE, Iid(4)).whole()).test is None


def test_heterogeneity_is_0_for_equal_labels_and_largest_for_separate_ones() -> None:
    labels = np.arange(4).repeat(5)
    same = describe(Clients([{"labels": labels}] * 3))
    assert same.heterogeneity == 0
    apart = describe(Clients([{"labels": part} for part in np.split(labels, 4)]))
    assert apart.heterogeneity == pytest.approx(3 / 4)


def test_the_text_shows_every_count_of_few_clients() -> None:
    lines = str(describe(UNLIKE, ["cat", "dog", "a long name indeed"])).splitlines()
    assert lines[0] == "2 clients, 7 samples, 3 classes (lower level 4, upper level 3)"
    assert lines[1] == "samples a client: min 3, median 3.5, max 4"
    assert [line.split() for line in lines[-4:]] == [
        ["client", "cat", "dog", "a", "long", "na…", "all"],
        ["0", "2", "1", "1", "4"],
        ["1", "1", "2", "·", "3"],
        ["all", "3", "3", "1", "7"],
    ]


@pytest.mark.parametrize(("n", "line"), [(20, None), (21, "1 more client "), (100, "80 more clients ")])
def test_many_clients_are_summed_in_one_row(n: int, line: str | None) -> None:
    text = str(describe(federate(MINE, Iid(n))))
    more = [row for row in text.splitlines() if "more" in row]
    assert [row.strip().startswith(str(line)) for row in more] == [True] * (line is not None)
    if more:
        shown = TOTAL - sum(len(part) for part in rows(federate(MINE, Iid(n)).lower)[20:])
        assert more[0].split()[-1] == str(TOTAL - shown)


@pytest.mark.parametrize("width", [60, 100])
def test_classes_that_do_not_fit_are_summed_in_one_column(width: int) -> None:
    labels = np.arange(62).repeat(3)
    text = str(describe(Clients([{"labels": labels}]), width=width))
    header, row, _ = (line for line in text.splitlines()[5:])
    kept = len(header.split()) - 4
    assert 5 < kept < 62
    assert f"{62 - kept} more" in header
    assert row.split() == ["0", *["3"] * kept, str(3 * (62 - kept)), "186"]
    assert max(len(header), len(row)) <= width


@pytest.mark.parametrize("n", [1, 2, 30, 100])
def test_a_picture_is_drawn(n: int, tmp_path: pathlib.Path) -> None:
    found = describe(federate(MINE, Iid(n), split=Split(0.3)), MINE.classes)
    path = found.draw(tmp_path / "clients.png")
    picture = matplotlib.image.imread(path)
    assert picture.shape[0] > 300
    # Blue bubbles and bars of the lower level, orange bars of the upper one, on white.
    near = [np.abs(picture[..., :3] - np.array(colour)).max(axis=2) < 0.02 for colour in _COLOURS]
    assert all(pixels.mean() > 0.003 for pixels in near)


_COLOURS = [(0x2F / 255, 0x6D / 255, 0xB3 / 255), (0xF0 / 255, 0xA1 / 255, 0x3A / 255), (1, 1, 1)]


def test_a_picture_of_shared_levels_has_no_second_colour(tmp_path: pathlib.Path) -> None:
    picture = matplotlib.image.imread(describe(federate(MINE, Iid(5))).draw(tmp_path / "clients.png"))
    assert not np.any(np.abs(picture[..., :3] - np.array(_COLOURS[1])).max(axis=2) < 0.02)


UNCOUNTABLE: dict[str, Any] = {
    "no dict": (lambda: describe(Clients([np.ones(3)])), "lower-level samples must be dicts.*found"),
    "no labels": (lambda: describe(Clients([{"inputs": np.ones(3)}])), r"entry 'labels'.*found \['inputs'\]"),
    "real labels": (lambda: describe(Clients([{"labels": np.ones(3)}])), "whole numbers from 0 on.*float32"),
    "negative": (lambda: describe(Clients([{"labels": np.array([-1, 0])}])), "whole numbers from 0 on"),
    "few names": (lambda: describe(UNLIKE, ["a", "b"]), "names for 2 classes, but the labels go up to 2"),
}


@pytest.mark.parametrize("case", UNCOUNTABLE)
def test_samples_without_classes_are_refused_with_a_reason(case: str) -> None:
    build, message = UNCOUNTABLE[case]
    with pytest.raises(DataError, match=message):
        build()


def test_statistics_are_plain_numbers() -> None:
    found = describe(UNLIKE)
    assert isinstance(found, Statistics)
    assert isinstance(found.heterogeneity, float)
    assert found.classes == ("0", "1", "2")
