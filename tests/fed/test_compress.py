"""Codecs that draw: random entries and few bits, without bias, and with the bytes that they promise."""

import itertools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel import Clients, Ledger, Problem, Simulator
from fedbilevel.fed.codec import Feedback
from fedbilevel.fed.compress import Quantized, RandomK, check_bits
from fedbilevel.fed.ledger import metering

N = 3
TREE = {"a": np.array([[1.0, -2.0, 3.5], [0.25, -0.75, 0.0]]), "b": np.array(0.6), "c": np.array([5.0, -4.0])}
SIZE = 9
CODECS = {
    "random": lambda **o: RandomK.like(tree(), 4, **o),
    "two bits": lambda **o: Quantized.like(tree(), 2, **o),
    "five bits": lambda **o: Quantized.like(tree(), 5, **o),
}


def tree(dtype=None):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype or float), TREE)


def flat(values):
    return np.concatenate([np.ravel(np.asarray(leaf, float)) for leaf in jax.tree.leaves(values)])


def many(codec, value, draws=4000):
    """What arrives, for so many keys: one row each."""
    arrive = jax.jit(jax.vmap(lambda key: codec.decode(codec.encode_with(key, value))))
    leaves = jax.tree.leaves(arrive(jr.split(jr.key(0), draws)))
    return np.concatenate([np.asarray(leaf, float).reshape(draws, -1) for leaf in leaves], axis=1)


def nothing(x, y, samples):
    return jnp.mean(samples) * 0.0


def everyone():
    clients = Clients(lower=jnp.zeros((N, 1)))
    return Simulator().federation(Problem(nothing, nothing, x0=0.0, y0=0.0), clients).everyone


# ------------------------------------------------------------------ what arrives


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", CODECS)
def test_without_bias_the_mean_of_what_arrives_is_the_value(name):
    rows, value = many(CODECS[name](), tree()), flat(TREE)
    error = rows.std(0) / np.sqrt(len(rows))
    assert np.any(error > 1e-3), "it does draw"
    # Nine means of 4000 draws: five standard errors are passed once in 10⁵ runs.
    assert np.all(np.abs(rows.mean(0) - value) <= 5 * error + 1e-12)


@pytest.mark.usefixtures("float64")
def test_random_entries_are_a_set_of_k_places_each_as_likely_as_another():
    rows, value = many(RandomK.like(jnp.ones(5), 2), jnp.arange(1.0, 6.0), 5000), np.arange(1.0, 6.0)
    assert np.all(np.sum(rows != 0, axis=1) == 2)
    np.testing.assert_allclose(rows[rows != 0], np.broadcast_to(2.5 * value, rows.shape)[rows != 0])
    sets = {pair: np.mean(np.all(rows[:, pair] != 0, axis=1)) for pair in itertools.combinations(range(5), 2)}
    # Ten sets of probability 1/10, estimated with a standard deviation of 0.0042.
    assert max(abs(share - 0.1) for share in sets.values()) < 5 * 0.0042


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("bits", [2, 3, 8, 16])
def test_rounding_is_to_a_neighbour_among_the_levels(bits):
    levels = 2 ** (bits - 1) - 1
    value = jnp.linspace(-1.7, 1.3, 40)
    places = many(Quantized.like(value, bits), value, 50) * levels / 1.7
    np.testing.assert_allclose(places, np.round(places), atol=1e-9)
    assert np.max(np.abs(places - np.asarray(value) * levels / 1.7)) < 1
    nearest = many(Quantized.like(value, bits, unbiased=False), value, 2) * levels / 1.7
    assert np.max(np.abs(nearest - np.asarray(value) * levels / 1.7)) <= 0.5 + 1e-9


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", CODECS)
def test_with_feedback_a_message_is_nearer_than_nothing(name):
    rows, value = many(CODECS[name](unbiased=False), tree(), 200), flat(TREE)
    gaps = np.sum((rows - value) ** 2, axis=1)
    assert np.all(gaps < np.sum(value**2))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", CODECS)
def test_feedback_loses_nothing(name):
    class Me:
        def __init__(self, key):
            self.key = key

    codec, memory, sent = CODECS[name](unbiased=False), jax.tree.map(jnp.zeros_like, tree()), 0.0
    for number in range(6):
        message, memory = Feedback(codec)(Me(jr.key(number)), tree(), memory)
        sent = sent + flat(codec.decode(message))
    np.testing.assert_allclose(sent + flat(memory), 6 * flat(TREE), atol=1e-12)
    assert np.linalg.norm(flat(memory)) > 0.01, "something was left out"


def test_another_key_another_message_and_the_same_key_the_same():
    for make in CODECS.values():
        first, again, other = (flat(make().encode_with(jr.key(i), tree())) for i in (0, 0, 1))
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(first, other)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_what_is_not_finite_is_not_hidden(bad):
    codec, value = Quantized.like(jnp.zeros(4), 4), jnp.array([1.0, bad, 2.0, 0.0])
    assert not np.all(np.isfinite(codec.decode(codec.encode_with(jr.key(0), value))))


def test_zeros_stay_zeros_and_empty_leaves_are_no_trouble():
    for value in (jnp.zeros(3), {"a": jnp.zeros((0,)), "b": jnp.zeros(3)}):
        codec = Quantized.like(value, 3)
        assert not np.any(flat(codec.decode(codec.encode_with(jr.key(0), value))))


# ------------------------------------------------------------------ what it costs


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_types_stay_as_they_are(dtype):
    for make in CODECS.values():
        codec = make()
        codec = type(codec).like(tree(dtype), codec.k if isinstance(codec, RandomK) else codec.bits)
        back = codec.decode(codec.encode_with(jr.key(0), tree(dtype)))
        assert {leaf.dtype for leaf in jax.tree.leaves(back)} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("bits", [2, 3, 5, 8, 9, 16])
def test_bytes_of_bits(bits):
    message = Quantized.like(tree(), bits).encode_with(jr.key(0), tree())
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(message)) == -(-bits * SIZE // 8) + 3 * 4


@pytest.mark.parametrize("name", CODECS)
def test_the_ledger_has_the_bytes_of_the_messages(name):
    rows = jax.tree.map(lambda leaf: np.stack([leaf, 2 * leaf, -leaf]).astype(np.float32), TREE)
    cohort, codec = everyone(), CODECS[name]()
    with metering() as meter:
        value = cohort.deal(rows, "v")
        mean = cohort.mean(value, "v", codec=codec, key=jr.key(3))
        gathered, _ = cohort.gather(value, "v", codec=codec, key=jr.key(3))
    expected = {"random": 4 * 4 + 4, "two bits": 3 + 12, "five bits": 6 + 12}[name]
    booked = Ledger.from_counts(meter.counts)
    assert (booked.up, booked.rounds) == ({"v": 2 * N * expected}, 2)
    np.testing.assert_allclose(flat(mean), flat(jax.tree.map(lambda leaf: leaf.mean(0), gathered)), atol=1e-6)
    # Every client draws for itself.
    rows_of = [jax.tree.map(lambda leaf, i=i: leaf[i], rows) for i in range(N)]
    own = [codec.decode(codec.encode_with(jr.fold_in(jr.key(3), i), row)) for i, row in enumerate(rows_of)]
    np.testing.assert_array_equal(flat(gathered), flat(jax.tree.map(lambda *leaves: jnp.stack(leaves), *own)))


# ------------------------------------------------------------------ mistakes


def test_a_codec_that_draws_needs_a_key():
    cohort, codec = everyone(), RandomK.like(np.zeros(5, np.float32), 2)
    value = cohort.deal(np.ones((N, 5), np.float32), "v")
    memory = cohort.fed.keep(np.zeros((N, 5), np.float32))
    for call in (
        lambda: cohort.mean(value, "v", codec=codec),
        lambda: cohort.gather(value, "v", codec=codec),
        lambda: cohort.mean_with_feedback(value, memory, "v", codec),
    ):
        with pytest.raises(ValueError, match="RandomK draws what it writes: give a key, a new one in every"):
            call()
    with pytest.raises(TypeError, match=r"RandomK draws what it writes.*encode_with\(key, value\)"):
        codec.encode(np.ones(5))


@pytest.mark.parametrize("bits", [1, 17, 2.0, True, "4", None], ids=str)
def test_an_impossible_number_of_bits_is_named(bits):
    with pytest.raises(ValueError, match=r"bits is .*; it must be a whole number from 2 to 16"):
        check_bits(bits)
