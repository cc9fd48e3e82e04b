"""Classification by FedSep with sub-models: what is tested is the server's whole model, its x."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax

from fedbilevel.problem.accuracy import Accuracy, on_test
from fedbilevel.problem.base import Problem
from fedbilevel.problem.classification import Classification, InBlocks
from fedbilevel.problem.model import Model, Shape
from fedbilevel.tree import PyTree


class OfServerModel(eqx.Module):
    """`(x, y, inputs) ↦ logits` of a model whose parameters are x; y does not matter."""

    model: Model

    def __call__(self, x: PyTree, y: PyTree, inputs: jax.Array) -> jax.Array:
        return self.model(x, inputs)


def shows_x(problem: Problem) -> bool:
    """Whether metrics of a problem look at a model x, and not at y."""
    parts = jax.tree.leaves(
        (problem.metrics, problem.client_metrics), is_leaf=lambda part: isinstance(part, OfServerModel)
    )
    return any(isinstance(part, OfServerModel) for part in parts)


def ServerModel(
    model: Model,
    *,
    inputs: Shape,
    classes: int,
    penalty: float = 0.0,
    test: Mapping[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> Problem:
    """`Classification` whose metrics, on test samples and at clients, are those of the server's model, x.

    For FedSep with the decoder `Submodel`, whose x is a whole model, and whose y are clients' parts of it.

    Args:
        model: its parameters are x, and parts of them y; one logit a class.
        inputs, classes, penalty, test, seed, **options: as for `Classification`.
    """
    classifier = InBlocks(OfServerModel(model))
    measures: dict[str, Any] = {
        "metrics": on_test(classifier, test, inputs, classes),
        "client_metrics": {"accuracy": Accuracy(classifier)},
    }
    settings: dict[str, Any] = {"inputs": inputs, "classes": classes, "penalty": penalty, "seed": seed}
    problem = Classification(model, **settings, **measures | options)
    return problem.at(problem.y0, problem.y0)
