"""Fair federated learning: weights of the clients that help those with the largest losses.

min_x  mean_m l_m(y*(x))^(q+1)/(q+1)                      l_m: mean loss on validation data of client m
y*(x) = argmin_y Σ_m softmax(x)_m g_m(y) + (penalty/2)‖y‖²    g_m: mean loss on its training data
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.problem.accuracy import Accuracy, Classifier, OnTable, check_classes, cross_entropy, table
from fedbilevel.problem.base import Problem, ProblemError, minimax
from fedbilevel.problem.loss_tuning import OfModel
from fedbilevel.problem.model import Model
from fedbilevel.tree import PyTree, dot


class OfUpperModel(eqx.Module):
    """The classifier `model(x, inputs)`, which does not see y."""

    model: Model

    def __call__(self, x: PyTree, y: PyTree, inputs: jax.Array) -> jax.Array:
        return self.model(x, inputs)


class PowerOfMean(eqx.Module):
    """`l^(q+1)/(q+1)`, l the mean cross-entropy of the samples.

    It is no mean over samples. On a minibatch it estimates with a bias, upwards for q > 0 and of the order of
    the variance of l: use full batches where there are few samples, as of validation data.

    Attributes:
        classifier: gives the logits.
        q: how much large losses are stressed; 0: not at all.
    """

    classifier: Classifier
    q: Any

    def __call__(self, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
        return self._power(jnp.mean(self._losses(x, y, samples)))

    def on_weighted(self, x: PyTree, y: PyTree, samples: PyTree, weight: jax.Array) -> jax.Array:
        """The same of the weighted mean: the power comes after the mean."""
        losses = self._losses(x, y, samples)
        return self._power(weight.astype(losses.dtype) @ losses)

    def _losses(self, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
        return cross_entropy(self.classifier(x, y, samples["inputs"]), samples["labels"])

    def _power(self, loss: jax.Array) -> jax.Array:
        return loss ** (self.q + 1) / (self.q + 1)


class ClientWeightedLoss(eqx.Module):
    """`M softmax(logits)_m · cross-entropy`, the mean over the samples, m their client.

    Its mean over all M clients is the sum of the clients' losses, weighted by the softmax.

    Attributes:
        classifier: gives the logits of the classes.
        clients: M.
    """

    classifier: Classifier
    clients: int = eqx.field(static=True)

    def __call__(self, logits: jax.Array, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
        weight = self.clients * jax.nn.softmax(logits)[samples["client"]]
        losses = cross_entropy(self.classifier(x, y, samples["inputs"]), samples["labels"])
        return jnp.mean(weight * losses)


class FairTraining(eqx.Module):
    """The training loss with client weights `softmax(x)`, `+ (penalty/2)‖y‖²`."""

    loss: ClientWeightedLoss
    penalty: Any

    def __call__(self, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
        return self.loss(x, x, y, samples) + self.penalty / 2 * dot(y, y)


class AgnosticTraining(eqx.Module):
    """The training loss of the model x with client weights `softmax(y)`, and a penalty of each."""

    loss: ClientWeightedLoss
    penalty: Any
    concavity: Any

    def __call__(self, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
        return self.loss(y, x, y, samples) + self.penalty / 2 * dot(x, x) - self.concavity / 2 * dot(y, y)


def FairClients(
    model: Model,
    *,
    inputs: tuple[int, ...],
    classes: int,
    clients: int,
    q: float = 1.0,
    penalty: float = 0.001,
    test: Mapping[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> Problem:
    """Choose the weights of the clients in training such that their validation losses are even and low.

    Samples are dicts of `inputs`, `labels` and, at the lower level, `client`, as
    `federate(..., numbered=True)` makes them. x, one number a client, starts at zero: equal weights. The
    clients' weights in means over the federation should be uniform, since x is what weighs them.

    The upper objective is a power of a mean: with minibatches its gradients are biased, so let every client
    use all of its validation samples at once.

    Args:
        model: its parameters are y; one logit a class.
        inputs: the shape of one sample's inputs.
        classes: how many labels there are.
        clients: M, how many there are.
        q: exponent of fairness, at least 0; 0 minimises the mean validation loss: no pressure to be fair.
        penalty: of the model's parameters.
        test: columns `inputs` and `labels`: gives the metric `test_accuracy`.
        seed: draws the parameters of the model to start from.
        **options: as for `Problem`; `client_metrics` is the clients' `accuracy` unless given, so that the
            history has `accuracy_worst` and `accuracy_p10`.

    References: J. Li, F. Huang, H. Huang, NeurIPS 2023 (fairness as a bilevel problem); T. Li et al., Fair
    resource allocation in federated learning, ICLR 2020 (the objective).

    Example:
        >>> from fedbilevel.problem.model import Linear
        >>> FairClients(Linear(10), inputs=(28, 28, 1), classes=10, clients=20).x0.shape
        (20,)
    """
    if not q >= 0:
        raise ProblemError(f"q is {q!r}; it must be at least 0")
    y0, outputs = model.init(jr.key(seed), inputs)
    check_classes(outputs, classes, "model")
    classifier = OfModel(model)
    upper = PowerOfMean(classifier, q)
    lower = FairTraining(ClientWeightedLoss(classifier, clients), penalty)
    measures = _measures(classifier, inputs, classes, test)
    return Problem(upper, lower, jnp.zeros(clients), y0, classes=classes, **measures | options)


def AgnosticClients(
    model: Model,
    *,
    inputs: tuple[int, ...],
    classes: int,
    clients: int,
    penalty: float = 0.001,
    concavity: float = 0.1,
    test: Mapping[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> Problem:
    """Agnostic federated learning: a model that is good for the worst mixture of the clients.

        min_x max_y  Σ_m softmax(y)_m g_m(x) + (penalty/2)‖x‖² − (concavity/2)‖y‖²

    A minimax problem in which x is the model and y weighs the clients. The softmax keeps the weights on the
    simplex without a projection; it is not concave in y by itself, the last term makes it so where the
    clients' losses differ by little more than `concavity`, and keeps the weights from a single client.

    Samples are as for `FairClients`. Both levels have the same objective here and should have the same data:
    leave validation samples out of the split.

    Args:
        model: its parameters are x; one logit a class.
        inputs, classes, clients, test, seed: as for `FairClients`.
        penalty: of the model's parameters.
        concavity: of the weights' logits.
        **options: as for `FairClients`.

    Reference: M. Mohri, G. Sivek, A. T. Suresh, Agnostic federated learning, ICML 2019.

    Example:
        >>> from fedbilevel.problem.model import Linear
        >>> problem = AgnosticClients(Linear(10), inputs=(28, 28, 1), classes=10, clients=20)
        >>> problem.structure, problem.y0.shape
        ('minimax', (20,))
    """
    x0, outputs = model.init(jr.key(seed), inputs)
    check_classes(outputs, classes, "model")
    classifier = OfUpperModel(model)
    training = AgnosticTraining(ClientWeightedLoss(classifier, clients), penalty, concavity)
    measures = _measures(classifier, inputs, classes, test)
    return minimax(training, x0, jnp.zeros(clients), classes=classes, **measures | options)


# Of the settings of a `Problem`, the structure is not one of this problem: it is a minimax problem always.
AgnosticClients.decided = frozenset({"structure"})  # type: ignore[attr-defined]


def _measures(
    classifier: Classifier, inputs: tuple[int, ...], classes: int, test: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Accuracy on all test samples, and every client's on its own."""
    accuracy = Accuracy(classifier)
    metrics = {} if test is None else {"test_accuracy": OnTable(accuracy, table(test, inputs, classes))}
    return {"metrics": metrics, "client_metrics": {"accuracy": accuracy}}
