"""FedSep whose clients train the kernels that they need most: what is held, kept, and billed."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithm.baseline.fedavg import FedAvg
from fedbilevel.algorithm.fedsep import FedSep
from fedbilevel.local import Submodel
from fedbilevel.problem.submodel import kernels_in
from problem.narrow import CLASSES, HIDDEN, INPUTS, TwoLayers, clients, problem

RATIOS = (1.0, 0.5, 0.25)
CLIENTS = len(RATIOS)
ROUNDS = 3
LEARN_STEPS, MASK_STEPS = 2, 3


def method(ratios, learn_steps=LEARN_STEPS, cohort=None, **options):
    decoder = Submodel(ratios, **{"mask_steps": MASK_STEPS, "mask_lr": 0.1} | options)
    return FedSep(decoder, fb.SGD(0.5), learn_steps=learn_steps, cohort=cohort)


def solved(algorithm, steps=ROUNDS, data=None):
    return fb.solve(problem(), clients() if data is None else data, algorithm, steps, every=steps)


def row(stacked, id):
    """What one client has."""
    return jax.tree.map(lambda leaf: leaf[id], stacked)


def held(result):
    """Which hidden units each client holds, `(clients, units)`."""
    found = kernels_in(problem())
    return np.stack([np.asarray(found.present(row(result.state.y.value, i))[0]) for i in range(CLIENTS)])


def assert_same(a, b):
    for own, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.usefixtures("float64")
def test_with_whole_models_it_is_federated_averaging():
    part, whole = solved(method(1.0, 3)), solved(FedAvg(0.5, level="lower", steps=3))
    for own, other in zip(jax.tree.leaves(part.x), jax.tree.leaves(whole.y), strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-12)
    assert float(jnp.max(jnp.abs(part.x["first"] - problem().y0["first"]))) > 0.1
    assert (part.ledger.down["x"], part.ledger.up["x"]) == (whole.ledger.down["y"], whole.ledger.up["y"])


def test_the_whole_model_comes_down_and_sub_models_go_up():
    result = solved(method(RATIOS))
    kernels = kernels_in(problem())
    parts = [kernels.cost(ratio)["bytes"] for ratio in RATIOS]
    assert parts == [4 * 48, 4 * 24, 4 * 12]
    assert result.ledger.down == {"x": ROUNDS * CLIENTS * parts[0]}
    assert result.ledger.up == {"x": ROUNDS * sum(parts)}
    assert result.ledger.rounds == ROUNDS
    refreshed = 2  # the first round and the third
    assert result.ledger.calls == {"f_y": CLIENTS * (ROUNDS * LEARN_STEPS + refreshed * MASK_STEPS)}
    assert held(result).sum(axis=1).tolist() == [HIDDEN, HIDDEN // 2, HIDDEN // 4]


@pytest.mark.usefixtures("float64")
def test_one_client_changes_its_own_kernels_and_its_own_mask():
    algorithm = method(RATIOS, cohort=1)
    fed, kernels, seen = fb.Simulator().federation(problem(), clients()), kernels_in(problem()), set()
    before, step = algorithm.init(fed, jr.key(9)), jax.jit(lambda s, k: algorithm.step(fed, s, k)[0])
    for seed in range(4):
        after = step(before, jr.key(seed))
        (id,) = np.flatnonzero(np.asarray(after.memory.value["rounds"])).tolist()
        own = kernels.present(row(after.y.value, id))[0]
        moved = jax.tree.map(lambda p, q: p != q, after.x, before.x)
        assert moved["bias"].tolist() == own.tolist()
        assert moved["second"].all(axis=1).tolist() == moved["second"].any(axis=1).tolist() == own.tolist()
        assert int(own.sum()) == HIDDEN * RATIOS[id]
        for other in set(range(CLIENTS)) - {id}:
            assert_same(row(before.memory.value, other), row(after.memory.value, other))
        seen.add(id)
    assert len(seen) > 1


def test_masks_follow_the_data_and_the_ratio():
    options = {"mask_steps": 40, "penalty": 1.0}
    own = held(solved(method(0.5, **options), 1))
    assert own.sum(axis=1).tolist() == [HIDDEN // 2] * CLIENTS
    assert len({tuple(client) for client in own}) > 1

    first = jax.tree.map(lambda leaf: leaf[: len(leaf) // CLIENTS], clients().upper.flat)
    copies = fb.Clients(jax.tree.map(lambda leaf: np.stack([np.asarray(leaf)] * CLIENTS), first))
    same = held(solved(method((0.5, 0.5, 0.25), **options), 1, copies))
    assert same[0].tolist() == same[1].tolist() == own[0].tolist(), "the same data, another mask"
    assert same[2].sum() == HIDDEN // 4


def test_masks_are_learnt_in_every_second_round():
    algorithm = method(RATIOS, refresh=2)
    fed = fb.Simulator().federation(problem(), clients())
    state, step = algorithm.init(fed, jr.key(0)), jax.jit(lambda s, k: algorithm.step(fed, s, k)[0])
    for number in range(4):
        new = step(state, jr.key(number))
        both = (jax.tree.leaves(own.memory.value["phi"]) for own in (state, new))
        changes = [np.abs(p - q).max() for p, q in zip(*both, strict=True)]
        assert (max(changes) > 0) == (number % 2 == 0)
        state = new
    assert state.memory.value["rounds"].tolist() == [4] * CLIENTS


def test_wrong_numbers_of_ratios_are_explained():
    with pytest.raises(ValueError, match="ratios has 2 numbers, but there are 3 clients"):
        solved(method((1.0, 0.5)), 1)


def test_the_server_model_is_what_is_tested():
    """The metrics look at x, whatever y is."""
    inputs = np.random.default_rng(1).normal(size=(9, INPUTS))
    labels = np.arange(9) % CLASSES
    known = fb.ServerModel(
        TwoLayers(), inputs=(INPUTS,), classes=CLASSES, test={"inputs": inputs, "labels": labels}
    )
    y = known.y0
    logits = np.tanh(inputs @ np.asarray(y["first"]) + np.asarray(y["bias"])) @ np.asarray(y["second"])
    right = np.mean(np.argmax(logits, axis=-1) == labels)
    assert 0 < right < 1
    accuracy = known.metrics["test_accuracy"]
    assert float(accuracy(y, ())) == pytest.approx(right)
    opposite = y | {"second": -y["second"]}
    assert float(accuracy(opposite, y)) == pytest.approx(1 - right)
