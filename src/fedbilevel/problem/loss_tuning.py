"""Loss tuning: choose the parameters of a training loss for imbalanced classes on validation data.

    min_x  mean_i balanced CE(model(y*(x), ·); validation data of i)
    y*(x) = argmin_y mean_i VS(model(y, ·); x; training data of i) + (penalty/2)‖y‖²

The upper objective sees x through `y*(x)` only: its direct gradient in x is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from fedbilevel.data.clients import Clients
from fedbilevel.name import check_choice
from fedbilevel.problem.accuracy import (
    Accuracy,
    BalancedAccuracy,
    Classifier,
    OnTable,
    check_classes,
    cross_entropy,
    table,
)
from fedbilevel.problem.base import Problem, ProblemError, check_labels
from fedbilevel.problem.model import Model
from fedbilevel.tree import PyTree, dot

TUNABLE = ("delta", "log_gamma", "log_weight")
"""What x may hold, one number a class each: Δ, log γ and log w of the vector-scaling loss."""


class Scaling(NamedTuple):
    """The parameters of the vector-scaling loss, `(classes,)` each: `−w_c log softmax(γ ⊙ logits + Δ)_c`."""

    delta: jax.Array
    gamma: jax.Array
    weight: jax.Array


def scaling(x: Mapping[str, jax.Array]) -> Scaling:
    """Δ, γ, w of the tuned x; γ and w are exponentials, so they stay positive; what is not tuned is 0, 1, 1.

    Example:
        >>> scaling({"delta": jnp.array([0.5, 0.0])}).gamma.tolist()
        [1.0, 1.0]
    """
    zero = jnp.zeros_like(next(iter(x.values())))
    delta, log_gamma, log_weight = (x.get(name, zero) for name in TUNABLE)
    return Scaling(delta, jnp.exp(log_gamma), jnp.exp(log_weight))


class OfModel(eqx.Module):
    """The classifier `model(y, inputs)`, which does not see x."""

    model: Model

    def __call__(self, x: PyTree, y: PyTree, inputs: jax.Array) -> jax.Array:
        return self.model(y, inputs)


class VectorScalingLoss(eqx.Module):
    """The mean of `−w_c log softmax(γ ⊙ logits + Δ)_c` over the samples `+ (penalty/2)‖y‖²`.

    At x = 0 it is the cross-entropy.
    """

    classifier: Classifier
    penalty: Any

    def __call__(self, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
        delta, gamma, weight = scaling(x)
        logits = gamma * self.classifier(x, y, samples["inputs"]) + delta
        losses = _of_label(weight, samples["labels"]) * cross_entropy(logits, samples["labels"])
        return jnp.mean(losses) + self.penalty / 2 * dot(y, y)


class BalancedCrossEntropy(eqx.Module):
    """The mean of `balance_c · cross-entropy` over the samples.

    With `balance_c = 1/(classes · p_c)`, p_c the frequency of class c, it is the mean over the classes of
    their mean cross-entropies, and still a mean over samples, as an objective over minibatches must be.
    """

    classifier: Classifier
    balance: Any

    def __call__(self, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
        logits = self.classifier(x, y, samples["inputs"])
        weights = _of_label(self.balance, samples["labels"])
        return jnp.mean(weights * cross_entropy(logits, samples["labels"]))


def class_weights(clients: Clients, classes: int) -> jax.Array:
    """`balance_c = 1/(present · p_c)` from the labels of the clients' upper-level data.

    p_c is the share of class c in the federation as f averages it: the clients' own shares, averaged
    with the clients' weights. `present` counts the classes that occur; the others weigh nothing.

    Args:
        clients: whose upper-level samples are dicts with `labels`.
        classes: how many labels there are.

    Example:
        >>> data = [{"labels": np.array([0, 0, 0, 1])}, {"labels": np.array([0, 1, 1, 0])}]
        >>> np.allclose(class_weights(Clients(data), 2), [1 / (2 * 5 / 8), 1 / (2 * 3 / 8)])
        True
    """
    upper = clients.upper
    rows = slice(None) if upper.rows is None else np.asarray(upper.rows)
    labels, sizes = np.asarray(upper.flat["labels"])[rows], np.asarray(upper.size)
    check_labels(labels, classes, "upper-level")
    own = np.ones(clients.n) if clients.weights is None else np.asarray(clients.weights)
    share = np.bincount(labels, np.repeat(own / sizes, sizes), classes) / own.sum()
    present = share > 0
    return jnp.asarray(np.where(present, 1 / np.where(present, share * present.sum(), 1), 0), float)


def LossTuning(
    model: Model,
    *,
    inputs: tuple[int, ...],
    classes: int,
    balance: Any = None,
    tune: Sequence[str] = ("delta",),
    penalty: float = 0.001,
    test: Mapping[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> Problem:
    """Tune the vector-scaling loss so that a model trained with it does well on all classes alike.

    Samples are dicts `{"inputs": (samples, *inputs), "labels": (samples,)}`. x starts at zero, where the
    training loss is the cross-entropy.

    Args:
        model: its parameters are y; one logit a class.
        inputs: the shape of one sample's inputs.
        classes: how many labels there are.
        balance: `(classes,)` weights of the validation loss, for example `class_weights(clients, classes)`;
            None: all one, for validation data that are balanced already.
        tune: what x holds: some of "delta", "log_gamma", "log_weight".
        penalty: of the model's parameters.
        test: columns `inputs` and `labels`: gives the metrics `balanced_accuracy` and `test_accuracy`.
        seed: draws the parameters of the model to start from.
        **options: as for `Problem`; `client_metrics` is the clients' `accuracy` unless given.

    References: G. R. Kini et al., Label-imbalanced and group-sensitive classification under
    overparameterization, NeurIPS 2021 (the loss); M. Li et al., AutoBalance, NeurIPS 2021 (tuning it);
    FedNest, section 4.2.

    Example:
        >>> from fedbilevel.problem.model import MLP
        >>> problem = LossTuning(MLP((200, 100, 10)), inputs=(28, 28, 1), classes=10)
        >>> problem.x0["delta"].shape
        (10,)
    """
    _check_tune(tune)
    y0, outputs = model.init(jr.key(seed), inputs)
    check_classes(outputs, classes, "model")
    weights = jnp.ones(classes) if balance is None else _checked_balance(balance, classes)
    classifier = OfModel(model)
    metrics = {} if test is None else _metrics(classifier, classes, table(test, inputs, classes))
    upper, lower = BalancedCrossEntropy(classifier, weights), VectorScalingLoss(classifier, penalty)
    x0 = {name: jnp.zeros(classes) for name in tune}
    measures: dict[str, Any] = {"metrics": metrics, "client_metrics": {"accuracy": Accuracy(classifier)}}
    return Problem(upper, lower, x0, y0, classes=classes, **measures | options)


def _metrics(classifier: OfModel, classes: int, test: PyTree) -> dict[str, OnTable]:
    """What is measured on all test samples."""
    return {
        "balanced_accuracy": OnTable(BalancedAccuracy(classifier, classes), test),
        "test_accuracy": OnTable(Accuracy(classifier), test),
    }


def _of_label(values: Any, labels: jax.Array) -> jax.Array:
    """Every sample's entry of a vector over classes, by a product (as in `cross_entropy`)."""
    return jax.nn.one_hot(labels, values.shape[0], dtype=values.dtype) @ values


def _check_tune(tune: Sequence[str]) -> None:
    if isinstance(tune, str) or not tune:
        raise ProblemError(f"tune is {tune!r}; it must be a list of some of {', '.join(TUNABLE)}")
    for name in tune:
        check_choice("a name in tune", name, TUNABLE, ProblemError)


def _checked_balance(balance: Any, classes: int) -> jax.Array:
    weights = np.asarray(balance, float)
    if weights.shape != (classes,) or not np.all(np.isfinite(weights)) or np.any(weights < 0):
        raise ProblemError(
            f"balance must be one finite non-negative number for each of the {classes} classes; "
            f"it is {balance!r}"
        )
    return jnp.asarray(weights, float)
