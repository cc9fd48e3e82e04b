"""Clients that do not answer: who is left out of what."""

from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel import Clients, Ledger, Problem, Simulator
from fedbilevel.fed import Dense, Given, Program
from fedbilevel.fed.federation import answers as federation_answers
from fedbilevel.fed.ledger import metering

KEY = jr.key(5)
VALUES = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0], np.float32)


def distance(x: Any, y: Any, samples: Any) -> Any:
    return jnp.mean((samples - y) ** 2) / 2


class Slope(Program):
    """One call of g_y on all samples; returns the client's own value."""

    def __call__(self, me: Any, *values: Any) -> Any:
        me.g_y(0.0, 0.0, me.batch("lower", me.key))
        return values[0]


def federation(dropout: float, **options: Any) -> Any:
    problem = Problem(distance, distance, x0=0.0, y0=0.0)
    return Simulator(dropout=dropout).federation(problem, Clients(lower=jnp.zeros((6, 2)), **options))


@pytest.fixture(scope="module")
def fed() -> Any:
    return federation(0.5)


def answers(everyone: Any, key: Any) -> Any:
    """A run that some clients do not answer, and who did."""
    out = everyone.run(Slope(), everyone.deal(VALUES, "v"), key=key)
    present = np.asarray(out.present)
    assert 0 < present.sum() < 6, "choose a key for which some answer and some do not"
    return out, present


def test_absent_clients_leave_the_mean(fed: Any) -> None:
    out, present = answers(fed.everyone, KEY)
    np.testing.assert_allclose(fed.everyone.mean(out, "v"), VALUES[present].mean())


def test_absent_clients_leave_the_weighted_mean() -> None:
    weights = np.arange(1.0, 7.0)
    everyone = federation(0.5, weights=weights).everyone
    out, present = answers(everyone, KEY)
    expected = np.average(VALUES[present], weights=weights[present])
    np.testing.assert_allclose(everyone.mean(out, "v"), expected, rtol=1e-6)


def test_gather_shows_who_answered_and_zeros_for_the_others(fed: Any) -> None:
    out, present = answers(fed.everyone, KEY)
    rows, answered = fed.everyone.gather(out, "v")
    np.testing.assert_array_equal(answered, present)
    np.testing.assert_array_equal(rows, np.where(present, VALUES, 0))


def test_calls_and_bytes_up_are_booked_for_those_who_answered(fed: Any) -> None:
    with metering() as meter:
        out, present = answers(fed.everyone, KEY)
        fed.everyone.mean(out, "v")
    count = int(present.sum())
    assert Ledger.from_counts(meter.counts) == Ledger(
        rounds=1, down={"v": 6 * 4}, up={"v": count * 4}, calls={"g_y": count}, samples=2 * count
    )


def test_put_keeps_the_old_value_of_the_absent(fed: Any) -> None:
    out, present = answers(fed.everyone, KEY)
    kept = fed.everyone.put(fed.keep(-VALUES), out)
    np.testing.assert_array_equal(fed.stacked(kept), np.where(present, VALUES, -VALUES))


def test_who_has_no_value_does_not_answer_a_later_run(fed: Any) -> None:
    out, present = answers(fed.everyone, KEY)
    for seed in range(5):
        later = fed.everyone.run(Slope(), out, key=jr.key(seed)).present
        assert not np.any(np.asarray(later) & ~present)
        assert np.any(later)


def test_a_push_without_the_absent_neither_mixes_nor_bills_their_values(fed: Any) -> None:
    matrix = np.arange(1.0, 37.0).reshape(6, 6)
    out, present = answers(fed.everyone, KEY)
    with metering() as meter:
        mixed = fed.everyone.push(out, Given(matrix), "push")
    rows, _ = fed.everyone.gather(mixed, "back")
    np.testing.assert_allclose(rows, matrix @ np.where(present, VALUES, 0), rtol=1e-6)
    used = int(present.sum()) * 5
    found = Ledger.from_counts(meter.counts)
    assert found == Ledger(rounds=1, edge={"push": used * 4}, messages={"push": used})


def test_a_codec_silences_nobody(fed: Any) -> None:
    out, present = answers(fed.everyone, KEY)
    _, answered = fed.everyone.gather(out, "v", codec=Dense())
    np.testing.assert_array_equal(answered, present)


def test_a_codec_silences_nobody_who_got_the_value_by_mail(fed: Any) -> None:
    _, answered = fed.everyone.gather(fed.everyone.deal(VALUES, "v"), "v", codec=Dense())
    assert np.all(answered)


@pytest.mark.parametrize(("dropout", "rate"), [(0.3, 0.7), (0.99, 0.95)])
def test_never_nobody_and_the_rate_is_right(dropout: float, rate: float) -> None:
    ids = jnp.arange(6)
    present = np.array([federation_answers(jr.key(seed), ids, dropout) for seed in range(100)])
    assert np.all(present.any(axis=1))
    assert abs(present.mean() - rate) < 0.06  # 0.99: all six are asked again where nobody answers


def test_a_client_is_silenced_by_its_id_not_by_its_place() -> None:
    order = np.array([5, 3, 2, 0, 1, 4])
    sorted_ids = np.asarray(federation_answers(KEY, jnp.arange(6), 0.5))
    shuffled = np.asarray(federation_answers(KEY, jnp.asarray(order), 0.5))
    assert not sorted_ids.all()
    np.testing.assert_array_equal(shuffled, sorted_ids[order])
