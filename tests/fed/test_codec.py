"""Top-K on the wire, error feedback, and what both cost."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel import Clients, Ledger, Problem, Simulator
from fedbilevel.fed import Program
from fedbilevel.fed.codec import TopK, check_entries
from fedbilevel.fed.ledger import metering

N, D = 4, 5
ROWS = np.array(
    [[1.0, -7.0, 2.0, 0.5, 3.0], [4.0, 0.0, 0.0, -1.0, 8.0], [0.1, 0.2, 0.3, -0.4, 0.5], [9.0, 9.5, 1, 2, 3]],
    np.float32,
)
TOP2 = np.array([[0, -7.0, 0, 0, 3], [4, 0, 0, 0, 8], [0, 0, 0, -0.4, 0.5], [9, 9.5, 0, 0, 0]], np.float32)


def nothing(x, y, samples):
    return jnp.mean(samples) * 0.0


class Same(Program):
    """The value itself, from those who answer."""

    def __call__(self, me, *values):
        return values[0]


def federation(dropout=0.0, **options):
    problem = Problem(nothing, nothing, x0=0.0, y0=0.0)
    return Simulator(dropout=dropout).federation(problem, Clients(lower=jnp.zeros((N, 1)), **options))


def codec(k=2):
    return TopK.like(np.zeros(D, np.float32), k)


# ------------------------------------------------------------------ k


@pytest.mark.parametrize(("k", "count"), [(1, 1), (100, 100), (0.07, 7), (0.55, 55), (0.071, 8), (1e-9, 1)])
def test_k_is_a_number_or_a_share_of_the_entries(k, count):
    found = TopK.like({"a": jnp.zeros(60), "b": jnp.zeros((4, 10))}, k).k
    assert found == count
    assert type(found) is int


@pytest.mark.parametrize("k", [0, -1, 0.0, -0.5, 1.5, float("nan"), float("inf"), True, "two", None], ids=str)
def test_an_impossible_k_is_named(k):
    with pytest.raises(ValueError, match=r"k is .*; it must be a whole number of at least 1, or a share in"):
        check_entries(k)


def test_more_entries_than_there_are_are_too_many():
    with pytest.raises(ValueError, match="k is 6, but there are 5 entries"):
        codec(6)


# ------------------------------------------------------------------ messages


def test_the_largest_are_chosen_over_all_leaves():
    tree = {"a": jnp.array([1.0, -5.0]), "b": (jnp.array([[2.0, 4.0]]), jnp.array(-3.0))}
    top = TopK.like(tree, 3)
    values, places = top.encode(tree)
    assert values.tolist() == [-5.0, 4.0, -3.0]
    assert places.tolist() == [1, 3, 4]
    assert places.dtype == jnp.int32
    back = top.decode((values, places))
    assert back["a"].tolist() == [0.0, -5.0]
    assert back["b"][0].tolist() == [[0.0, 4.0]]
    assert float(back["b"][1]) == -3.0


def test_a_nan_is_sent_and_not_hidden():
    value = jnp.array([1.0, jnp.nan, 9.0, 2.0, 3.0])
    assert np.isnan(codec(1).decode(codec(1).encode(value))).any()


def test_bytes_are_k_values_and_k_positions():
    fed = federation()
    with metering() as meter:
        value = fed.everyone.deal(ROWS, "v")
        mean = fed.everyone.mean(value, "v", codec=codec())
    np.testing.assert_allclose(mean, TOP2.mean(0), rtol=1e-6)
    booked = Ledger.from_counts(meter.counts)
    assert booked == Ledger(rounds=1, down={"v": N * D * 4}, up={"v": N * 2 * (4 + 4)})


def test_bytes_of_double_precision(float64):
    fed = federation()
    with metering() as meter:
        fed.everyone.mean(fed.everyone.deal(ROWS.astype(float), "v"), "v", codec=TopK.like(jnp.zeros(D), 2))
    assert Ledger.from_counts(meter.counts).up == {"v": N * 2 * (8 + 4)}


# ------------------------------------------------------------------ error feedback


def test_feedback_remembers_what_was_left_out_and_sends_it_later():
    everyone, memory = federation().everyone, federation().keep(np.zeros((N, D), np.float32))
    with metering() as meter:
        value = everyone.deal(ROWS, "v")
        mean, memory = everyone.mean_with_feedback(value, memory, "v", codec())
    np.testing.assert_allclose(mean, TOP2.mean(0), rtol=1e-6)
    np.testing.assert_array_equal(memory.value, ROWS - TOP2)
    assert Ledger.from_counts(meter.counts) == Ledger(
        rounds=1, down={"v": N * D * 4}, up={"v": N * 2 * (4 + 4)}
    )
    silent = everyone.deal(np.zeros_like(ROWS), "v")
    mean, memory = everyone.mean_with_feedback(silent, memory, "v", codec())
    second = np.array([[1.0, 0, 2, 0, 0], [0, 0, 0, -1, 0], [0, 0.2, 0.3, 0, 0], [0, 0, 0, 2, 3]], np.float32)
    np.testing.assert_allclose(mean, second.mean(0), rtol=1e-6)
    np.testing.assert_array_equal(memory.value, ROWS - TOP2 - second)


def test_the_mean_with_feedback_is_weighted():
    weights = np.array([1.0, 2.0, 0.0, 5.0])
    fed = federation(weights=weights)
    kept = fed.keep(np.zeros((N, D), np.float32))
    mean, _ = fed.everyone.mean_with_feedback(fed.everyone.deal(ROWS, "v"), kept, "v", codec())
    np.testing.assert_allclose(mean, np.average(TOP2, axis=0, weights=weights), rtol=1e-6)


def test_who_does_not_answer_keeps_its_memory_and_is_not_billed():
    fed, old = federation(dropout=0.5), np.full((N, D), 100.0, np.float32)
    out = fed.everyone.run(Same(), fed.everyone.deal(ROWS, "v"), key=jr.key(1))
    present = np.asarray(out.present)
    assert 0 < present.sum() < N, "choose a key for which some answer and some do not"
    with metering() as meter:
        mean, memory = fed.everyone.mean_with_feedback(out, fed.keep(old), "v", codec())
    total = ROWS + old
    sent = np.where(np.abs(total) >= np.sort(np.abs(total), axis=1)[:, -2:-1], total, 0)
    assert np.all(np.count_nonzero(sent, axis=1) == 2)
    np.testing.assert_allclose(mean, sent[present].mean(0), rtol=1e-6)
    np.testing.assert_array_equal(memory.value, np.where(present[:, None], total - sent, old))
    assert Ledger.from_counts(meter.counts).up == {"v": int(present.sum()) * 2 * (4 + 4)}


def test_a_sampled_cohort_leaves_the_memories_of_the_others():
    fed, old = federation(), np.full((N, D), 100.0, np.float32)
    cohort = fed.sample(jr.key(0), 2)
    ids = np.asarray(cohort.ids)
    _, memory = cohort.mean_with_feedback(cohort.deal(ROWS[ids], "v"), fed.keep(old), "v", codec())
    changed = np.any(np.asarray(memory.value) != old, axis=1)
    np.testing.assert_array_equal(np.flatnonzero(changed), np.sort(ids))


# ------------------------------------------------------------------ batches of another size


def test_clients_and_client_with_batches_of_another_size():
    clients = Clients(lower=jnp.arange(24.0).reshape(N, 6), batch_size=2, weights=np.arange(1.0, N + 1))
    for size, width in ((4, 4), (None, 6)):
        other = clients.batched(size)
        assert (other.lower.width, other.upper.width) == (width, width)
        np.testing.assert_array_equal(other.weights, clients.weights)
    assert clients.lower.width == 2
    with pytest.raises(ValueError, match="batch_size is 0"):
        clients.batched(0)


class Wide(Program):
    """The sum of all samples, by a batch of another size; the client's own size stays as it was."""

    def __call__(self, me, *values):
        wide = me.with_batches_of(None).batch("lower", me.key)
        return jnp.sum(wide.samples), me.batch("lower", me.key).samples.shape[0]


def test_a_program_can_draw_batches_of_another_size_inside_a_compiled_step():
    """Weights are traced there: they must not be looked at again."""
    data = jnp.arange(24.0).reshape(N, 6)
    problem = Problem(nothing, nothing, x0=0.0, y0=0.0)

    @jax.jit
    def sums(clients):
        fed = Simulator().federation(problem, clients)
        return fed.everyone.gather(fed.everyone.run(Wide(), key=jr.key(0)), "v")[0]

    found, narrow = sums(Clients(lower=data, batch_size=2, weights="size"))
    np.testing.assert_allclose(found, data.sum(1))
    assert set(np.asarray(narrow).tolist()) == {2}
