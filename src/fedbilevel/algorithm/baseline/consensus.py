"""What a server makes of clients' logits on public samples: the consensus of FedDF, DS-FL and Fed-ET."""

from __future__ import annotations

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.place import At
from fedbilevel.number import check_not_negative, check_positive


class Consensus(eqx.Module):
    """What a client sends of its logits, and the target that the server makes of what all sent.

    A target is `(samples, classes)`: the weights of the classes in a cross-entropy.
    """

    def sent(self, logits: Float[Array, "samples classes"]) -> Float[Array, "samples classes"]:
        """What a client sends."""
        return logits

    @abc.abstractmethod
    def target(self, cohort: Cohort, sent: At) -> jax.Array:
        """The target, `(samples, classes)`; brings what was sent to the server."""


class MeanLogits(Consensus):
    """`softmax(mean logits)`."""

    def target(self, cohort: Cohort, sent: At) -> jax.Array:
        return jax.nn.softmax(cohort.mean(sent, "logits"))


class SharpMean(Consensus):
    """`softmax(mean softmax(logits) / T)`: a small T takes away entropy, which non-iid clients bring in."""

    temperature: Any = 0.1

    def __check_init__(self) -> None:
        check_positive(self, "temperature")

    def sent(self, logits: Float[Array, "samples classes"]) -> Float[Array, "samples classes"]:
        return jax.nn.softmax(logits)

    def target(self, cohort: Cohort, sent: At) -> jax.Array:
        return jax.nn.softmax(cohort.mean(sent, "logits") / self.temperature)


class Confident(Consensus):
    """Clients count as much as the variance of their logits over the classes: who is sure decides.

        v_i = Var_c logits_i     label = argmax Σ v_i logits_i / Σ v_i     target = onehot(label) + λ d

    d is the softmax of the same mean over those clients only whose own label is another one; zero if there
    are none. All of this is done for every sample by itself, with clients of equal weight.

    Args:
        diversity: λ.
    """

    diversity: Any = 0.05

    def __check_init__(self) -> None:
        check_not_negative(self, "diversity")

    def target(self, cohort: Cohort, sent: At) -> jax.Array:
        return self.of(*cohort.gather(sent, "logits"))

    def of(
        self, logits: Float[Array, "clients samples classes"], answered: Bool[Array, " clients"]
    ) -> Float[Array, "samples classes"]:
        """The target, by the logits of those who answered."""
        surety = jnp.var(logits, axis=-1) * answered[:, None]
        label = jnp.argmax(_weighted(logits, surety), axis=-1)
        others = surety * (jnp.argmax(logits, axis=-1) != label)
        heard = jnp.sum(others, axis=0)[:, None] > 0
        dissent = jnp.where(heard, jax.nn.softmax(_weighted(logits, others)), 0)
        return jax.nn.one_hot(label, logits.shape[-1], dtype=logits.dtype) + self.diversity * dissent


def _weighted(
    logits: Float[Array, "clients samples classes"], weights: Float[Array, "clients samples"]
) -> Float[Array, "samples classes"]:
    """The weighted mean over the clients, sample by sample; zero where all weights are."""
    total = jnp.sum(weights, axis=0)
    return jnp.einsum("csk,cs->sk", logits, weights) / jnp.where(total > 0, total, 1)[:, None]
