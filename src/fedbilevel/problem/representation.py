"""Hyper-representation learning: a backbone that makes the best head good.

min_x  mean_i CE(head(y*(x), backbone(x, ·)); validation data of i)
y*(x) = argmin_y mean_i CE(head(y, backbone(x, ·)); training data of i) + (penalty/2)‖y‖²
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.problem.accuracy import Accuracy, check_classes, cross_entropy, on_test
from fedbilevel.problem.base import Problem
from fedbilevel.problem.model import Chain, Model
from fedbilevel.problem.objective import Separable
from fedbilevel.tree import PyTree, dot


class Representation(eqx.Module):
    """The classifier `head(y, backbone(x, inputs))`."""

    backbone: Model
    head: Model

    def __call__(self, x: PyTree, y: PyTree, inputs: jax.Array) -> jax.Array:
        return self.head(y, self.backbone(x, inputs))


class HeadLoss(eqx.Module, Separable):
    """The mean cross-entropy of a head y on a backbone's features, `+ (penalty/2)‖y‖²`."""

    representation: Representation
    penalty: Any = 0.0

    def __call__(self, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
        return self.on_features(y, self.features(x, samples))

    def features(self, x: PyTree, samples: PyTree) -> PyTree:
        return {**samples, "inputs": self.representation.backbone(x, samples["inputs"])}

    def on_features(self, y: PyTree, features: PyTree) -> jax.Array:
        logits = self.representation.head(y, features["inputs"])
        return jnp.mean(cross_entropy(logits, features["labels"])) + self.penalty / 2 * dot(y, y)


def HyperRepresentation(
    backbone: Model,
    head: Model,
    *,
    inputs: tuple[int, ...],
    classes: int,
    penalty: float = 0.01,
    test: Mapping[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> Problem:
    """Learn a backbone x on validation data, such that a head y trained on training data does well.

    Samples are dicts `{"inputs": (samples, *inputs), "labels": (samples,)}`. With a linear head the lower
    level is strongly convex, its curvature at least `penalty`.

    Args:
        backbone: its parameters are x.
        head: its parameters are y; one logit a class.
        inputs: the shape of one sample's inputs.
        classes: how many labels there are.
        penalty: of the head's parameters, biases included.
        test: columns `inputs` and `labels`: gives the metrics `test_accuracy` and `test_loss`.
        seed: draws the parameters to start from.
        **options: as for `Problem`; `client_metrics` is the clients' `accuracy` unless given.

    References: L. Franceschi et al., Bilevel programming for hyperparameter optimization and
    meta-learning, ICML 2018; FedNest, section 4.1 (an MLP 784-200-10: d_x = 157,000, d_y = 2,010).

    Example:
        >>> from fedbilevel.problem.model import MLP, Linear
        >>> from fedbilevel.tree import size
        >>> backbone = MLP((200,), output_activation="relu")
        >>> problem = HyperRepresentation(backbone, Linear(10), inputs=(28, 28, 1), classes=10)
        >>> size(problem.x0), size(problem.y0)
        (157000, 2010)
    """
    (x0, y0), outputs = Chain((backbone, head)).init(jr.key(seed), inputs)
    check_classes(outputs, classes, "head")
    classifier = Representation(backbone, head)
    upper, lower = HeadLoss(classifier), HeadLoss(classifier, penalty)
    measures: dict[str, Any] = {
        "metrics": on_test(classifier, test, inputs, classes),
        "client_metrics": {"accuracy": Accuracy(classifier)},
    }
    return Problem(upper, lower, x0, y0, classes=classes, **measures | options)
