"""Distillation on public samples, against rounds by hand on a linear model, and what it costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithm.baseline.consensus import Confident
from fedbilevel.algorithm.baseline.distillation import DSFL, FedDF, FedET
from fedbilevel.problem.accuracy import CrossEntropy
from fedbilevel.problem.base import ProblemError
from fedbilevel.problem.loss_tuning import OfModel
from fedbilevel.problem.submodel import Sliceable

pytestmark = pytest.mark.usefixtures("all_float64")

FEATURES, CLASSES, SAMPLES, PUBLIC = 4, 3, 6, 5
RATIOS = (1.0, 0.5, 0.25)
CLIENTS = len(RATIOS)
LEARN, DISTIL = 0.5, 0.8
LEARN_STEPS, DISTIL_STEPS, ROUNDS = 2, 3, 2

draw = np.random.default_rng(0)
INPUTS = draw.normal(size=(CLIENTS, SAMPLES, FEATURES))
LABELS = draw.integers(0, CLASSES, size=(CLIENTS, SAMPLES))
OPEN = draw.normal(size=(PUBLIC, FEATURES))
START = draw.normal(size=(FEATURES, CLASSES))
HELD = np.stack([np.arange(FEATURES)[:, None] < FEATURES * ratio for ratio in RATIOS]).astype(float)


class OneLayer(Sliceable):
    """`inputs · weight`, of whose features clients can hold some."""

    def init(self, key, input_shape):
        return {"weight": jnp.asarray(START)}, (CLASSES,)

    def __call__(self, parameters, inputs):
        return inputs @ parameters["weight"]

    def axes(self):
        return {"weight": "feature ."}

    def uses(self, input_shape):
        return {"weight": 1}


LOOKED_AT = []
"""How many samples `Watched` was given, each time that it was traced."""


class Watched(OneLayer):
    """Says how many samples it looks at at once."""

    def __call__(self, parameters, inputs):
        LOOKED_AT.append(len(inputs))
        return super().__call__(parameters, inputs)


@pytest.mark.parametrize("public", [{"inputs": OPEN}, "mnist"])
def test_public_samples_that_are_no_array_are_refused(public):
    with pytest.raises(ValueError, match=r"public is a (dict|str); it must be an array \(samples"):
        FedDF(fb.SGD(LEARN), fb.SGD(DISTIL), public)


def solved(make, model=OneLayer(), public=OPEN, **options):
    loss = CrossEntropy(OfModel(model))
    problem = fb.Problem(loss, loss, (), {"weight": jnp.asarray(START)})
    settings = {"ratios": RATIOS, "learn_steps": LEARN_STEPS, "distil_steps": DISTIL_STEPS} | options
    algorithm = make(fb.SGD(LEARN), fb.SGD(DISTIL), public, **settings)
    data = fb.Clients({"inputs": INPUTS, "labels": LABELS})
    return fb.solve(problem, data, algorithm, ROUNDS, every=ROUNDS)


@functools.cache
def feddf():
    """A run that two tests look at."""
    return solved(FedDF)


def softmax(z):
    z = np.exp(z - z.max(axis=-1, keepdims=True))
    return z / z.sum(axis=-1, keepdims=True)


def descended(weight, inputs, target, held, lr, steps):
    """Steps on `−mean Σ target log softmax(inputs · weight)`; slope: `inputsᵀ(Σtarget · p − target)`."""
    for _ in range(steps):
        p = softmax(inputs @ weight)
        slope = inputs.T @ (target.sum(axis=-1, keepdims=True) * p - target) / len(inputs)
        weight = weight - lr * held * slope
    return weight


def trained(starts):
    """Every client's model after its steps on its own data."""
    return [
        descended(held * start, inputs, np.eye(CLASSES)[labels], held, LEARN, LEARN_STEPS)
        for start, inputs, labels, held in zip(starts, INPUTS, LABELS, HELD, strict=True)
    ]


def distilled(weight, target, held=1.0):
    return descended(weight, OPEN, target, held, DISTIL, DISTIL_STEPS)


def confident(logits, diversity):
    """Fed-ET's target, sample by sample."""
    target = np.zeros((PUBLIC, CLASSES))
    for s in range(PUBLIC):
        surety = logits[:, s].var(axis=-1)
        label = np.argmax(surety @ logits[:, s])
        target[s, label] += 1
        others = [i for i in range(len(logits)) if np.argmax(logits[i, s]) != label]
        if others:
            target[s] += diversity * softmax(surety[others] @ logits[others, s] / surety[others].sum())
    return target


def with_models(target_of):
    """Rounds of a method whose models travel."""
    y = START
    for _ in range(ROUNDS):
        models = trained([y] * CLIENTS)
        changes = sum(held * (theta - y) for theta, held in zip(models, HELD, strict=True))
        logits = np.stack([OPEN @ theta for theta in models])
        y = distilled(y + changes / HELD.sum(axis=0), target_of(logits))
    return y


METHODS = {
    "FedDF": (feddf, lambda logits: softmax(logits.mean(axis=0))),
    "FedET": (lambda: solved(FedET, diversity=0.7), lambda logits: confident(logits, 0.7)),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_mean_model_is_taught_by_the_consensus(name):
    run, target_of = METHODS[name]
    result = run()
    expected = with_models(target_of)
    np.testing.assert_allclose(result.y["weight"], expected, rtol=0, atol=1e-12)
    assert np.abs(expected - with_models(lambda logits: softmax(0 * logits.mean(axis=0)))).max() > 0.1
    part, logits = 8 * FEATURES * CLASSES * sum(RATIOS), 8 * CLIENTS * PUBLIC * CLASSES
    assert result.ledger.down == {"x": 0, "y": ROUNDS * part}
    assert result.ledger.up == {"y": ROUNDS * part, "logits": ROUNDS * logits}
    assert result.ledger.rounds == 2 * ROUNDS
    assert result.ledger.calls == {"f_y": ROUNDS * CLIENTS * LEARN_STEPS}


def test_models_stay_and_everybody_is_taught_by_the_sharpened_mean():
    temperature = 0.2
    result = solved(DSFL, temperature=temperature)
    server, models = START, [START] * CLIENTS
    for _ in range(ROUNDS):
        models = trained(models)
        mean = np.mean([softmax(OPEN @ theta) for theta in models], axis=0)
        target = softmax(mean / temperature)
        server = distilled(server, target)
        models = [distilled(theta, target, held) for theta, held in zip(models, HELD, strict=True)]
    np.testing.assert_allclose(result.y["weight"], server, rtol=0, atol=1e-12)
    np.testing.assert_allclose(result.state.models.value["weight"], np.stack(models), rtol=0, atol=1e-12)
    assert np.abs(server - START).max() > 0.1
    logits = ROUNDS * 8 * CLIENTS * PUBLIC * CLASSES
    assert (result.ledger.down, result.ledger.up) == ({"logits": logits}, {"logits": logits})
    assert result.ledger.rounds == ROUNDS
    assert result.ledger.calls == {"f_y": ROUNDS * CLIENTS * LEARN_STEPS}


def test_the_sure_decide_and_those_who_disagree_are_heard():
    """Two unsure clients against a sure one; who did not answer counts nothing; then all are of one mind."""
    logits = jnp.array([[[0.1, 0.0], [3.0, 0.0]], [[0.1, 0.0], [2.0, 0.0]], [[0.0, 4.0], [1.0, 0.0]]])
    dissent = softmax(np.array([0.1, 0.0]))
    target = Confident(0.5).of(logits, jnp.array([True, True, True]))
    np.testing.assert_allclose(target, [[0.5 * dissent[0], 1 + 0.5 * dissent[1]], [1, 0]], atol=1e-12)
    without = Confident(0.5).of(logits, jnp.array([True, True, False]))
    np.testing.assert_allclose(without, [[1, 0], [1, 0]], atol=1e-12)


def test_steps_on_some_of_the_public_samples():
    """A batch of all samples, in another order, is all of them; a smaller one is another step."""
    shuffled, some = (solved(FedDF, distil_batch=size).y["weight"] for size in (PUBLIC, 2))
    whole = feddf().y["weight"]
    np.testing.assert_allclose(shuffled, whole, rtol=0, atol=1e-5)
    assert float(jnp.max(jnp.abs(some - whole))) > 1e-3


def test_many_public_samples_are_looked_at_in_blocks():
    """What a convolution makes of all of them at once does not fit into memory."""
    solved(FedDF, Watched(), np.ones((300, FEATURES)), distil_batch=2)
    assert max(LOOKED_AT) == 256


def test_wrong_settings_are_explained():
    with pytest.raises(ValueError, match=r"public has the shape \(5,\)"):
        FedDF(fb.SGD(0.1), fb.SGD(0.1), np.ones(5))
    with pytest.raises(ValueError, match="distil_batch is 9, but there are 5 public samples"):
        FedDF(fb.SGD(0.1), fb.SGD(0.1), OPEN, distil_batch=9)
    with pytest.raises(ValueError, match="temperature is 0"):
        DSFL(fb.SGD(0.1), fb.SGD(0.1), OPEN, temperature=0)
    with pytest.raises(ValueError, match="diversity is -1"):
        FedET(fb.SGD(0.1), fb.SGD(0.1), OPEN, diversity=-1)
    with pytest.raises(ValueError, match="ratios has 2 numbers"):
        solved(FedDF, ratios=(1.0, 0.5))
    known = fb.Quadratic.random(jax.random.key(0), 2, 2, 2)
    with pytest.raises(ProblemError, match="does not say what the logits are"):
        fb.solve(known.problem(), known.clients(), FedDF(fb.SGD(0.1), fb.SGD(0.1), OPEN), 1)
