"""What a client's own classifier is, and its losses: the parts that personalisation problems are made of.

A *classifier* is a function `(x, y, inputs) -> logits (samples, classes)`; x is the client's own, y shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedbilevel.problem.accuracy import Classifier, CrossEntropy, OfSamples, cross_entropy
from fedbilevel.problem.model import Model
from fedbilevel.tree import PyTree, dot, row

# ------------------------------------------------------------------ classifiers


class Part(eqx.Module):
    """`x ↦ x[name]`, or x itself where there is no name."""

    name: str | None = eqx.field(static=True, default=None)

    def __call__(self, x: PyTree) -> Any:
        return x if self.name is None else x[self.name]


def mixed(
    log_weights: Float[Array, " models"], logits: Float[Array, "models samples classes"]
) -> Float[Array, "samples classes"]:
    """`log Σ_k w_k softmax(logits_k)`: the logarithm of a weighted mean of probabilities.

    These are logits too: their softmax is the mean itself.
    """
    return jax.nn.logsumexp(log_weights[:, None, None] + jax.nn.log_softmax(logits), axis=0)


def mean_one(scores: Float[Array, " classes"]) -> Float[Array, " classes"]:
    """`C softmax(scores)`: positive, of mean one, and all of them one where the scores are equal."""
    return scores.size * jax.nn.softmax(scores)


class ScaledLogits(eqx.Module):
    """`C softmax(c) ⊙ model(y, inputs)`: own weights of the logits; c is a part of x."""

    model: Model
    weights: Part

    def __call__(self, x: PyTree, y: PyTree, inputs: jax.Array) -> jax.Array:
        return mean_one(self.weights(x)) * self.model(y, inputs)


class MixtureOfModels(eqx.Module):
    """The mean of the probabilities that the models y (stacked) give, with weights `softmax(x)`.

    Attributes:
        each: what one of the models predicts.
        weights: the part of x with one number for each model.
    """

    each: Classifier
    weights: Part

    def __call__(self, x: PyTree, y: PyTree, inputs: jax.Array) -> jax.Array:
        logits = jax.vmap(self.each, in_axes=(None, 0, None))(x, y, inputs)
        return mixed(jax.nn.log_softmax(self.weights(x)), logits)

    def component_log_likelihoods(
        self, x: PyTree, y: PyTree, samples: PyTree
    ) -> Float[Array, "samples models"]:
        """The logarithm of the probability that each of the models gives to each sample's label."""
        logits = jax.vmap(self.each, in_axes=(None, 0, None))(x, y, samples["inputs"])
        return -jax.vmap(cross_entropy, in_axes=(0, None), out_axes=1)(logits, samples["labels"])


class OwnHead(eqx.Module):
    """`head(x, backbone(y, inputs))`."""

    backbone: Model
    head: Model

    def __call__(self, x: PyTree, y: PyTree, inputs: jax.Array) -> jax.Array:
        return self.head(x, self.backbone(y, inputs))


class OwnAndGlobal(eqx.Module):
    """`σ(w) softmax(model(own)) + (1 − σ(w)) softmax(model(y))`, as logarithms; w and own are x."""

    model: Model

    def __call__(self, x: PyTree, y: PyTree, inputs: jax.Array) -> jax.Array:
        weight = x["weight"]
        logits = jnp.stack([self.model(x["model"], inputs), self.model(y, inputs)])
        return mixed(jnp.stack([jax.nn.log_sigmoid(weight), jax.nn.log_sigmoid(-weight)]), logits)


# ----------------------------------------------------------------------- losses


class ClassWeightedLoss(eqx.Module):
    """`mean_j C softmax(c)_label(j) CE_j + (penalty/2)‖y‖²`, c a part of x with one number for each class.

    At c = 0 it is the plain cross-entropy. It is a mean over samples, as an objective over minibatches must
    be, so the weights are not normalised over the classes that a client has.
    """

    classifier: Classifier
    weights: Part
    penalty: Any

    def __call__(self, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
        scores, labels = self.weights(x), samples["labels"]
        losses = cross_entropy(self.classifier(x, y, samples["inputs"]), labels)
        member = jax.nn.one_hot(labels, scores.size, dtype=losses.dtype)  # no gather, as in `cross_entropy`
        weight = member @ mean_one(scores)
        return jnp.mean(weight * losses) + self.penalty / 2 * dot(y, y)


class OwnLoss(eqx.Module):
    """The mean cross-entropy `+ (penalty/2)‖x‖²`; a dict of penalties names the parts of x that have one."""

    classifier: Classifier
    penalty: Any

    def __call__(self, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
        parts = x if isinstance(self.penalty, Mapping) else {"": x}
        penalties = self.penalty if isinstance(self.penalty, Mapping) else {"": self.penalty}
        sizes = [penalty / 2 * dot(parts[name], parts[name]) for name, penalty in penalties.items()]
        return CrossEntropy(self.classifier)(x, y, samples) + sum(sizes)


class OnTableOfAll(eqx.Module):
    """A metric of `(x, y)` on fixed samples; where clients have their own x or y, the mean over the clients.

    Attributes:
        function: of `(x, y, samples)`.
        samples: the table.
        ranks: the axes of the first leaf of one client's x and y. One axis more is that of the clients.
    """

    function: OfSamples
    samples: PyTree
    ranks: tuple[int, int] = eqx.field(static=True)

    def __call__(self, x: PyTree, y: PyTree) -> jax.Array:
        shapes = [jnp.shape(jax.tree.leaves(variable)[0]) for variable in (x, y)]
        is_own = [len(shape) > rank for shape, rank in zip(shapes, self.ranks, strict=True)]
        if not any(is_own):
            return self.function(x, y, self.samples)

        def of_client(place: jax.Array) -> jax.Array:
            own_x, own_y = (row(v, place) if own else v for v, own in zip((x, y), is_own, strict=True))
            return self.function(own_x, own_y, self.samples)

        # One client after another: all of them on the whole table would not fit into memory.
        return jnp.mean(jax.lax.map(of_client, jnp.arange(shapes[is_own.index(True)][0])))
