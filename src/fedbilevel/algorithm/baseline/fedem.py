"""FedEM: personal mixtures of shared models, by expectation and maximisation."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from fedbilevel.algorithm.base import Algorithm, CannotRunError, Info, check_lengths
from fedbilevel.algorithm.baseline.local import first_own
from fedbilevel.data.batches import Batch
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.links import Complete, Links
from fedbilevel.fed.network import Network
from fedbilevel.fed.network_check import check_all_answer, check_links, check_push_sum
from fedbilevel.fed.place import Kept
from fedbilevel.fed.program import Program
from fedbilevel.local.push_sum import Displaced
from fedbilevel.local.work import Amount, Work, amount, check_amounts
from fedbilevel.number import whole
from fedbilevel.problem.accuracy import CrossEntropy
from fedbilevel.problem.base import Problem
from fedbilevel.problem.objective import Objective
from fedbilevel.problem.oracle import Client
from fedbilevel.problem.personal_loss import MixtureOfModels
from fedbilevel.schedule import Rate, rate
from fedbilevel.tree import PyTree, dot, step

# ------------------------------------------------------------ what a client does


class MeanResponsibilities(eqx.Module):
    """`(x, y, samples) ↦ mean_j q_j`, with `q_jk ∝ softmax(x)_k p_k(label_j | inputs_j)`: `(models,)`."""

    mixture: MixtureOfModels

    def __call__(self, x: PyTree, y: PyTree, samples: PyTree) -> Float[Array, " models"]:
        return jnp.mean(responsibilities(self.mixture, x, y, samples), axis=0)


class ExpectedLoss(eqx.Module):
    """`((x, start), y, samples) ↦ −mean_j Σ_k q_jk log p_k(label_j | inputs_j) + (penalty/2)‖y‖²`.

    q is that of `(x, start)`, p_k that of y. At `y = start` its gradient is that of the mixture's loss.
    """

    mixture: MixtureOfModels
    penalty: Any

    def __call__(self, x: PyTree, y: PyTree, samples: PyTree) -> jax.Array:
        own, start = x
        q = responsibilities(self.mixture, own, start, samples)
        losses = -self.mixture.component_log_likelihoods(own, y, samples)
        return jnp.mean(jnp.sum(q * losses, axis=1)) + self.penalty / 2 * dot(y, y)


def responsibilities(
    mixture: MixtureOfModels, x: PyTree, y: PyTree, samples: PyTree
) -> Float[Array, "samples models"]:
    """q: how likely it is that each of the models made each of the labels."""
    return jax.nn.softmax(mixture.weights(x) + mixture.component_log_likelihoods(x, y, samples))


class ExpectationMaximisation(Program):
    """`(x, y) ↦ (log π, y)`: the mean responsibilities at `(x, y)`, and τ SGD steps on the expected loss."""

    lr: Any
    work: Work

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, start = values
        loss, everything = mixture_loss(me.problem), me.with_batches_of(None)
        expecting = _with_lower(everything, MeanResponsibilities(loss.classifier))
        share = expecting.g(x, start, everything.batch("lower", me.key))
        maximising = _with_lower(me, ExpectedLoss(loss.classifier, loss.penalty))

        def body(batch: Batch, factor: Any, y: PyTree) -> PyTree:
            return step(y, self.lr * factor, maximising.g_y((x, start), y, batch))

        return _log(share), self.work.run(me, me.key, body, start)


def _with_lower(me: Client, lower: Objective) -> Client:
    """This client with another lower objective, whose evaluations are booked as those of g."""
    other = copy.copy(me)
    other.problem = dataclasses.replace(me.problem, lower=lower)
    return other


def _log(share: jax.Array) -> jax.Array:
    """The logarithm, finite also for a model that makes nothing of a client's data."""
    return jnp.log(jnp.maximum(share, jnp.finfo(share.dtype).tiny))


def mixture_loss(problem: Problem) -> Any:
    """The lower objective of a mixture; an error that explains if the problem is none."""
    loss: Any = problem.lower
    mixture = isinstance(loss, CrossEntropy) and isinstance(loss.classifier, MixtureOfModels)
    if not mixture or loss.classifier.weights.name is not None:
        raise ValueError(
            "FedEM trains a mixture of models whose weights are all of x, and this problem is none. Build "
            "it with `fedbilevel.Mixture(...)`, or use another method."
        )
    return loss


# ------------------------------------------------------------------- the method


class Mixed(NamedTuple):
    """x at the clients, y at the server (or a copy at every client), and how many steps were made."""

    x: Kept
    y: Any
    time: jax.Array


class FedEM(Algorithm[Mixed]):
    """Client i explains its labels by a mixture of K shared models y_k, with weights `π_i = softmax(x_i)`.

    A step: with `(x_i, y)` from before it, every client computes on all of its training samples j

        q_jk ∝ π_ik p_k(label_j | inputs_j) ,    π_i ← mean_j q_j ,   that is   x_i = log π_i

    makes τ SGD steps on `−mean_j Σ_k q_jk log p_k + (penalty/2)‖y‖²`, q as it is, and the server averages
    the models y. x_i never leaves its client. Without a server every client has a copy of the models, and
    mixes it with its neighbours' in the place of the average. Before that, the way that its steps have taken
    it is multiplied by n p_i, p_i its share of the weights of `Clients`, so that it counts as in the average.

    It solves `fedbilevel.Mixture`, and no other problem.

    Args:
        lower_lr: step size; a number or an optax schedule of the step.
        steps: τ, a number or a tuple with one for each client.
        epochs: shuffled passes over the data in the place of steps.
        cohort: clients in a round; None: all. Only with a server.
        links: `Complete()`: there is a server. Others: clients mix by these. They must be fixed, with doubly
            stochastic weights (`links.ErdosRenyi`); others are refused with a `CannotRunError`.

    Cost a step and client: one exchange; τ calls of g_y, and one of g on all training samples. With a server
    `K d` scalars each way, d those of one model; without, a message of `K d` scalars over every link.

    Reference: O. Marfoq, G. Neglia, A. Bellet, L. Kameni, R. Vidal, Federated multi-task learning under a
    mixture of distributions, NeurIPS 2021 (FedEM and D-FedEM).
    """

    lower_lr: Rate = eqx.field(converter=rate)
    steps: Amount = eqx.field(static=True, converter=amount, default=1)
    epochs: Amount | None = eqx.field(static=True, converter=amount, default=None)
    cohort: int | None = eqx.field(static=True, converter=whole, default=None)
    links: Links = Complete()

    def __check_init__(self) -> None:
        check_amounts(self, "steps", "epochs")
        if self.cohort is not None and not self._has_server:
            raise ValueError(
                f"cohort is {self.cohort}, but there is no server that could choose one; leave it out"
            )

    @property
    def _has_server(self) -> bool:
        return isinstance(self.links, Complete)

    def among(self, n: int) -> Any:
        if self._has_server:
            return self
        check_links(self.links)
        network = self.links.network(n)
        _check_doubly_stochastic(network)
        check_push_sum(network)
        return dataclasses.replace(self, links=network)

    def init(self, fed: Federation, key: jax.Array) -> Mixed:
        check_lengths(self, fed.n)
        mixture_loss(fed.problem)
        if not self._has_server:
            check_all_answer(fed)
        x, own = first_own(fed)
        return Mixed(x, fed.problem.y0 if self._has_server else own, jnp.zeros((), jnp.int32))

    def step(self, fed: Federation, state: Mixed, key: jax.Array) -> tuple[Mixed, Info]:
        k_cohort, k_steps = jr.split(key)
        cohort = fed.cohort(k_cohort, self.cohort)
        y = cohort.send(state.y, "y") if self._has_server else cohort.take(state.y)
        program = ExpectationMaximisation(self.lower_lr, Work("lower", self.steps, self.epochs))
        out = cohort.run(program, cohort.take(state.x), y, key=k_steps)
        x = cohort.put(state.x, out[0])
        if self._has_server:
            return Mixed(x, cohort.mean(out[1], "y"), state.time + 1), {}
        alike, relative = cohort.relative_weights(alike=True), cohort.relative_weights()
        sent = cohort.run(Displaced(), y, out[1], alike, relative, key=k_steps)
        mixed = cohort.push(sent[0], self.links, "y", time=state.time)
        return Mixed(x, cohort.put(state.y, mixed), state.time + 1), {}

    def solution(self, state: Mixed) -> tuple[PyTree, PyTree]:
        return state.x, state.y


def _check_doubly_stochastic(network: Network) -> None:
    """Raise an error that explains unless weights are fixed, and their rows and columns sum to one."""
    base, needed = np.asarray(network.base), "FedEM needs fixed, doubly stochastic weights or a server"
    always = (np.asarray(network.probability) >= 1) | (base == 0) | np.eye(base.shape[-1], dtype=bool)
    if not np.all(always):
        raise CannotRunError(f"{needed}; these links come and go")
    sums = np.stack([base.sum(axis=1), base.sum(axis=2)])
    if not bool(network.balanced) and not np.allclose(sums, 1, atol=1e-5):
        raise CannotRunError(f"{needed}; rows and columns of these sum to {sums.min():.3g}..{sums.max():.3g}")
