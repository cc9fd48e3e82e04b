"""How well a classifier does: losses and accuracies of its logits.

A *classifier* here is a function `(x, y, inputs) -> logits (samples, classes)`; samples are dicts of
`inputs` and `labels` (whole numbers from 0). All of these are classes at the top level of a module, so
that a problem made of them can be named on a wire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from fedbilevel.problem.base import ProblemError, check_labels
from fedbilevel.tree import PyTree, dot

Classifier: TypeAlias = Callable[[PyTree, PyTree, jax.Array], jax.Array]
OfSamples: TypeAlias = Callable[[PyTree, PyTree, PyTree], jax.Array]


def cross_entropy(
    logits: Float[Array, "samples classes"], labels: Integer[Array, " samples"]
) -> Float[Array, " samples"]:
    """`−log softmax(logits)_label`, one number a sample.

    Example:
        >>> float(cross_entropy(jnp.zeros((1, 4)), jnp.array([2]))[0]) == float(jnp.log(4.0))
        True
    """
    # A product with one-hot rows in the place of a gather, whose derivatives are slow scatters.
    chosen = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return -jnp.sum(chosen * jax.nn.log_softmax(logits), axis=-1)


class CrossEntropy(eqx.Module):
    """The mean cross-entropy over the samples `+ (penalty/2)‖y‖²`.

    Attributes:
        classifier: gives the logits.
        penalty: makes it strongly convex in y where the logits are linear in y.
    """

    classifier: Classifier
    penalty: Any = 0.0

    def __call__(self, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
        logits = self.classifier(x, y, samples["inputs"])
        return jnp.mean(cross_entropy(logits, samples["labels"])) + self.penalty / 2 * dot(y, y)


class Accuracy(eqx.Module):
    """The share of samples whose largest logit is that of their label."""

    classifier: Classifier

    def __call__(self, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
        return jnp.mean(_correct(self.classifier, x, y, samples))


class BalancedAccuracy(eqx.Module):
    """The mean over the classes of the share of their samples that is recognised (their recall).

    Classes without a sample are left out. It is no mean over samples, so it says something about a whole
    table of samples only, not about a minibatch.
    """

    classifier: Classifier
    classes: int = eqx.field(static=True)

    def __call__(self, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
        correct = _correct(self.classifier, x, y, samples)
        member = jax.nn.one_hot(samples["labels"], self.classes, dtype=correct.dtype)
        size = jnp.sum(member, axis=0)
        recall = correct @ member / jnp.maximum(size, 1)
        return jnp.sum(recall) / jnp.sum(size > 0)


class OnTable(eqx.Module):
    """A function of `(x, y, samples)` on fixed samples: a metric of `(x, y)`.

    Example:
        >>> def squared_error(x, y, samples):
        ...     return jnp.mean((samples["labels"] - y) ** 2)
        >>> metric = OnTable(squared_error, {"labels": jnp.array([1.0, 3.0])})
        >>> float(metric(None, 2.0))
        1.0
    """

    function: OfSamples
    samples: PyTree

    def __call__(self, x: PyTree, y: PyTree) -> jax.Array:
        return self.function(x, y, self.samples)


def table(columns: Mapping[str, Any], input_shape: tuple[int, ...], classes: int) -> dict[str, jax.Array]:
    """The columns `inputs` and `labels` as arrays; an error that explains if they do not fit a classifier."""
    missing = [name for name in ("inputs", "labels") if name not in columns]
    if missing:
        raise ProblemError(f"the test data have the columns {sorted(columns)}; they need {missing} too")
    inputs, labels = (jnp.asarray(columns[name]) for name in ("inputs", "labels"))
    if inputs.shape[1:] != tuple(input_shape) or inputs.shape[:1] != labels.shape:
        raise ProblemError(
            f"the test data have inputs of shape {inputs.shape} and labels of shape {labels.shape}; "
            f"they must be {('samples', *input_shape)} and ('samples',)"
        )
    check_labels(labels, classes, "test")
    return {"inputs": inputs, "labels": labels}


def on_test(
    classifier: Classifier, columns: Mapping[str, Any] | None, input_shape: tuple[int, ...], classes: int
) -> dict[str, OnTable]:
    """The metrics `test_accuracy` and `test_loss` on test columns; none without them."""
    if columns is None:
        return {}
    samples = table(columns, input_shape, classes)
    return {
        "test_accuracy": OnTable(Accuracy(classifier), samples),
        "test_loss": OnTable(CrossEntropy(classifier), samples),
    }


def check_classes(output_shape: tuple[int, ...], classes: int, what: str) -> None:
    """Raise an error that explains unless a model's output is one logit a class."""
    if output_shape != (classes,):
        raise ProblemError(
            f"the {what} gives outputs of shape {output_shape}; it must give one logit for each of the "
            f"{classes} classes: shape {(classes,)}"
        )


def _correct(classifier: Classifier, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
    """One where a sample is recognised, zero elsewhere; in the type of the logits."""
    logits = classifier(x, y, samples["inputs"])
    return (jnp.argmax(logits, axis=-1) == samples["labels"]).astype(logits.dtype)
