"""ZeroFL, FedDST and Flash by hand: a round of each in plain numpy, client by client."""

import functools
import math

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithm.baseline.coordinate_rule import budget, unpacked
from fedbilevel.problem.submodel import kernels_in
from problem.narrow import clients, problem, slope

RATIOS = (1.0, 0.5, 0.5)
CLIENTS, STEPS, LR, WARM_STEPS, REGROWN = 3, 2, 0.5, 3, 0.5
NAMES = ("bias", "first", "second")
WEIGHTS = ("first", "second")

pytestmark = pytest.mark.usefixtures("float64")


def seen_by_round(method, rounds):
    """The results before the first round, and after each."""
    seen = []
    fb.solve(problem(), clients(), method, rounds, every=1, callback=lambda now: seen.append(now.result()))
    return seen


def arrays(y):
    return {name: np.asarray(leaf) for name, leaf in y.items()}


def top(scores, count):
    """1 at the so many largest scores, the first of equals."""
    mask = np.zeros(scores.size)
    mask[np.argsort(-scores.ravel(), kind="stable")[:count]] = 1
    return mask.reshape(scores.shape)


@functools.cache
def budget_of(ratio):
    """How many numbers of each leaf a client of this width holds."""
    return budget(kernels_in(problem()), ratio)


def counts(client):
    return dict(zip(NAMES, budget_of(RATIOS[client]), strict=True))


def largest(y, client):
    return {name: top(np.abs(y[name]), counts(client)[name]) for name in NAMES}


@pytest.fixture(scope="module")
def gradient():
    compiled = jax.jit(slope)
    return lambda y, client: arrays(compiled(y, client))


def product(mask, y):
    return {name: mask[name] * y[name] for name in NAMES}


def averaged(y, trained):
    """The mean of every number over those who sent it; `trained` are pairs (θ, what is sent)."""
    new = {}
    for name in NAMES:
        total = sum(sent[name] * (theta[name] - y[name]) for theta, sent in trained)
        new[name] = y[name] + total / np.maximum(sum(sent[name] for _, sent in trained), 1)
    return new


def assert_close(found, expected):
    for name in NAMES:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-12)


def test_a_round_of_zerofl(gradient):
    before, after = seen_by_round(fb.ZeroFL(fb.SGD(LR), ratios=RATIOS, learn_steps=STEPS), 1)
    y, trained, dense = arrays(before.y), [], []
    for client in range(CLIENTS):
        theta, other = dict(y), dict(y)
        for _ in range(STEPS):
            at_largest, everywhere = (
                gradient(product(largest(theta, client), theta), client),
                gradient(other, client),
            )
            theta = {name: theta[name] - LR * at_largest[name] for name in NAMES}
            other = {name: other[name] - LR * everywhere[name] for name in NAMES}
        trained.append((theta, largest(theta, client)))
        dense.append((other, largest(other, client)))
    assert_close(after.y, averaged(y, trained))
    gaps = [np.max(np.abs(averaged(y, dense)[name] - after.y[name])) for name in NAMES]
    assert max(gaps) > 0.01, "what the loss sees does not matter here"


def mask_kept(seen, client):
    """What a client has kept of its mask, one bit for each weight, as a mask."""
    return unpacked(seen.state.memory.value[client], problem().y0)


def exchanged(y, old, slopes, client, time, until):
    """The smallest held weights make room for those of the largest slope."""
    falling, new = (1 + math.cos(math.pi * time / until)) / 2, {}
    for name, count in counts(client).items():
        stay = count - math.floor(REGROWN * falling * count)
        survivors = top(np.where(old[name] > 0, np.abs(y[name]), -1), stay)
        new[name] = top(np.where(survivors > 0, np.inf, np.abs(slopes[name])), count)
    return new


def test_a_round_of_feddst_in_which_masks_change(gradient):
    method = fb.FedDST(fb.SGD(LR), REGROWN, until=5, every=1, ratios=RATIOS, learn_steps=STEPS)
    _, before, after = seen_by_round(method, 2)
    y, trained, grown = arrays(before.y), [], 0
    for client in range(CLIENTS):
        old, kept = (arrays(mask_kept(seen, client)) for seen in (before, after))
        assert {name: int(old[name].sum()) for name in NAMES} == counts(client)
        new = exchanged(y, old, gradient(product(old, y), client), client, 1, 5)
        theta = product(new, product(old, y))  # what has grown starts at zero: its values did not come down
        for _ in range(STEPS):
            direction = gradient(theta, client)
            theta = {name: theta[name] - LR * new[name] * direction[name] for name in NAMES}
        trained.append((theta, new))
        grown += sum(int(np.sum(new[name] > old[name])) for name in NAMES)
        for name in NAMES:
            np.testing.assert_array_equal(kept[name], new[name])
    assert grown > 2
    assert_close(after.y, averaged(y, trained))


def warmed_up(y, gradient, who=range(CLIENTS)):
    """The mean of whole models after some steps, and for every width the mean shares of the leaves."""
    models, shares = [], {ratio: [] for ratio in set(RATIOS)}
    for client in who:
        theta = dict(y)
        for _ in range(WARM_STEPS):
            direction = gradient(theta, client)
            theta = {name: theta[name] - LR * direction[name] for name in NAMES}
        models.append(theta)
        sizes = np.abs(np.concatenate([theta[name].ravel() for name in WEIGHTS]))
        for ratio in shares:
            chosen, end = top(sizes, held_weights(ratio)), theta["first"].size
            shares[ratio].append(np.array([chosen[:end].sum(), chosen[end:].sum()]) / held_weights(ratio))
    mean = {name: np.mean([theta[name] for theta in models], axis=0) for name in NAMES}
    return mean, {ratio: np.mean(own, axis=0) for ratio, own in shares.items()}


def held_weights(ratio):
    return sum(budget_of(ratio)[1:])


def dense_where(y, shares, ratio):
    """Of every leaf the largest weights, as many as its share of all says."""
    ranks = []
    for name, share in zip(WEIGHTS, shares, strict=True):
        rank = np.empty(y[name].size)
        rank[np.argsort(-np.abs(y[name]).ravel(), kind="stable")] = np.arange(y[name].size)
        ranks.append(rank / max(share * held_weights(ratio), 0.5))
    chosen, end = top(-np.concatenate(ranks), held_weights(ratio)), y["first"].size
    parts = (np.ones(y["bias"].size), chosen[:end], chosen[end:])
    return {name: part.reshape(y[name].shape) for name, part in zip(NAMES, parts, strict=True)}


def test_a_round_of_flash(gradient):
    method = fb.Flash(fb.SGD(LR), WARM_STEPS, ratios=RATIOS, learn_steps=STEPS)
    before, after = seen_by_round(method, 1)
    y, shares = warmed_up(arrays(problem().y0), gradient)
    assert_close(before.y, y)
    trained = []
    for client, ratio in enumerate(RATIOS):
        mask = dense_where(y, shares[ratio], ratio)
        kept = mask_kept(before, client)
        theta = product(mask, y)
        for _ in range(STEPS):
            direction = gradient(theta, client)
            theta = {name: theta[name] - LR * mask[name] * direction[name] for name in NAMES}
        trained.append((theta, mask))
        for name in NAMES:
            np.testing.assert_array_equal(kept[name], mask[name])
    assert_close(after.y, averaged(y, trained))


def test_some_clients_warm_flash_up_and_all_get_masks(gradient):
    method = fb.Flash(fb.SGD(LR), WARM_STEPS, warm_cohort=1, ratios=RATIOS, learn_steps=STEPS)
    before, y0 = seen_by_round(method, 1)[0], problem().y0
    alone = [warmed_up(arrays(y0), gradient, [client]) for client in range(CLIENTS)]
    drawn = [y for y, _ in alone if np.allclose(before.y["first"], y["first"], atol=1e-12)]
    assert len(drawn) == 1
    assert before.ledger.down["warm"] == 8 * sum(y0[name].size for name in NAMES)
    assert before.ledger.down["masks"] == CLIENTS * -(-sum(y0[name].size for name in WEIGHTS) // 8)


def test_a_warm_up_by_nobody_is_refused():
    with pytest.raises(ValueError, match="warm_cohort is 0; it must be a whole number of at least 1"):
        fb.Flash(fb.SGD(LR), warm_cohort=0)
