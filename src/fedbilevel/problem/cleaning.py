"""Data cleaning: find wrongly labelled training samples by their weights in the training loss.

    min_x  mean_i CE(model(y*(x), ·); clean validation data of i)
    y*(x) = argmin_y mean_i mean_j σ(x_ij) CE(model(y, ·); training sample j of i) + (penalty/2)‖y‖²

x has one entry for each training sample. Client i's samples are a block x_i that no other client sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float

from fedbilevel.data.clients import Clients
from fedbilevel.data.error import DataError
from fedbilevel.problem.accuracy import (
    Accuracy,
    Classifier,
    CrossEntropy,
    OnTable,
    check_classes,
    cross_entropy,
    table,
)
from fedbilevel.problem.base import Problem, ProblemError
from fedbilevel.problem.loss_tuning import OfModel
from fedbilevel.problem.model import Model
from fedbilevel.tree import PyTree, dot


class CleaningLoss(eqx.Module):
    """The mean of `σ(x_place) · cross-entropy` over the samples `+ (penalty/2)‖y‖²`.

    Attributes:
        classifier: gives the logits.
        penalty: of y.
        oracle: whether samples that are `corrupted` weigh nothing, as if somebody had told.
    """

    classifier: Classifier
    penalty: Any
    oracle: bool = eqx.field(static=True, default=False)

    def __call__(self, x: jax.Array, y: PyTree, samples: PyTree) -> jax.Array:
        weight = jax.nn.sigmoid(x[samples["place"]])
        if self.oracle:
            weight = jnp.where(samples["corrupted"], 0, weight)
        losses = cross_entropy(self.classifier(x, y, samples["inputs"]), samples["labels"])
        return jnp.mean(weight * losses) + self.penalty / 2 * dot(y, y)


class DetectionF1(eqx.Module):
    """The F1 score of finding the corrupted samples: those whose weight `σ(x_j)` is below ½.

    x starts at 0, where every weight is ½: found is a sample that the validation data have voted down.
    Before the first step nothing is found, and the score is 0.
    """

    def __call__(self, x: jax.Array, y: PyTree, truth: PyTree) -> jax.Array:
        found, corrupted = _of_samples(x, truth) < 0, truth["corrupted"]
        hits, named = jnp.sum(found & corrupted), jnp.sum(found) + jnp.sum(corrupted)
        return 2 * hits / jnp.maximum(named, 1)


class DetectionAuc(eqx.Module):
    """The area under the ROC curve of −x: it needs no threshold.

    It is the probability that a corrupted sample weighs less than a clean one, ties counting half.
    """

    def __call__(self, x: jax.Array, y: PyTree, truth: PyTree) -> jax.Array:
        return auc(-_of_samples(x, truth), truth["corrupted"])


def auc(scores: Float[Array, " samples"], positive: Bool[Array, " samples"]) -> Float[Array, ""]:
    """The share of pairs (positive, negative) in which the positive has the higher score; ties count half.

    By ranks: with R the mean rank of the P positives, from 1 and averaged where scores tie, it is
    `(R − (P + 1)/2)/N` for N negatives. NaN where one of the kinds does not occur.

    Example:
        >>> scores = jnp.array([0.9, 0.5, 0.5, 0.1])
        >>> float(auc(scores, jnp.array([True, True, False, False])))
        0.875
    """
    order = jnp.sort(scores)
    below, up_to = (jnp.searchsorted(order, scores, side=side) for side in ("left", "right"))
    rank = (below + up_to + 1) / 2
    positives = jnp.sum(positive)
    mean_rank = jnp.sum(jnp.where(positive, rank, 0)) / positives
    return (mean_rank - (positives + 1) / 2) / jnp.sum(~positive)


def block_length(clients: Clients) -> int:
    """How many entries x has: as many as the places of the training samples need.

    With `federate(..., places="own")` that is the largest client's number of training samples, with
    `places="all"` the number of all of them.
    """
    return int(_training(clients, "place").max()) + 1


def training_truth(clients: Clients) -> dict[str, jax.Array] | None:
    """The columns `client`, `place` and `corrupted` of all training samples; None where there is no noise."""
    if "corrupted" not in clients.lower.flat:
        return None
    client = np.repeat(np.arange(clients.n), np.asarray(clients.lower.size))
    columns = {name: _training(clients, name) for name in ("place", "corrupted")}
    return {name: jnp.asarray(column) for name, column in {"client": client, **columns}.items()}


def DataCleaning(
    model: Model,
    *,
    inputs: tuple[int, ...],
    classes: int,
    samples: int,
    penalty: float = 0.001,
    oracle: bool = False,
    test: Mapping[str, Any] | None = None,
    truth: Mapping[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> Problem:
    """Weigh training samples, some of them mislabelled, so that the trained model does well on clean data.

    Samples are dicts of `inputs`, `labels` and, at the lower level, `place`, as `federate(..., places=...)`
    makes them. With `places="own"` every client has a block of x for itself, `FedBiO(..., upper="own")`:
    the blocks start alike and never travel. With `places="all"` x is all blocks in one, for methods that
    share x. x starts at zero, where every sample weighs ½.

    The hypergradient of one entry of a block is of the order of one over the number of all training samples:
    step sizes for x are large numbers.

    Args:
        model: its parameters are y; one logit a class.
        inputs: the shape of one sample's inputs.
        classes: how many labels there are.
        samples: entries of x, `block_length(clients)`.
        penalty: of the model's parameters.
        oracle: corrupted samples weigh nothing (training samples need the column `corrupted`): what a method
            that found them all could reach. For methods that train y alone, such as
            `FedAvg(..., level="lower")`; without it these train on everything.
        test: clean columns `inputs` and `labels`: gives the metric `test_accuracy`.
        truth: which training samples are corrupted, `training_truth(clients)`: gives the metrics
            `detection_f1` and `detection_auc`, if some are and some are not. Nothing else uses it.
        seed: draws the parameters of the model to start from.
        **options: as for `Problem`; `client_metrics` is the clients' `accuracy` unless given.

    References: L. Franceschi et al., Forward and reverse gradient-based hyperparameter optimization, ICML
    2017 (data hyper-cleaning); J. Li, F. Huang, H. Huang, NeurIPS 2023 (federated).

    Example:
        >>> from fedbilevel.problem.model import Linear
        >>> DataCleaning(Linear(10), inputs=(28, 28, 1), classes=10, samples=300).x0.shape
        (300,)
    """
    y0, outputs = model.init(jr.key(seed), inputs)
    check_classes(outputs, classes, "model")
    classifier = OfModel(model)
    metrics = (
        {} if test is None else {"test_accuracy": OnTable(Accuracy(classifier), table(test, inputs, classes))}
    )
    metrics |= {} if truth is None else _detection(truth, samples)
    upper, lower = CrossEntropy(classifier), CleaningLoss(classifier, penalty, oracle)
    measures: dict[str, Any] = {"metrics": metrics, "client_metrics": {"accuracy": Accuracy(classifier)}}
    return Problem(upper, lower, jnp.zeros(samples), y0, classes=classes, **measures | options)


def _detection(truth: Mapping[str, Any], samples: int) -> dict[str, OnTable]:
    """How well corrupted samples are told from others, if there are both."""
    columns = {name: jnp.asarray(truth[name]) for name in ("client", "place", "corrupted")}
    if (last := int(columns["place"].max())) >= samples:
        raise ProblemError(
            f"samples is {samples}, but the places of the training samples go up to {last}; give "
            "`block_length(clients)`"
        )
    if not 0 < int(columns["corrupted"].sum()) < len(columns["corrupted"]):
        return {}
    return {
        "detection_f1": OnTable(DetectionF1(), columns),
        "detection_auc": OnTable(DetectionAuc(), columns),
    }


def _of_samples(x: jax.Array, truth: PyTree) -> jax.Array:
    """Every training sample's entry of x: of its client's row where clients have blocks of their own."""
    return x[truth["place"]] if x.ndim == 1 else x[truth["client"], truth["place"]]


def _training(clients: Clients, name: str) -> Any:
    """A column of all training samples, client by client."""
    lower = clients.lower
    if not isinstance(lower.flat, dict) or name not in lower.flat:
        raise DataError(
            f"the training samples have no column {name!r}; data cleaning needs it: "
            'federate(..., places="own"), or places = "own" in the table [data] of an experiment'
        )
    column = np.asarray(lower.flat[name])
    return column if lower.rows is None else column[np.asarray(lower.rows)]
