"""The verbs of a cohort, on the simulator, against numpy: what they compute and what they book."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel import Clients, Ledger, Problem, Simulator
from fedbilevel.fed import Codec, Complete, Dense, Given, Program
from fedbilevel.fed.ledger import metering

KEY = jr.key(3)
ROWS = np.array([[1.0, 2.0], [3.0, 5.0], [-4.0, 0.5], [8.0, -1.0]], np.float32)
WEIGHTS = np.array([1.0, 2.0, 0.0, 5.0])


def nothing(x: Any, y: Any, samples: Any) -> Any:
    return jnp.mean(samples) * 0.0


class Plus(Program):
    """The sum of a client's values and its id."""

    def __call__(self, me: Any, *values: Any) -> Any:
        return sum(values) + me.id


class Draw(Program):
    def __call__(self, me: Any, *values: Any) -> Any:
        return jr.normal(me.key, ())


class Half(Codec):
    """Float16 on the wire."""

    def encode(self, value: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float16), value)

    def decode(self, message: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), message)


def federation(**options: Any) -> Any:
    problem = Problem(nothing, nothing, x0=0.0, y0=0.0)
    lower = [jnp.zeros(size) for size in (1, 2, 3, 4)]
    return Simulator().federation(problem, Clients(lower=lower, **options))


@pytest.fixture(scope="module")
def fed() -> Any:
    return federation()


def bill(meter: Any) -> Ledger:
    return Ledger.from_counts(meter.counts)


# ------------------------------------------------------------------ down and up


def test_send_gives_everyone_the_same_and_books_every_copy(fed: Any) -> None:
    with metering() as meter:
        sent = fed.everyone.send({"a": jnp.arange(3.0), "b": jnp.zeros((2, 2), jnp.int8)}, "ab")
    assert bill(meter) == Ledger(down={"ab": 4 * (3 * 4 + 4)})
    rows, answered = fed.everyone.gather(sent, "back")
    np.testing.assert_array_equal(rows["a"], np.tile(np.arange(3.0), (4, 1)))
    assert answered.all()


def test_deal_gives_client_i_row_i(fed: Any) -> None:
    cohort = fed.sample(KEY, 2)
    with metering() as meter:
        dealt = cohort.deal(ROWS[:2], "rows")
        rows, _ = cohort.gather(dealt, "back")
    np.testing.assert_array_equal(rows, ROWS[:2])
    assert bill(meter) == Ledger(rounds=1, down={"rows": 2 * 8}, up={"back": 2 * 8})


def test_run_sees_own_rows_shared_values_and_its_id_and_books_no_traffic(fed: Any) -> None:
    cohort = fed.everyone
    own, shared = cohort.deal(ROWS, "own"), cohort.send(jnp.array([10.0, 20.0]), "shared")
    with metering() as meter:
        out = cohort.run(Plus(), own, shared, key=KEY)
    assert bill(meter) == Ledger()
    rows, _ = cohort.gather(out, "out")
    np.testing.assert_allclose(rows, ROWS + np.array([10.0, 20.0]) + np.arange(4)[:, None])


def test_a_client_draws_from_its_id_not_from_its_place_in_the_cohort(fed: Any) -> None:
    everyone, cohort = fed.everyone, fed.sample(KEY, 2)
    alone, _ = cohort.gather(cohort.run(Draw(), key=KEY), "v")
    among_all, _ = everyone.gather(everyone.run(Draw(), key=KEY), "v")
    np.testing.assert_array_equal(alone, among_all[cohort.ids])
    assert len(set(among_all.tolist())) == 4
    expected = [jr.normal(jr.fold_in(KEY, i), ()) for i in range(4)]
    np.testing.assert_array_equal(among_all, expected)


def test_mean_and_gather_book_one_message_up_a_client_and_one_round(fed: Any) -> None:
    cohort = fed.everyone
    value = cohort.deal(ROWS, "rows")
    with metering() as meter:
        average = cohort.mean(value, "mean")
        rows, _ = cohort.gather(value, "gather")
    np.testing.assert_allclose(average, ROWS.mean(0), rtol=1e-6)
    np.testing.assert_array_equal(rows, ROWS)
    assert bill(meter) == Ledger(rounds=2, up={"mean": 4 * 8, "gather": 4 * 8})


@pytest.mark.parametrize(("weights", "expected"), [("size", [1, 2, 3, 4]), (WEIGHTS, WEIGHTS)])
def test_mean_weighs_clients_as_the_federation_says(weights: Any, expected: Any) -> None:
    weighted = federation(weights=weights)
    everyone = weighted.everyone
    average = everyone.mean(everyone.deal(ROWS, "rows"), "mean")
    np.testing.assert_allclose(average, np.average(ROWS, axis=0, weights=expected), rtol=1e-6)
    cohort = weighted.sample(KEY, 2)
    average = cohort.mean(cohort.deal(ROWS[:2], "rows"), "mean")
    own = np.asarray(expected, float)[np.asarray(cohort.ids)]
    np.testing.assert_allclose(average, np.average(ROWS[:2], axis=0, weights=own), rtol=1e-6)


def test_weights_given_to_mean_replace_those_of_the_federation() -> None:
    everyone = federation(weights="size").everyone
    average = everyone.mean(everyone.deal(ROWS, "rows"), "mean", weight=WEIGHTS)
    np.testing.assert_allclose(average, np.average(ROWS, axis=0, weights=WEIGHTS), rtol=1e-6)


def test_mean_keeps_dtypes_and_averages_every_leaf(fed: Any) -> None:
    everyone = fed.everyone
    value = everyone.deal({"half": ROWS.astype(np.float16), "single": ROWS[:, 0]}, "rows")
    average = everyone.mean(value, "mean")
    assert average["half"].dtype == jnp.float16
    assert average["single"].dtype == jnp.float32
    np.testing.assert_allclose(average["half"], ROWS.mean(0), rtol=1e-2)


def test_mean_has_double_precision() -> None:
    with jax.enable_x64(True):
        everyone = federation(weights=WEIGHTS).everyone
        values = np.array([1.0, 1e-9, 3.0, 1e-12])
        average = everyone.mean(everyone.deal(jnp.asarray(values), "v"), "mean")
    np.testing.assert_allclose(average, np.average(values, weights=WEIGHTS), rtol=1e-15)


def test_mean_of_whole_numbers_is_their_mean(fed: Any) -> None:
    everyone = fed.everyone
    counts = everyone.deal(jnp.array([1, 2, 4, 5]), "counts")
    np.testing.assert_allclose(everyone.mean(counts, "mean"), 3.0)


# ---------------------------------------------------------------------- codecs


def test_a_codec_is_billed_by_its_encoded_bytes_and_decodes_what_it_encoded(fed: Any) -> None:
    everyone = fed.everyone
    value = everyone.deal(ROWS / 3, "rows")
    with metering() as meter:
        average = everyone.mean(value, "mean", codec=Half())
        rows, _ = everyone.gather(value, "gather", codec=Half())
    rounded = (ROWS / 3).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(rows, rounded)
    np.testing.assert_allclose(average, rounded.mean(0), rtol=1e-6)
    assert not np.array_equal(rows, ROWS / 3)
    assert bill(meter) == Ledger(rounds=2, up={"mean": 4 * 4, "gather": 4 * 4})


def test_the_dense_codec_changes_neither_value_nor_bill(fed: Any) -> None:
    everyone = fed.everyone
    value = everyone.deal(ROWS, "rows")
    with metering() as plain:
        expected = everyone.mean(value, "mean")
    with metering() as dense:
        average = everyone.mean(value, "mean", codec=Dense())
    np.testing.assert_array_equal(average, expected)
    assert bill(dense) == bill(plain)


# -------------------------------------------------------------------- sideways


def test_push_mixes_by_the_rows_of_the_matrix_and_books_every_edge(fed: Any) -> None:
    everyone = fed.everyone
    matrix = np.array([[0.5, 0.5, 0, 0], [0, 1, 0, 0], [0.25, 0.25, 0.25, 0.25], [0, 0, 2.0, 0]])
    with metering() as meter:
        mixed = everyone.push(everyone.deal(ROWS, "rows"), Given(matrix), "push")
    rows, _ = everyone.gather(mixed, "back")
    np.testing.assert_allclose(rows, matrix @ ROWS, rtol=1e-6)
    used = 1 + 3 + 1
    assert bill(meter) == Ledger(
        rounds=1, down={"rows": 4 * 8}, edge={"push": used * 8}, messages={"push": used}
    )


def test_push_over_complete_links_is_the_mean_everywhere(fed: Any) -> None:
    everyone = fed.everyone
    value = everyone.deal(ROWS, "rows")
    with metering() as meter:
        mixed = everyone.push(value, Complete(), "push")
    rows, _ = everyone.gather(mixed, "back")
    np.testing.assert_allclose(rows, np.tile(ROWS.mean(0), (4, 1)), rtol=1e-6)
    assert bill(meter) == Ledger(rounds=1, edge={"push": 4 * 3 * 8}, messages={"push": 4 * 3})


def test_push_of_a_sent_value_and_among_a_sample(fed: Any) -> None:
    cohort = fed.sample(KEY, 2)
    mixed = cohort.push(cohort.send(jnp.ones(2), "v"), Given([[0.0, 3.0], [1.0, 1.0]]), "push")
    rows, _ = cohort.gather(mixed, "back")
    np.testing.assert_allclose(rows, [[3.0, 3.0], [2.0, 2.0]])


def test_links_that_do_not_fit_are_refused(fed: Any) -> None:
    value = fed.everyone.send(1.0, "v")
    with pytest.raises(ValueError, match="links are for 2 clients, but 4 take part"):
        fed.everyone.push(value, Given(np.eye(2)), "push")
    with pytest.raises(ValueError, match=r"square matrix.*got shape \(2, 3\)"):
        Given(np.ones((2, 3)))
    with pytest.raises(ValueError, match="finite weights"):
        Given([[np.nan]])


@pytest.mark.parametrize(
    ("weights", "alike", "expected"),
    [("uniform", False, np.ones(4)), (WEIGHTS, False, WEIGHTS / 2), (WEIGHTS, True, np.ones(4))],
)
def test_relative_weights_are_known_and_make_of_a_plain_mean_the_weighted_one(
    weights: Any, alike: bool, expected: Any
) -> None:
    everyone = federation(weights=weights).everyone
    with metering() as meter:
        relative = everyone.relative_weights(alike=alike)
    assert bill(meter) == Ledger()
    np.testing.assert_allclose(everyone.gather(relative, "back")[0], expected, rtol=1e-6)


# ------------------------------------------------------- values that stay there


def test_take_and_put_touch_the_cohort_only_and_cost_nothing(fed: Any) -> None:
    kept = fed.keep({"v": ROWS})
    cohort = fed.sample(KEY, 2)
    with metering() as meter:
        taken = cohort.take(kept)
        new = cohort.put(kept, cohort.run(Negative(), taken, key=KEY))
    expected = ROWS.copy()
    expected[np.asarray(cohort.ids)] *= -1
    np.testing.assert_array_equal(fed.stacked(new)["v"], expected)
    np.testing.assert_array_equal(fed.stacked(kept)["v"], ROWS)
    assert bill(meter) == Ledger()


class Negative(Program):
    def __call__(self, me: Any, *values: Any) -> Any:
        return jax.tree.map(jnp.negative, values[0])


def test_put_of_a_sent_value_gives_every_client_of_the_cohort_the_same(fed: Any) -> None:
    new = fed.everyone.put(fed.keep(ROWS), fed.everyone.send(jnp.array([1.0, 2.0]), "v"))
    np.testing.assert_array_equal(fed.stacked(new), np.tile([1.0, 2.0], (4, 1)))


def test_a_published_value_is_downloaded_once_by_each_client(fed: Any) -> None:
    first, second = fed.sample(jr.key(0), 2), fed.sample(jr.key(1), 2)
    newcomers = len(set(second.ids.tolist()) - set(first.ids.tolist()))
    assert newcomers == 1, "the two samples should overlap in one client"
    published = fed.publish(jnp.arange(3.0), "x")
    bills = []
    for cohort in (first, second, second, fed.everyone):
        with metering() as meter:
            value, published = cohort.read(published)
        np.testing.assert_allclose(cohort.mean(value, "back"), np.arange(3.0), rtol=1e-6)
        bills.append(bill(meter).down.get("x"))
    assert bills == [2 * 12, newcomers * 12, 0, (4 - 2 - newcomers) * 12]
