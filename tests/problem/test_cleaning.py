"""Data cleaning: what a weight does, who is found, and blocks of x that stay at their clients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import fedbilevel as fb
from fedbilevel.data.dataset import Dataset
from fedbilevel.data.error import DataError
from fedbilevel.data.federate import federate
from fedbilevel.data.split import LabelNoise, Split
from fedbilevel.portable import imported, pack, unpack
from fedbilevel.problem.accuracy import cross_entropy
from fedbilevel.problem.base import ProblemError
from fedbilevel.problem.cleaning import DataCleaning, auc, block_length, training_truth
from fedbilevel.problem.model import Linear

CLASSES, INPUTS = 3, 4


def crowd(draw, count, apart=2.0):
    """Points around one corner for each class."""
    labels = np.arange(count) % CLASSES
    return {"inputs": apart * np.eye(INPUTS)[labels] + draw.normal(size=(count, INPUTS)), "labels": labels}


DRAW = np.random.default_rng(3)
MINE = Dataset("mine", crowd(DRAW, 48), crowd(DRAW, 600), ("a", "b", "c"))
SIZES = (20, 16, 12)


def unequal(samples, rng):
    """A partition into clients of unequal size."""
    return np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])


def make_clients(places, **options):
    settings = {"split": Split(0.25), "noise": LabelNoise((0.1, 0.5, 0.8)), "places": places} | options
    return federate(MINE, unequal, **settings)


def make(clients, **options):
    arguments = {"samples": block_length(clients), "truth": training_truth(clients), "penalty": 0.1} | options
    return DataCleaning(Linear(CLASSES), inputs=(INPUTS,), classes=CLASSES, test=MINE.test, **arguments)


def seen(problem, x):
    return {name: float(metric(x, problem.y0)) for name, metric in problem.metrics.items()}


# ------------------------------------------------------------------ the training loss


@pytest.mark.usefixtures("float64")
def test_the_training_loss_weighs_every_sample_by_its_own_entry():
    clients = make_clients("own")
    problem = make(clients)
    samples = clients.lower.batch(0, jax.random.key(0)).samples
    x = jnp.asarray(DRAW.normal(size=block_length(clients)))
    losses = np.asarray(cross_entropy(Linear(CLASSES)(problem.y0, samples["inputs"]), samples["labels"]))
    weights = 1 / (1 + np.exp(-np.asarray(x)[np.asarray(samples["place"])]))
    square = sum(np.sum(np.asarray(leaf) ** 2) for leaf in jax.tree.leaves(problem.y0))
    expected = np.mean(weights * losses) + 0.05 * square
    np.testing.assert_allclose(problem.lower(x, problem.y0, samples), expected, rtol=1e-13)
    known = np.mean(weights * losses * ~np.asarray(samples["corrupted"])) + 0.05 * square
    oracle = make(clients, oracle=True)
    np.testing.assert_allclose(oracle.lower(x, problem.y0, samples), known, rtol=1e-13)
    assert abs(known - expected) > 1e-3


def test_the_validation_loss_sees_neither_the_weights_nor_the_truth():
    clients = make_clients("own")
    problem, told = make(clients), make(clients, oracle=True)
    clean = clients.upper.batch(1, jax.random.key(0)).samples
    assert not np.asarray(clean["corrupted"]).any()
    x = jnp.arange(15.0)
    assert float(problem.upper(x, problem.y0, clean)) == float(problem.upper(-x, problem.y0, clean))
    assert float(problem.upper(x, problem.y0, clean)) == float(told.upper(x, problem.y0, clean))


def test_x_is_as_long_as_the_places_need():
    assert block_length(make_clients("own")) == 15
    assert block_length(make_clients("all")) == 15 + 12 + 9


# ----------------------------------------------------------------------- who is found


def pairs(scores, positive):
    """The area under the curve by counting pairs."""
    above = np.subtract.outer(scores[positive], scores[~positive])
    return np.mean((above > 0) + 0.5 * (above == 0))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=12, max_size=12))
def test_the_area_by_ranks_is_the_share_of_pairs_in_the_right_order(samples):
    scores, positive = np.array([s for s, _ in samples], np.float32), np.array([p for _, p in samples])
    found = float(auc(jnp.asarray(scores), jnp.asarray(positive)))
    if positive.all() or not positive.any():
        assert np.isnan(found)
    else:
        assert found == pytest.approx(pairs(scores, positive), abs=1e-6)


@pytest.mark.parametrize(
    ("scores", "area"), [([3, 2, 1, 0], 1), ([0, 1, 2, 3], 0), ([1, 1, 1, 1], 0.5), ([2, 0, 1, -1], 0.75)]
)
def test_areas_made_by_hand(scores, area):
    """Two positives, then two negatives."""
    positive = jnp.array([True, True, False, False])
    assert float(auc(jnp.asarray(scores, float), positive)) == area


def test_before_the_first_step_nothing_is_found():
    problem = make(make_clients("own"))
    found = seen(problem, problem.x0)
    assert found["detection_f1"] == 0
    assert found["detection_auc"] == 0.5


@pytest.mark.parametrize("places", ["own", "all"])
def test_who_is_found_is_counted_over_all_clients(places):
    """Of the corrupted samples one is missed, and of the clean ones one is blamed."""
    clients = make_clients(places)
    truth = {name: np.asarray(column) for name, column in training_truth(clients).items()}
    corrupted = truth["corrupted"]
    score = np.where(corrupted, -1.0, 1.0)
    score[np.flatnonzero(corrupted)[0]], score[np.flatnonzero(~corrupted)[0]] = 0.5, -0.5
    x = np.full((3, 15) if places == "own" else 36, -9.0)  # places that no sample has must not count
    x[(truth["client"], truth["place"]) if places == "own" else truth["place"]] = score
    found = seen(make(clients), jnp.asarray(x))
    wrong = corrupted.sum()
    assert wrong == 15
    assert found["detection_f1"] == pytest.approx(2 * (wrong - 1) / (2 * wrong))
    assert found["detection_auc"] == pytest.approx(pairs(-score, corrupted))


def test_metrics_of_detection_need_samples_of_both_kinds():
    clients = make_clients("own", noise=LabelNoise(0.0))
    assert sorted(make(clients).metrics) == ["test_accuracy"]
    assert training_truth(make_clients("own", noise=None)) is None


# -------------------------------------------------------------- blocks at their clients

RATES = {"lower_lr": 0.3, "adjoint_lr": 0.2}


def blocks(clients, x):
    """Every training sample's entry of x, one after another."""
    truth = training_truth(clients)
    return (
        np.asarray(x)[truth["client"], truth["place"]] if np.ndim(x) == 2 else np.asarray(x)[truth["place"]]
    )


@pytest.mark.usefixtures("float64")
def test_blocks_at_their_clients_move_as_those_of_the_whole_x():
    """The mean over M clients of steps on blocks that only one of them sees is a step of size η/M."""
    found = {}
    for upper, places, lr in (("own", "own", 40.0), ("shared", "all", 40.0), ("undivided", "own", 120.0)):
        clients = make_clients(places)
        method = fb.FedBiO(lr, upper="own" if upper == "undivided" else upper, **RATES)
        result = fb.solve(make(clients), clients, method, 6, every=6)
        found[upper] = blocks(clients, result.x), result.y
    np.testing.assert_allclose(found["own"][0], found["shared"][0], rtol=1e-11, atol=1e-13)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13),
        found["own"][1],
        found["shared"][1],
    )
    assert np.max(np.abs(found["shared"][0])) > 0.1, "the weights have moved"
    assert np.max(np.abs(found["undivided"][0] - found["shared"][0])) > 0.1


def test_cleaning_finds_the_wrong_labels_and_comes_near_the_oracle():
    draw = np.random.default_rng(0)
    data = Dataset("mine", crowd(draw, 300, 3.0), crowd(draw, 900, 3.0), ("a", "b", "c"))
    clients = federate(
        data,
        fb.data.Iid(3),
        split=Split(0.2),
        noise=LabelNoise((0.3, 0.6, 0.9)),
        places="own",
    )
    common = {"inputs": (INPUTS,), "classes": CLASSES, "samples": block_length(clients), "test": data.test}
    problem = DataCleaning(Linear(CLASSES), truth=training_truth(clients), penalty=0.01, **common)
    cleaned = fb.solve(problem, clients, fb.FedBiO(3000.0, 0.5, 0.5, upper="own"), 150, every=150).history[-1]
    train = fb.FedAvg(0.5, level="lower")
    everything = fb.solve(problem, clients, train, 150, every=150).history[-1]
    told = DataCleaning(Linear(CLASSES), oracle=True, penalty=0.01, **common)
    oracle = fb.solve(told, clients, train, 150, every=150).history[-1]["test_accuracy"]
    assert cleaned["detection_auc"] > 0.9
    assert cleaned["detection_f1"] > 0.85
    assert (everything["detection_f1"], everything["detection_auc"]) == (0, 0.5)
    gap = oracle - everything["test_accuracy"]
    assert gap > 0.03
    assert cleaned["test_accuracy"] > everything["test_accuracy"] + gap / 2


# ------------------------------------------------------------------------------ edges


def test_it_can_be_named_and_made_again_elsewhere():
    clients = make_clients("own")
    problem = make(clients)
    again = unpack(*pack(problem), imported)
    samples = clients.lower.batch(0, jax.random.key(0)).samples
    x = jnp.arange(15.0)
    assert float(again.lower(x, problem.y0, samples)) == float(problem.lower(x, problem.y0, samples))


def test_what_does_not_fit_is_refused_with_a_reason():
    with pytest.raises(
        ProblemError, match=r"samples is 14, but the places .* go up to 14; give `block_length"
    ):
        make(make_clients("own"), samples=14)
    with pytest.raises(
        DataError, match=r"no column 'place'; data cleaning needs it: federate\(\.\.\., places="
    ):
        block_length(make_clients(None))
