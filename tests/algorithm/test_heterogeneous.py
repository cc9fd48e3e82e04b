"""Clients that hold parts of a model: HeteroFL and its relatives."""

import itertools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithm.baseline.coordinate_rule import PruneAndGrow, _dense_where, budget, unpacked
from fedbilevel.algorithm.baseline.fedavg import FedAvg
from fedbilevel.algorithm.baseline.heterogeneous import (
    FedDST,
    FederatedDropout,
    FedRolex,
    Flash,
    HeteroFL,
    Homogeneous,
    ZeroFL,
)
from fedbilevel.algorithm.baseline.mask_rule import Parts, Random, Rolling, Share
from fedbilevel.problem.oracle import Client
from fedbilevel.problem.submodel import kernels_in
from fedbilevel.selection import best
from fedbilevel.tree import size
from problem.narrow import HIDDEN, clients, problem, slope

RATIOS = (1.0, 0.5, 0.25)
STEPS = 2
LEARN = fb.SGD(0.5)


def solved(algorithm, steps=STEPS, **options):
    return fb.solve(problem(), clients(), algorithm, steps, every=steps, **options)


def assert_close(a, b, tolerance=1e-12):
    for own, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=tolerance)


def change(a, b):
    return max(
        float(jnp.max(jnp.abs(p - q))) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.usefixtures("float64")
def test_with_whole_models_it_is_federated_averaging():
    part = solved(HeteroFL(LEARN, ratios=1.0, learn_steps=3))
    whole = solved(FedAvg(0.5, level="lower", steps=3))
    assert_close(part.y, whole.y)
    assert change(part.y, problem().y0) > 0.1
    assert (part.ledger.down, part.ledger.up) == (whole.ledger.down, whole.ledger.up)
    assert part.ledger.rounds == STEPS
    assert part.ledger.calls == {"f_y": 3 * 3 * STEPS}


def by_hand(rounds=STEPS, lr=0.5):
    """HeteroFL with slices in the place of masks: sums and numbers of holders, client by client."""
    y, gradient = {name: np.asarray(leaf) for name, leaf in problem().y0.items()}, jax.jit(slope)
    for _ in range(rounds):
        total, holders = ({name: np.zeros_like(leaf) for name, leaf in y.items()} for _ in range(2))
        for client, ratio in enumerate(RATIOS):
            k = int(HIDDEN * ratio)
            places = {"bias": np.s_[:k], "first": np.s_[:, :k], "second": np.s_[:k]}
            theta = {name: np.zeros_like(leaf) for name, leaf in y.items()}
            for name, place in places.items():
                theta[name][place] = y[name][place]
            for _ in range(2):
                direction = gradient(theta, client)
                for name, place in places.items():
                    theta[name][place] -= lr * np.asarray(direction[name])[place]
            for name, place in places.items():
                total[name][place] += (theta[name] - y[name])[place]
                holders[name][place] += 1
        y = {name: y[name] + total[name] / np.maximum(holders[name], 1) for name in y}
    return y


@pytest.mark.usefixtures("float64")
def test_numbers_are_averaged_over_those_that_hold_them():
    result = solved(HeteroFL(LEARN, ratios=RATIOS, learn_steps=2))
    assert_close(result.y, by_hand())
    assert change(result.y, problem().y0) > 0.1


def test_a_mean_over_the_holders_or_over_all():
    """Two clients of three hold the first number, at 3 and 6; nobody holds the second."""
    y, mean = jnp.array([1.0, 2.0]), {"y": jnp.array([3.0, 0.0]), "held": jnp.array([2 / 3, 0.0])}
    np.testing.assert_allclose(HeteroFL(LEARN)._averaged(y, mean), [(3 + 6) / 2, 2.0], rtol=1e-6)
    over_all = HeteroFL(LEARN, average="all")._averaged(y, mean)
    np.testing.assert_allclose(over_all, [1 + (2 + 5) / 3, 2.0], rtol=1e-6)


METHODS = {
    "HeteroFL": HeteroFL,
    "FederatedDropout": FederatedDropout,
    "FedRolex": FedRolex,
    "ZeroFL": ZeroFL,
    "FedDST": lambda learn, **options: FedDST(learn, every=1, regrown=0.5, **options),
    "Flash": lambda learn, **options: Flash(learn, warm_steps=2, **options),
}
WEIGHTS = 8 * 5
"""Numbers of the tiny model that are no biases."""


@pytest.mark.parametrize("method", METHODS)
def test_all_methods_cost_the_same_at_the_same_ratios(method):
    """But for what names single weights, a bit for each; and ZeroFL gets the whole model."""
    ratios = (1.0, 0.5, 0.5)
    result = solved(METHODS[method](LEARN, ratios=ratios, learn_steps=2))
    kernels = kernels_in(problem())
    parts, whole = sum(kernels.cost(ratio)["bytes"] for ratio in ratios), 3 * kernels.cost(1.0)["bytes"]
    assert parts == 4 * (48 + 24 + 24)
    named = 3 * WEIGHTS // 8 if method in ("ZeroFL", "FedDST") else 0
    ledger = result.ledger
    assert ledger.down["y"] == STEPS * (whole if method == "ZeroFL" else parts)
    assert ledger.up["y"] == STEPS * (parts + named)
    assert ledger.rounds == STEPS + (method == "Flash")
    assert ledger.calls["f_y"] == {"FedDST": STEPS * 3 * 3, "Flash": STEPS * 3 * 2 + 3 * 2}.get(
        method, STEPS * 3 * 2
    )
    assert change(result.y, problem().y0) > 0.01
    if method in ("FedDST", "Flash"):
        masks = jax.vmap(lambda bits: unpacked(bits, result.y))(result.state.memory.value)
        numbers = [
            size([leaf[i][leaf[i] != 0] for leaf in map(np.asarray, jax.tree.leaves(masks))])
            for i in range(3)
        ]
        assert numbers == [48, 24, 24]
    if method == "Flash":
        assert ledger.down["warm"] == whole
        assert ledger.down["masks"] == 3 * WEIGHTS // 8
        assert ledger.up["warm"] == whole + 3 * 4 * 2 * 3  # the model, and shares of 2 levels and 3 leaves


def test_the_smallest_homogeneous_model_is_the_small_model_alone():
    result = solved(Homogeneous(LEARN, 0.25, learn_steps=2))
    kernels = kernels_in(problem())
    assert np.any(result.y["first"] != 0, axis=0).tolist() == [True] * 2 + [False] * 6
    assert not np.any(result.y["second"][2:])
    assert result.ledger.up["y"] == STEPS * 3 * kernels.cost(0.25)["bytes"]


def test_a_rolling_window_covers_every_kernel_equally():
    for count in (1, 3, 8):
        times = sum(best(Rolling().scores(jr.key(0), HIDDEN, t), count).astype(int) for t in range(HIDDEN))
        assert times.tolist() == [count] * HIDDEN
    third = best(Rolling().scores(jr.key(0), HIDDEN, 6), 3)
    assert np.flatnonzero(third).tolist() == [0, 6, 7]


def test_dropout_draws_anew_in_every_round_and_client():
    kernels, y0 = kernels_in(problem()), problem().y0
    share = Share(Parts(kernels, (0.5, 0.5, 0.25)), (), 0)

    def mask(id, key):
        me = Client(problem(), clients(), id, id, jr.fold_in(key, id))
        return Random().mask(me, (), y0, share)["bias"]

    masks = [np.asarray(mask(id, jr.key(round))) for id in range(3) for round in range(4)]
    assert [int(own.sum()) for own in masks] == [4] * 8 + [2] * 4
    assert len({tuple(own) for own in masks[:8]}) > 4


def test_a_budget_of_single_weights_is_that_of_the_narrow_model():
    kernels = kernels_in(problem())
    assert budget(kernels, 1.0) == (8, 24, 16)
    assert budget(kernels, 0.5) == (8, 10, 6)  # 24 in all; all biases, and 16 weights as 12 : 8
    with pytest.raises(ValueError, match=r"at the width ratio 0\.125 there is no room"):
        budget(kernels, 0.125)


def test_the_smallest_weights_make_room_for_the_largest_slopes():
    rule = PruneAndGrow(regrown=0.5, until=10)
    y, old = [jnp.array([5.0, 0.1, 0.0, 9.0, 3.0, 9.0])], [jnp.array([1.0, 1, 1, 0, 1, 0])]
    slopes, counts = [jnp.array([9.0, 9.0, 0.0, 1.0, 0.0, 2.0])], jnp.array([4])
    exchanged = rule._exchanged(y, old, slopes, counts, 0)[0]
    assert exchanged.tolist() == [1, 1, 0, 0, 1, 1]  # 5 and 3 stay; 0.1 comes back, its slope is large
    assert rule._exchanged(y, old, slopes, counts, 10)[0].tolist() == old[0].tolist()


def test_masks_are_dense_where_the_warm_up_says():
    kernels, y = kernels_in(problem()), problem().y0
    first, second = (_dense_where(y, shares, kernels, 0.5) for shares in ([0, 0.75, 0.25], [0, 0.25, 0.75]))
    assert [int(first[name].sum()) for name in ("bias", "first", "second")] == [8, 12, 4]
    assert [int(second[name].sum()) for name in ("bias", "first", "second")] == [8, 4, 12]
    kept = np.abs(y["second"])[np.asarray(first["second"]) > 0]
    assert kept.min() > np.abs(y["second"])[np.asarray(first["second"]) == 0].max()


def test_clients_of_a_sampled_cohort_are_billed_by_their_own_parts():
    """Six rounds with one client each: the bytes are a sum of six parts, and not all are alike."""
    result = solved(HeteroFL(LEARN, ratios=RATIOS, learn_steps=1, cohort=1), steps=6)
    sizes = [kernels_in(problem()).cost(ratio)["bytes"] for ratio in RATIOS]
    sums = {sum(chosen) for chosen in itertools.product(sizes, repeat=6)}
    assert result.ledger.up["y"] == result.ledger.down["y"]
    assert result.ledger.up["y"] in sums - {6 * own for own in sizes}


def test_wrong_settings_are_explained():
    with pytest.raises(ValueError, match="average is 'mean'"):
        HeteroFL(LEARN, average="mean")
    with pytest.raises(ValueError, match="ratios has 2 numbers, but there are 3 clients"):
        solved(HeteroFL(LEARN, ratios=(1.0, 0.5)))
    with pytest.raises(ValueError, match="every is 0"):
        FedDST(LEARN, every=0)
