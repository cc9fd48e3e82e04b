"""Hyper-representation: objectives, derivatives, metrics, and a run."""

import dataclasses

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fedbilevel as fb
from fedbilevel.local import Descent, Work
from fedbilevel.portable import imported, pack, unpack
from fedbilevel.problem.accuracy import CrossEntropy
from fedbilevel.problem.base import ProblemError
from fedbilevel.problem.model import MLP, Linear, Model
from fedbilevel.problem.oracle import Client
from fedbilevel.problem.representation import HyperRepresentation
from fedbilevel.tree import size

DRAW = np.random.default_rng(3)
CLASSES, PENALTY = 3, 0.2
SAMPLES = {"inputs": DRAW.normal(size=(6, 2, 2)), "labels": np.array([0, 2, 1, 1, 0, 2])}
BACKBONE = MLP((5,), "tanh", "tanh")


def arrays():
    """The samples as a client has them, in the precision of the test."""
    return jax.tree.map(jnp.asarray, SAMPLES)


def make(**options):
    settings = {"inputs": (2, 2), "classes": CLASSES, "penalty": PENALTY} | options
    return HyperRepresentation(BACKBONE, Linear(CLASSES), **settings)


def by_hand(x, y, inputs, labels):
    """Probabilities, features and mean cross-entropy in plain numpy."""
    (layer,) = jax.tree.map(np.asarray, x)
    features = np.tanh(inputs.reshape(len(inputs), -1) @ layer["weight"] + layer["bias"])
    logits = features @ np.asarray(y["weight"]) + np.asarray(y["bias"])
    odds = np.exp(logits)
    shares = odds / odds.sum(1, keepdims=True)
    return shares, features, -np.mean(np.log(shares[np.arange(len(labels)), labels]))


def test_the_papers_sizes():
    backbone = MLP((200,), output_activation="relu")
    problem = HyperRepresentation(backbone, Linear(10), inputs=(28, 28, 1), classes=10)
    assert (size(problem.x0), size(problem.y0)) == (157_000, 2_010)


@pytest.mark.usefixtures("float64")
def test_objectives_and_the_gradient_in_the_head_are_the_closed_forms():
    """`∇_y g = featuresᵀ(softmax − one-hot)/n + penalty·y`."""
    problem = make()
    x, y = problem.x0, problem.y0
    shares, features, loss = by_hand(x, y, **SAMPLES)
    square = sum(np.sum(np.asarray(leaf) ** 2) for leaf in jax.tree.leaves(y))
    np.testing.assert_allclose(problem.upper(x, y, arrays()), loss, rtol=1e-12)
    np.testing.assert_allclose(problem.lower(x, y, arrays()), loss + PENALTY / 2 * square, rtol=1e-12)
    gap = (shares - np.eye(CLASSES)[SAMPLES["labels"]]) / len(shares)
    slope = jax.jit(jax.grad(problem.lower, 1))(x, y, arrays())
    np.testing.assert_allclose(slope["weight"], features.T @ gap + PENALTY * y["weight"], atol=1e-14)
    np.testing.assert_allclose(slope["bias"], gap.sum(0) + PENALTY * y["bias"], atol=1e-14)


@pytest.mark.usefixtures("float64")
def test_the_gradient_in_the_backbone_is_that_of_finite_differences():
    problem = make()
    x, y = problem.x0, problem.y0
    flat, back = ravel_pytree(x)
    found = ravel_pytree(jax.jit(jax.grad(problem.upper))(x, y, arrays()))[0]
    for place in range(0, flat.size, 4):
        up, down = (problem.upper(back(flat.at[place].add(e)), y, arrays()) for e in (1e-5, -1e-5))
        np.testing.assert_allclose(found[place], (up - down) / 2e-5, rtol=1e-6, atol=1e-10)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("penalty", [PENALTY, 0.0])
def test_the_penalty_is_what_makes_the_lower_level_strongly_convex(penalty):
    """Without it, shifting all logits alike changes nothing: an eigenvalue is zero."""
    problem = make(penalty=penalty)
    flat, back = ravel_pytree(problem.y0)
    hessian = jax.jit(jax.hessian(lambda y: problem.lower(problem.x0, back(y), arrays())))(flat)
    np.testing.assert_allclose(np.linalg.eigvalsh(hessian)[0], penalty, atol=1e-12)


def test_test_metrics_are_those_of_all_test_samples():
    problem = make(test=SAMPLES)
    shares, _, loss = by_hand(problem.x0, problem.y0, **SAMPLES)
    right = np.mean(shares.argmax(1) == SAMPLES["labels"])
    assert 0 < right < 1, "or the test would show nothing"
    metrics = {name: float(metric(problem.x0, problem.y0)) for name, metric in problem.metrics.items()}
    assert metrics == pytest.approx({"test_accuracy": right, "test_loss": loss}, rel=1e-5)
    own = problem.client_metrics["accuracy"](problem.x0, problem.y0, arrays())
    assert float(own) == pytest.approx(right)
    assert not make(client_metrics=None).client_metrics


def test_it_can_be_named_and_made_again_elsewhere():
    problem = make(test=SAMPLES)
    again = unpack(*pack(problem), imported)
    assert float(again.lower(problem.x0, problem.y0, arrays())) == float(
        problem.lower(problem.x0, problem.y0, arrays())
    )


def clusters(draw, count):
    """Labels, and points around the three corners that belong to them."""
    labels = draw.integers(CLASSES, size=count)
    corners = 2 * np.eye(4)[:CLASSES]
    return {"inputs": (corners[labels] + draw.normal(size=(count, 4))).reshape(-1, 2, 2), "labels": labels}


def test_fednest_lowers_the_test_loss_more_than_training_the_head_alone():
    """Negative control: the same steps with an upper step size of zero leave the backbone as it was."""
    draw = np.random.default_rng(0)
    clients = fb.Clients([clusters(draw, 30) for _ in range(4)], [clusters(draw, 30) for _ in range(4)])
    problem = make(test=clusters(draw, 300), penalty=0.05, client_metrics=None)
    loss = {}
    for upper_lr in (0.0, 0.5):
        method = fb.FedNest(upper_lr, 0.5, series="cg", terms=4, lower_steps=2)
        result = fb.solve(problem, clients, method, 30, every=30)
        loss[upper_lr] = result.history[-1]["test_loss"]
        start = result.history[0]["test_loss"]
    assert loss[0.5] < 0.95 * loss[0.0] < 0.95 * start


REFUSED = {
    "head of other classes": (
        lambda: make(classes=4),
        r"head gives outputs of shape \(3,\); it must give one logit for each of the 4 classes",
    ),
    "test without labels": (
        lambda: make(test={"inputs": SAMPLES["inputs"]}),
        r"columns \['inputs'\]; they need \['labels'\] too",
    ),
    "test of another shape": (lambda: make(test=SAMPLES, inputs=(4, 1)), r"inputs of shape \(6, 2, 2\)"),
    "unknown label": (
        lambda: make(test=SAMPLES | {"labels": np.full(6, 3)}),
        r"test labels are 3\.\.3; with 3 classes they must be whole numbers 0\.\.2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_parts_that_do_not_fit_are_refused_with_a_reason(case):
    build, message = REFUSED[case]
    with pytest.raises(ProblemError, match=message):
        build()


def test_the_seed_draws_the_start():
    same, other = make(seed=0), make(seed=1)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, make().x0, same.x0))
    assert not jnp.array_equal(other.y0["weight"], same.y0["weight"])


def test_features_computed_once_change_no_step(float64):
    """Passes over clients of unequal size, with short last batches: as by an objective without features."""
    draws = np.random.default_rng(0)
    data = [
        {"inputs": draws.normal(size=(size, 5)), "labels": draws.integers(0, 3, size)} for size in (7, 4, 9)
    ]
    clients = fb.Clients(data, batch_size=4)
    backbone = fb.MLP((6,), activation="tanh", output_activation="tanh")
    problem = fb.HyperRepresentation(backbone, fb.Linear(3), inputs=(5,), classes=3)
    plain = dataclasses.replace(problem, lower=CrossEntropy(problem.lower.representation, 0.01))
    method = fb.FedNest(0.1, 0.2, lower_epochs=2, series="none")
    found, expected = (fb.solve(p, clients, method, 2, progress=False) for p in (problem, plain))
    assert found.ledger == expected.ledger
    for point in zip(
        jax.tree.leaves((found.x, found.y)), jax.tree.leaves((expected.x, expected.y)), strict=True
    ):
        np.testing.assert_allclose(*point, rtol=1e-12)


def test_features_of_all_samples_are_computed_once_and_only_where_steps_read_them_all():
    calls = []

    class Counting(Model):
        def init(self, key, input_shape):
            return jnp.ones(()), input_shape

        def __call__(self, parameters, inputs):
            calls.append(inputs.shape[0])
            return parameters * inputs

    problem = fb.HyperRepresentation(Counting(), fb.Linear(2), inputs=(3,), classes=2)
    clients = fb.Clients([{"inputs": np.ones((8, 3)), "labels": np.zeros(8, int)}] * 2, batch_size=2)
    me = Client(problem, clients, 1, 1, jr.key(0))
    Descent(0.1, Work("lower", epochs=3))(me, problem.x0, problem.y0)
    assert calls == [8]
    calls.clear()
    Descent(0.1, Work("lower", steps=2))(me, problem.x0, problem.y0)
    assert set(calls) == {2}
