"""Laws of Top-K and of error feedback: any tree, any k."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from fedbilevel import Clients, Problem, Simulator
from fedbilevel.fed import Dense
from fedbilevel.fed.codec import Feedback, TopK

FEW = settings(max_examples=20, deadline=None)
FEWER = settings(max_examples=5, deadline=None)
N = 3
# A few forms only: JAX compiles its operations anew for every shape.
FORMS = [
    {"a": ((5,), np.float32)},
    {"a": ((2, 3), np.float32), "b": ((), np.float32), "c": ((1, 2, 1), np.float32)},
    {"a": ((4,), np.float16), "b": ((2, 2), np.float32), "c": ((0,), np.float32)},
    {"a": ((3,), np.int32), "b": ((2,), np.float32)},
]
# Sums and differences of these are exact in every one of the types.
numbers = st.integers(-50, 50)


def nothing(x, y, samples):
    return jnp.mean(samples) * 0.0


EVERYONE = (
    Simulator()
    .federation(Problem(nothing, nothing, x0=0.0, y0=0.0), Clients(lower=jnp.zeros((N, 1))))
    .everyone
)


def trees(form, *leading):
    parts = {name: hnp.arrays(dtype, (*leading, *s), elements=numbers) for name, (s, dtype) in form.items()}
    return st.fixed_dictionaries(parts)


def flat(tree):
    return np.concatenate([np.ravel(leaf).astype(float) for leaf in jax.tree.leaves(tree)])


def size_of(form):
    return sum(int(np.prod(shape)) for shape, _ in form.values())


@st.composite
def compressed(draw, leading=(), count=1):
    """A form, how many entries are sent, and some trees of that form."""
    form = draw(st.sampled_from(FORMS))
    k = draw(st.sampled_from([1, 2, size_of(form) - 1]))
    return form, k, [draw(trees(form, *leading)) for _ in range(count)]


def codec_of(form, k):
    return TopK.like({name: np.zeros(shape, dtype) for name, (shape, dtype) in form.items()}, k)


@FEW
@given(compressed())
def test_what_arrives_is_the_k_largest_and_zero_elsewhere(drawn):
    form, k, (tree,) = drawn
    codec = codec_of(form, k)
    sent = codec.decode(codec.encode(tree))
    before, after = flat(tree), flat(sent)
    kept = after != 0
    np.testing.assert_array_equal(after[kept], before[kept])
    # Ties and zeros leave a choice of places, but none of magnitudes.
    largest = np.sort(np.abs(before))[::-1][: codec.k]
    np.testing.assert_array_equal(np.sort(np.abs(after))[::-1][: codec.k], largest)
    assert kept.sum() == np.count_nonzero(largest)


@FEW
@given(compressed())
def test_shapes_types_and_bytes_are_those_promised(drawn):
    form, k, (tree,) = drawn
    codec = codec_of(form, k)
    message = codec.encode(tree)
    sent = codec.decode(message)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), sent) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), tree
    )
    width = jnp.result_type(*jax.tree.leaves(tree)).itemsize
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(message)) == codec.k * (width + 4)


@FEW
@given(compressed())
def test_sending_everything_is_the_identity(drawn):
    form, _, (tree,) = drawn
    whole = codec_of(form, size_of(form))
    back = whole.decode(whole.encode(tree))
    assert all(np.array_equal(back[name], tree[name]) for name in tree)


@FEW
@given(compressed())
def test_sending_again_changes_nothing(drawn):
    form, k, (tree,) = drawn
    codec = codec_of(form, k)
    once = codec.decode(codec.encode(tree))
    np.testing.assert_array_equal(flat(codec.decode(codec.encode(once))), flat(once))


@FEWER
@given(compressed(count=3))
def test_feedback_loses_nothing(drawn):
    """The sum of all that was sent, and the memory, is the sum of all values."""
    form, k, values = drawn
    codec = codec_of(form, k)
    memory, sent = jax.tree.map(np.zeros_like, values[0]), 0.0
    for value in values:
        message, memory = Feedback(codec)(None, value, memory)
        sent = sent + flat(codec.decode(message))
        assert np.count_nonzero(flat(codec.decode(message))) <= codec.k
    np.testing.assert_array_equal(sent + flat(memory), sum(flat(value) for value in values))


@FEWER
@given(compressed(leading=(N,), count=2))
def test_the_mean_with_feedback_loses_nothing(drawn):
    """Likewise for the averages that the server gets, and the mean of the clients' memories."""
    form, k, values = drawn
    codec = codec_of(form, k)
    memory, received = EVERYONE.fed.keep(jax.tree.map(np.zeros_like, values[0])), 0.0
    for value in values:
        mean, memory = EVERYONE.mean_with_feedback(EVERYONE.deal(value, "v"), memory, "v", codec)
        received = received + flat(mean)
    left = flat(jax.tree.map(lambda leaf: np.mean(np.asarray(leaf, float), axis=0), memory.value))
    total = sum(flat(jax.tree.map(lambda leaf: np.mean(leaf, axis=0, dtype=float), v)) for v in values)
    np.testing.assert_allclose(received + left, total, rtol=1e-5, atol=0.1 if has_half(values[0]) else 1e-4)


def has_half(tree):
    """Averages of float16 rows are rounded to float16: of numbers below 256, to an eighth."""
    return any(leaf.dtype == np.float16 for leaf in tree.values())


@FEWER
@given(compressed(leading=(N,)))
def test_a_codec_that_keeps_all_leaves_no_memory_and_the_plain_mean(drawn):
    *_, (tree,) = drawn
    value, memory = EVERYONE.deal(tree, "v"), EVERYONE.fed.keep(jax.tree.map(np.zeros_like, tree))
    mean, after = EVERYONE.mean_with_feedback(value, memory, "v", Dense())
    assert not np.any(flat(after.value))
    np.testing.assert_array_equal(flat(mean), flat(EVERYONE.mean(value, "v")))
