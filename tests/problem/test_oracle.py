"""A client's oracles against dense derivatives of its own objective: trees, padding, counts."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fedbilevel as fb
from fedbilevel.adjoint import ConjugateGradients, own_hypergradient
from fedbilevel.data.batches import Batch
from fedbilevel.fed.ledger import Ledger, as_arrays, metering
from fedbilevel.problem import Client
from fedbilevel.problem.base import ProblemError

pytestmark = pytest.mark.usefixtures("float64")

SIZES = (3, 5, 2)


def upper(x, y, samples):
    score = jnp.tanh(samples["a"] @ y["w"] + y["b"])
    return jnp.mean((score - samples["t"]) ** 2 * (1 + x["weight"][0] ** 2)) + jnp.sum(x["shift"] * y["w"])


def lower(x, y, samples):
    gap = samples["a"] @ y["w"] + y["b"] - samples["t"] * x["weight"][1]
    penalty = jnp.exp(x["weight"][0]) * jnp.sum((y["w"] - x["shift"]) ** 2) + y["b"] ** 2
    return jnp.mean(gap**2 + jnp.cos(gap) / 2) + penalty


def data_of(size, seed):
    draw = np.random.default_rng(seed)
    return {"a": draw.normal(size=(size, 3)), "t": draw.normal(size=size)}


OWN = {"lower": [data_of(n, i) for i, n in enumerate(SIZES)]}
OWN["upper"] = [data_of(n + 1, 10 + i) for i, n in enumerate(SIZES)]
X = {"weight": np.array([0.3, -0.7]), "shift": np.array([0.2, 0.1, -0.4])}
Y = {"w": np.array([0.5, -1.0, 2.0]), "b": np.array(0.3)}
V = {"w": np.array([1.0, 0.3, -0.6]), "b": np.array(-1.2)}


def client(place, batch_size=None, block=None):
    problem = fb.Problem(upper, lower, X, Y, block=block)
    clients = fb.Clients(OWN["lower"], OWN["upper"], batch_size=batch_size)
    return Client(problem, clients, place, place, jax.random.key(place))


def oracles(me, batches):
    """Every oracle once, by name."""
    return {
        "f": me.f(X, Y, batches["upper"]),
        "f_x": me.f_x(X, Y, batches["upper"]),
        "f_y": me.f_y(X, Y, batches["upper"]),
        "f_x_and_y": me.f_x_and_y(X, Y, batches["upper"]),
        "g": me.g(X, Y, batches["lower"]),
        "g_x": me.g_x(X, Y, batches["lower"]),
        "g_x_and_y": me.g_x_and_y(X, Y, batches["lower"]),
        "g_y": me.g_y(X, Y, batches["lower"]),
        "g_yy": me.g_yy(X, Y, V, batches["lower"]),
        "g_xy": me.g_xy(X, Y, V, batches["lower"]),
        "g_xy_and_yy": me.g_xy_and_yy(X, Y, V, batches["lower"]),
    }


def flat(tree):
    return np.asarray(ravel_pytree(tree)[0])


@jax.jit
def dense(upper_data, lower_data):
    """The same from dense derivatives of flat vectors, on samples that are all there is."""
    x, of_x = ravel_pytree(X)
    y, of_y = ravel_pytree(Y)
    v, _ = ravel_pytree(V)

    def f(x, y):
        return upper(of_x(x), of_y(y), upper_data)

    def g(x, y):
        return lower(of_x(x), of_y(y), lower_data)

    H, J = jax.hessian(g, 1)(x, y), jax.jacobian(jax.grad(g, 1), 0)(x, y)
    f_x, f_y = jax.grad(f, 0)(x, y), jax.grad(f, 1)(x, y)
    return {
        "f": f(x, y),
        "f_x": f_x,
        "f_y": f_y,
        "f_x_and_y": jnp.concatenate([f_x, f_y]),
        "g": g(x, y),
        "g_x": jax.grad(g, 0)(x, y),
        "g_x_and_y": jnp.concatenate([jax.grad(g, 0)(x, y), jax.grad(g, 1)(x, y)]),
        "g_y": jax.grad(g, 1)(x, y),
        "g_yy": H @ v,
        "g_xy": J.T @ v,
        "g_xy_and_yy": jnp.concatenate([J.T @ v, H @ v]),
        "hypergradient": f_x - J.T @ jnp.linalg.solve(H, f_y),
    }


@functools.partial(jax.jit, static_argnames="block")
def answers(place, block=None):
    """All oracles of one client on all of its data, which are padded to the largest client's size."""
    me = client(place, block=block)
    batches = {level: me.batch(level, jax.random.key(0)) for level in ("upper", "lower")}
    out = oracles(me, batches)
    solver, key = ConjugateGradients(8), jax.random.key(0)
    own = own_hypergradient(me, solver, X, Y, batches["upper"], key=key, series_key=key)
    return {**out, "hypergradient": own}, {level: batch.weight for level, batch in batches.items()}


@pytest.mark.parametrize("place", range(len(SIZES)))
@pytest.mark.parametrize("block", [None, 2])
def test_oracles_are_the_derivatives_of_the_clients_own_objective(place, block):
    """Unequal sizes: a full batch is padded and weighted, and must not show it; nor must blocks of samples.

    Blocks of two: the last is one row, and the smallest client has blocks that are padding alone.
    """
    found, weights = answers(place, block)
    assert len(weights["lower"]) == max(SIZES)
    assert np.count_nonzero(weights["lower"]) == SIZES[place]
    expected = dense(OWN["upper"][place], OWN["lower"][place])
    for name, value in expected.items():
        assert np.allclose(flat(found[name]), value, rtol=1e-12, atol=1e-12), name
    elsewhere = dense(OWN["upper"][(place + 1) % 3], OWN["lower"][(place + 1) % 3])
    for name, value in elsewhere.items():
        assert not np.allclose(flat(found[name]), value, rtol=1e-3, atol=1e-3), name


def test_answers_have_the_shape_of_the_variables():
    found, _ = answers(0)
    like = {"f_x": X, "f_y": Y, "g_x": X, "g_y": Y, "g_yy": Y, "g_xy": X}
    like |= dict.fromkeys(("f_x_and_y", "g_x_and_y", "g_xy_and_yy"), (X, Y))
    for name, tree in like.items():
        assert jax.tree.map(jnp.shape, found[name]) == jax.tree.map(jnp.shape, tree), name
        assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(found[name]))


def test_fused_forms_equal_the_separate_ones():
    found, _ = answers(1)
    for fused, parts in {"f_x_and_y": ("f_x", "f_y"), "g_xy_and_yy": ("g_xy", "g_yy")}.items():
        for ours, theirs in zip(found[fused], parts, strict=True):
            assert np.allclose(flat(ours), flat(found[theirs]), rtol=1e-13, atol=1e-13)


def test_a_minibatch_is_the_mean_over_its_samples():
    """Batches of two: client 2 has just two samples and uses both; the others draw with replacement."""
    for place in (0, 2):
        me = client(place, batch_size=2)
        batch = me.batch("lower", jax.random.key(5))
        samples = jax.tree.map(np.asarray, batch.samples)
        assert np.allclose(me.g(X, Y, batch), lower(X, Y, samples), rtol=1e-13)
        own = OWN["lower"][place]
        assert {tuple(row) for row in samples["a"]} <= {tuple(row) for row in own["a"]}
        if place == 2:
            assert np.array_equal(samples["a"], own["a"])


@pytest.mark.parametrize("vectors", [2, 5])
def test_blocks_of_samples_change_nothing(vectors):
    """On a minibatch without weights, for the oracles of many vectors; five are multiplied all at once."""
    samples = data_of(7, 5)
    stack = jax.tree.map(lambda leaf: np.stack([leaf * (i + 1) for i in range(vectors)]), V)

    def products(block):
        me, batch = client(0, block=block), Batch(samples, count=7)
        directions = jax.tree.map(lambda leaf: np.stack([leaf, leaf**2]), X)
        many = me.g_xy_each(X, Y, (stack,), batch), me.g_yy_each(X, Y, (stack,), batch)
        both = me.g_xy_and_yy_each(X, Y, (stack, stack), batch)
        return me.g_y_change(X, V, Y, batch), me.g_yx_each(X, Y, directions, batch), many, both

    whole, parts = flat(products(None)), flat(products(3))
    np.testing.assert_allclose(parts, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block", [0, -1])
def test_a_block_is_a_number_of_samples(block):
    with pytest.raises(ProblemError, match="block is"):
        client(0, block=block)


class Cubed(eqx.Module):
    """The cube of a mean, which is no mean over samples."""

    def __call__(self, x, y, samples):
        return jnp.mean(samples["t"] * y["b"]) ** 3

    def on_weighted(self, x, y, samples, weight):
        return jnp.dot(weight, samples["t"] * y["b"]) ** 3


def test_what_is_no_mean_over_samples_is_not_divided():
    batch = Batch(data_of(6, 5), count=6)
    blocks = jax.tree.map(lambda leaf: leaf.reshape(3, 2, *leaf.shape[1:]), batch.samples)
    wrong = jnp.mean(jax.vmap(lambda block: Cubed()(X, Y, block))(blocks))
    problem = fb.minimax(Cubed(), X, Y, block=2)
    clients = fb.Clients(OWN["lower"], OWN["upper"])
    me = Client(problem, clients, 0, 0, jax.random.key(0))
    expected = Cubed()(X, Y, batch.samples)
    assert np.allclose([me.f(X, Y, batch), -me.g(X, Y, batch)], expected, rtol=1e-14)
    assert abs(wrong - expected) > 0.1 * abs(expected)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("f", {"f": 1}),
        ("f_x", {"f_x": 1}),
        ("f_y", {"f_y": 1}),
        ("f_x_and_y", {"f_x": 1, "f_y": 1}),
        ("g", {"g": 1}),
        ("g_y", {"g_y": 1}),
        ("g_yy", {"g_yy": 1}),
        ("g_xy", {"g_xy": 1}),
        ("g_xy_and_yy", {"g_xy": 1, "g_yy": 1}),
    ],
)
def test_every_call_is_counted_once_with_the_samples_it_reads(name, kinds):
    """A fused call is two calls that read one batch; a padded batch has the samples that count."""
    place = 2
    me = client(place)
    level = "upper" if name.startswith("f") else "lower"
    batch = me.batch(level, jax.random.key(0))
    vectors = [V] if name.startswith(("g_yy", "g_xy")) else []

    @jax.jit
    def booked():
        with metering() as meter:
            getattr(me, name)(X, Y, *vectors, batch)
        return as_arrays(meter.counts)

    ledger = Ledger.from_counts(booked())
    assert ledger.calls == kinds
    assert ledger.samples == len(OWN[level][place]["t"])
    assert ledger.rounds == 0
    assert ledger.bytes == 0
