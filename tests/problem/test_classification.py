"""Plain classification: what f, g and the metrics are, and that x does not matter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.problem.base import ProblemError
from fedbilevel.problem.classification import Classification, InBlocks
from fedbilevel.problem.loss_tuning import OfModel
from fedbilevel.tree import size

DRAW = np.random.default_rng(4)
SAMPLES = {
    "inputs": DRAW.normal(size=(7, 2, 2)).astype(np.float32),
    "labels": np.array([0, 2, 1, 1, 0, 2, 2]),
}


def make(**options):
    settings = {"inputs": (2, 2), "classes": 3, "test": SAMPLES} | options
    return Classification(fb.Linear(3), **settings)


def by_hand(y):
    """Mean cross-entropy and accuracy in plain numpy."""
    logits = SAMPLES["inputs"].reshape(7, 4) @ np.asarray(y["weight"]) + np.asarray(y["bias"])
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    correct = logits.argmax(1) == SAMPLES["labels"]
    return -np.mean(np.log(shares[np.arange(7), SAMPLES["labels"]])), np.mean(correct)


def test_objectives_and_metrics_are_those_of_the_model():
    problem = make(penalty=0.5)
    y = jax.tree.map(lambda leaf: leaf + 0.1, problem.y0)
    loss, accuracy = by_hand(y)
    squares = sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(y))
    for function in (problem.upper, problem.lower):
        np.testing.assert_allclose(
            function((), y, jax.tree.map(jnp.asarray, SAMPLES)), loss + 0.25 * squares, rtol=1e-5
        )
    found = {name: float(metric((), y)) for name, metric in problem.metrics.items()}
    assert found == pytest.approx({"test_loss": loss, "test_accuracy": accuracy}, rel=1e-5)


def test_there_is_no_upper_variable_and_any_other_does_not_matter():
    problem = make()
    assert size(problem.x0) == 0
    found = [float(problem.metrics["test_loss"](x, problem.y0)) for x in ((), jnp.ones(3), {"a": 0.0})]
    assert len(set(found)) == 1


def centred(x, y, inputs):
    """Like a model with batch normalisation: what it says of a sample depends on the others."""
    return inputs - jnp.mean(inputs, axis=0)


def test_a_model_sees_all_samples_of_a_block_at_once():
    inputs = SAMPLES["inputs"]
    found = InBlocks(centred, 3)((), (), jnp.asarray(inputs))
    blocks = [block - block.mean(axis=0) for block in (inputs[:3], inputs[3:6], inputs[6:])]
    np.testing.assert_allclose(found, np.concatenate(blocks), rtol=0, atol=1e-6)
    whole = make().metrics["test_accuracy"].function.classifier
    np.testing.assert_allclose(
        InBlocks(centred, whole.samples)((), (), jnp.asarray(inputs)), inputs - inputs.mean(axis=0), atol=1e-6
    )


@pytest.mark.parametrize("samples", [1, 3, 7, 100])
def test_blocks_give_what_all_samples_give(samples):
    classifier, y = OfModel(fb.Linear(3)), make().y0
    inputs = jnp.asarray(SAMPLES["inputs"])
    whole, parts = classifier((), y, inputs), InBlocks(classifier, samples)((), y, inputs)
    np.testing.assert_allclose(parts, whole, rtol=1e-6, atol=1e-6)


def test_the_seed_draws_the_start():
    first, again, other = (make(seed=seed).y0["weight"] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_model_with_other_outputs_is_refused():
    with pytest.raises(ProblemError, match="the model gives outputs of shape"):
        make(classes=4, test=None)


def test_it_can_be_learnt_from_a_sketch():
    rows = {name: jnp.asarray(np.stack([column, column[::-1]])) for name, column in SAMPLES.items()}
    problem, clients = make(), fb.Clients(rows)
    run = fb.solve(problem, clients, fb.FedSep(fb.LinearSketch(8), fb.SGD(0.3), server_lr=1.0), 30, every=30)
    assert run.history[-1]["test_loss"] < 0.9 * run.history[0]["test_loss"]
    assert run.x.shape == (8,)
    assert set(run.y) == {"weight", "bias"}
