"""Compressed federated averaging and FetchSGD against loops in numpy, and what they cost."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithm.baseline.compressed import CompressedFedAvg, FetchSGD
from fedbilevel.algorithm.baseline.fedavg import FedAvg
from fedbilevel.local.count_sketch import CountSketch
from fedbilevel.tree import size
from problem.narrow import clients as image_clients, problem as image_problem

N, DX, DY, STEPS, LR = 4, 2, 5, 6, 0.1


def drawn():
    return fb.Quadratic.random(jr.key(3), N, DX, DY)


def solved(algorithm, steps=STEPS, **options):
    known = drawn()
    return fb.solve(known.problem(), known.clients(), algorithm, steps, every=steps, **options)


def changes(known, y, learn_steps):
    """By how much every client's gradient steps on f_i(1, ·) move y."""
    rows = []
    for D, E, c in zip(known.D, known.E, known.c, strict=True):
        own = y.copy()
        for _ in range(learn_steps):
            own = own - LR * (D @ (own - c) + E.T @ np.ones(DX))
        rows.append(own - y)
    return np.stack(rows)


def largest(vector, k):
    out, places = np.zeros_like(vector), np.argsort(-np.abs(vector), kind="stable")[:k]
    out[places] = vector[places]
    return out


def nearest(vector, bits):
    levels, top = 2 ** (bits - 1) - 1, np.abs(vector).max()
    return np.round(vector / top * levels) * top / levels


def loop(compress, feedback=True, learn_steps=3, server_lr=0.5, steps=STEPS):
    """The recursion of `CompressedFedAvg` with everybody."""
    known = jax.tree.map(np.asarray, drawn())
    y, memory = np.zeros(DY), np.zeros((N, DY))
    for _ in range(steps):
        total = changes(known, y, learn_steps) + memory
        sent = np.stack([compress(row) for row in total])
        memory = total - sent if feedback else memory
        y = y + server_lr * sent.mean(0)
    return y


SETTINGS = {"learn_steps": 3, "server_lr": 0.5}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("options", "compress", "feedback"),
    [
        ({}, lambda v: v, True),
        ({"codec": "topk", "size": 2}, lambda v: largest(v, 2), True),
        ({"codec": "topk", "size": 2, "feedback": False}, lambda v: largest(v, 2), False),
        ({"codec": "topk", "size": DY}, lambda v: v, True),
        ({"codec": "random", "size": DY}, lambda v: v, True),
        ({"codec": "random", "size": DY, "feedback": False}, lambda v: v, False),
        ({"codec": "quantized", "size": 3}, lambda v: nearest(v, 3), True),
    ],
    ids=["none", "topk", "topk alone", "all largest", "all random", "all random alone", "three bits"],
)
def test_it_is_the_loop_in_numpy(options, compress, feedback):
    found = solved(CompressedFedAvg(fb.SGD(LR), **SETTINGS, **options))
    np.testing.assert_allclose(found.y, loop(compress, feedback), rtol=0, atol=1e-12)
    np.testing.assert_array_equal(found.x, np.ones(DX))


@pytest.mark.usefixtures("float64")
def test_uncompressed_it_is_federated_averaging():
    known = drawn()
    # FedAvg trains g, so it gets f in its place.
    problem = fb.Problem(known.problem().upper, known.problem().upper, jnp.ones(DX), jnp.zeros(DY))
    clients = fb.Clients(known.clients().upper)
    whole = fb.solve(problem, clients, FedAvg(LR, level="lower", steps=3), STEPS)
    plain = fb.solve(problem, clients, CompressedFedAvg(fb.SGD(LR), learn_steps=3), STEPS)
    np.testing.assert_allclose(plain.y, whole.y, rtol=0, atol=1e-12)
    assert (plain.ledger.up, plain.ledger.down) == (whole.ledger.up, whole.ledger.down)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("codec", [{"codec": "random", "size": 2}, {"codec": "quantized", "size": 2}])
@pytest.mark.parametrize("feedback", [True, False])
def test_what_draws_comes_near_the_uncompressed_limit(codec, feedback):
    """Draws differ between rounds and clients: with small steps they average out."""
    options = {"learn": fb.SGD(0.01), "learn_steps": 1}
    limit = solved(CompressedFedAvg(**options), 3000).y
    found = solved(CompressedFedAvg(**options, **codec, feedback=feedback), 3000).y
    # What is left is noise of the size of a step; where nothing is lost, of what clients still owe.
    assert 1e-9 < np.linalg.norm(found - limit) / np.linalg.norm(limit) < (0.02 if feedback else 0.25)


def test_clients_that_are_not_asked_keep_their_memory():
    known, algorithm = drawn(), CompressedFedAvg(fb.SGD(LR), codec="topk", size=1, cohort=2)
    fed = fb.Simulator().federation(known.problem(), known.clients())
    state, _ = jax.jit(lambda key: algorithm.step(fed, algorithm.init(fed, jr.key(0)), key))(jr.key(1))
    ids = np.asarray(fed.cohort(jr.split(jr.key(1), 3)[0], 2).ids)
    filled = np.any(np.asarray(state.memory.value) != 0, axis=1)
    assert sorted(np.flatnonzero(filled)) == sorted(ids)


@pytest.mark.parametrize(
    ("options", "bytes_up"),
    [
        ({}, 4 * DY),
        ({"codec": "topk", "size": 2}, 2 * 8),
        ({"codec": "topk", "size": 0.2}, 8),
        ({"codec": "random", "size": 2, "feedback": False}, 2 * 4 + 4),
        ({"codec": "quantized", "size": 3}, 2 + 4),
    ],
    ids=["none", "topk", "a fifth", "random", "three bits"],
)
def test_what_a_round_costs(options, bytes_up):
    spent = solved(CompressedFedAvg(fb.SGD(LR), learn_steps=3, cohort=3, **options), 2).ledger
    assert spent.rounds == 2
    assert spent.up == {"y": 2 * 3 * bytes_up}
    assert spent.down == {"x": 2 * 3 * 4 * DX, "y": 2 * 3 * 4 * DY}
    assert spent.calls == {"f_y": 2 * 3 * 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "top"}, "codec is 'top'.*did you mean 'topk'"),
        ({"codec": "topk"}, "codec is 'topk' and size is None: give `size`"),
        ({"size": 3}, "codec is 'none' and size is 3"),
        ({"codec": "quantized", "size": 0.5}, "bits is 0.5"),
        ({"codec": "random", "size": 0}, "k is 0"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        CompressedFedAvg(**options)


# ------------------------------------------------------------------ FetchSGD


def without_collisions():
    """A sketch in which every entry has a place of its own in every row."""
    sketch = CountSketch(3, 400)
    table = np.asarray(sketch.sketch(jnp.ones(DY)))
    assert np.all(np.sum(table != 0, axis=1) == DY), "take another seed"
    return {"rows": 3, "columns": 400}


def with_momentum(k, steps=STEPS, momentum=0.5, server_lr=0.4, learn_steps=2):
    """FedAvg with momentum, of which the k largest entries of what is owed are applied."""
    known = jax.tree.map(np.asarray, drawn())
    y, u, owed = np.zeros(DY), np.zeros(DY), np.zeros(DY)
    for _ in range(steps):
        u = momentum * u + changes(known, y, learn_steps).mean(0)
        owed = owed + server_lr * u
        update = largest(owed, k)
        y, owed = y + update, owed - update
    return y


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("k", [2, DY])
def test_with_large_tables_it_is_averaging_with_momentum(k):
    options = {"momentum": 0.5, "server_lr": 0.4, "learn_steps": 2}
    found = solved(FetchSGD(fb.SGD(LR), **without_collisions(), k=k, **options))
    np.testing.assert_allclose(found.y, with_momentum(k), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_with_small_tables_it_is_the_recursion_on_tables():
    sketch, known = CountSketch(3, 4), jax.tree.map(np.asarray, drawn())
    y, u, owed = np.zeros(DY), np.zeros((3, 4)), np.zeros((3, 4))
    for _ in range(STEPS):
        mean = np.mean([sketch.sketch(jnp.asarray(row)) for row in changes(known, y, 2)], axis=0)
        u = 0.9 * u + mean
        owed = owed + 0.1 * u
        update = largest(np.asarray(sketch.estimate(jnp.asarray(owed), DY)), 2)
        y, owed = y + update, owed - np.asarray(sketch.sketch(jnp.asarray(update)))
    found = solved(FetchSGD(fb.SGD(LR), 2, rows=3, columns=4, k=2, server_lr=0.1))
    np.testing.assert_allclose(found.y, y, rtol=0, atol=1e-12)
    assert np.linalg.norm(y - with_momentum(2, momentum=0.9, server_lr=0.1)) > 1e-3, "no collisions at all"


def test_what_a_round_of_fetchsgd_costs():
    spent = solved(FetchSGD(fb.SGD(LR), 3, rows=2, columns=3, k=2), 2).ledger
    assert spent.rounds == 2
    assert spent.up == {"table": 2 * N * 4 * 6}
    assert spent.down == {"update": 2 * N * 2 * 8}
    assert spent.calls == {"f_y": 2 * N * 3}


def test_mistakes_with_fetchsgd_are_named():
    with pytest.raises(ValueError, match="k is 6, but y has 5 entries"):
        solved(FetchSGD(fb.SGD(LR), 1, rows=1, columns=2, k=6))
    with pytest.raises(ValueError, match=r"momentum is 1.0; it must be at least 0 and below 1"):
        FetchSGD(fb.SGD(LR), 1, rows=1, columns=2, k=1, momentum=1.0)
    with pytest.raises(TypeError, match="cohort"):  # a newcomer could not apply what comes down
        FetchSGD(fb.SGD(LR), 1, rows=1, columns=2, k=1, cohort=2)


def test_trees_are_put_together_again():
    known = image_problem()
    run = fb.solve(known, image_clients(), FetchSGD(fb.SGD(0.1), 1, rows=3, columns=50, k=7), 2)
    assert jax.tree.map(jnp.shape, run.y) == jax.tree.map(jnp.shape, known.y0)
    moved = sum(int(np.sum(a != b)) for a, b in zip(*map(jax.tree.leaves, (run.y, known.y0)), strict=True))
    assert 7 <= moved <= 14 < size(known.y0)
