"""Plain classification: one model for everybody, and nothing above it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.problem.accuracy import Accuracy, Classifier, CrossEntropy, check_classes, on_test
from fedbilevel.problem.base import Problem
from fedbilevel.problem.loss_tuning import OfModel
from fedbilevel.problem.model import Model, Shape
from fedbilevel.tree import PyTree


class InBlocks(eqx.Module):
    """A classifier that looks at so many samples at a time: those of a whole table do not fit into memory.

    A convolution needs some hundred numbers for every pixel of every sample that it looks at. A model with
    static batch normalisation has the statistics of each block by itself, and of the remainder by itself.
    (The test samples of clients of unequal size are padded, and so looked at one by one: its statistics
    are then those of the pixels of one sample. Give such clients test sets of one size.)
    """

    classifier: Classifier
    samples: int = eqx.field(static=True, default=256)

    def __call__(self, x: PyTree, y: PyTree, inputs: jax.Array) -> jax.Array:
        count = len(inputs) // self.samples
        if not count:
            return self.classifier(x, y, inputs)
        whole, rest = inputs[: count * self.samples], inputs[count * self.samples :]
        blocks = whole.reshape(count, self.samples, *inputs.shape[1:])
        logits = jax.lax.map(lambda block: self.classifier(x, y, block), blocks)
        parts = [logits.reshape(-1, *logits.shape[2:])]
        return jnp.concatenate(parts + ([self.classifier(x, y, rest)] if len(rest) else []))


def Classification(
    model: Model,
    *,
    inputs: Shape,
    classes: int,
    penalty: float = 0.0,
    test: Mapping[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> Problem:
    """Train a classifier y: `f = g =` its mean cross-entropy `+ (penalty/2)‖y‖²`; x is the empty tree `()`.

    For methods that learn y alone (`CompressedFedAvg`, `FetchSGD`, `FedAvg` with `level="lower"`,
    `HeteroFL`), and for `FedSep` with a decoder that makes y of an x of its own (`SketchLasso`). Samples are
    dicts `{"inputs": (samples, *inputs), "labels": (samples,)}`.

    Args:
        model: its parameters are y; one logit a class.
        inputs: the shape of one sample's inputs.
        classes: how many labels there are.
        penalty: of all parameters, biases included.
        test: columns `inputs` and `labels`: gives the metrics `test_accuracy` and `test_loss` of y.
        seed: draws the parameters to start from.
        **options: as for `Problem`; `client_metrics` is the clients' `accuracy` unless given.

    Example:
        >>> from fedbilevel.problem.model import MLP
        >>> from fedbilevel.tree import size
        >>> problem = Classification(MLP((200, 10)), inputs=(28, 28, 1), classes=10)
        >>> size(problem.x0), size(problem.y0)
        (0, 159010)
    """
    y0, outputs = model.init(jr.key(seed), inputs)
    check_classes(outputs, classes, "model")
    loss, classifier = CrossEntropy(OfModel(model), penalty), InBlocks(OfModel(model))
    measures: dict[str, Any] = {
        "metrics": on_test(classifier, test, inputs, classes),
        "client_metrics": {"accuracy": Accuracy(classifier)},
    }
    return Problem(loss, loss, (), y0, classes=classes, **measures | options)
