"""Classification by FedSep with sub-models: what is tested is the server's whole model, its x."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax

from fedbilevel.problem.accuracy import Accuracy, CrossEntropy, OnTable, table
from fedbilevel.problem.base import Problem
from fedbilevel.problem.classification import Classification, InBlocks
from fedbilevel.problem.model import Model, Shape
from fedbilevel.tree import PyTree


class OfServerModel(eqx.Module):
    """`(x, y, inputs) ↦ logits` of a model whose parameters are x; y, one model a client, does not matter."""

    model: Model

    def __call__(self, x: PyTree, y: PyTree, inputs: jax.Array) -> jax.Array:
        return self.model(x, inputs)


def ServerModel(
    model: Model,
    *,
    inputs: Shape,
    classes: int,
    penalty: float = 0.0,
    test: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Problem:
    """`Classification` whose `test_accuracy` and `test_loss` are those of the server's model, x.

    For FedSep with the decoder `Submodel`, whose x is a whole model, and whose y are clients' parts of it.

    Args:
        model: its parameters are x, and parts of them y; one logit a class.
        inputs, classes, penalty, test, seed: as for `Classification`.
    """
    settings: dict[str, Any] = {"inputs": inputs, "classes": classes, "penalty": penalty, "seed": seed}
    if test is not None:
        samples, classifier = table(test, inputs, classes), InBlocks(OfServerModel(model))
        settings["metrics"] = {
            "test_accuracy": OnTable(Accuracy(classifier), samples),
            "test_loss": OnTable(CrossEntropy(classifier), samples),
        }
    return Classification(model, **settings)
