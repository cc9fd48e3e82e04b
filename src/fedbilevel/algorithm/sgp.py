"""Stochastic gradient push: descent on the mean of g by messages to neighbours alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.adjoint.backward import When
from fedbilevel.algorithm.base import Algorithm, Info, check_learns_y
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.network import Links
from fedbilevel.fed.network_check import check_all_answer, check_links, check_push_sum
from fedbilevel.fed.place import At, Kept
from fedbilevel.local.push_sum import Debiased, Noted, Stepped, Weighted
from fedbilevel.number import check_count
from fedbilevel.schedule import Rate, rate
from fedbilevel.tree import PyTree, copies


class Pushed(NamedTuple):
    """What nodes hold while they push: `(z, w)`, and what they have noted of the network."""

    held: At
    statistics: At


class Lower(NamedTuple):
    """What nodes keep of the lower level: `y = z/w`, w, and what they have noted of the network.

    That is sums of what they sent and heard, in how many exchanges, and the mean w of the last run's second
    half: over random links the w of a single exchange may be far from its mean, and be close to zero.
    """

    y: Kept
    w: Kept
    statistics: Kept


class Nodes(NamedTuple):
    """The state of a method without server: every node's own, and the number of exchanges so far."""

    x: Kept
    lower: Lower
    time: jax.Array


class PushSum(eqx.Module):
    """Steps of stochastic gradient push; a node's step size is α times its relative weight.

    Args:
        links: who hears whom; None: every node is alone, nothing is exchanged, and all have the step size α.
        when: "before": nodes send `z − α∇_y g_i(x_i, z/w)`; "after": they send z and then subtract
            `α∇_y g_i` of the old point.
    """

    links: Links | None
    when: When = eqx.field(static=True, default="after")

    def __check_init__(self) -> None:
        if self.when not in ("before", "after"):
            raise ValueError(f'when is {self.when!r}; it must be "before" or "after"')

    def exchange(self, fed: Federation, x: At, held: At, lr: Any, time: Any, key: jax.Array) -> At:
        """One gradient step at every node and one exchange: the new `(z, w)`."""
        everyone, links = fed.everyone, self.links
        k_batch, k_links = step_keys(key)
        relative = everyone.relative_weights(alike=links is None)

        def stepped(to: At) -> At:
            return everyone.run(Stepped(lr), x, held, to, relative, key=k_batch)

        def mixed(sent: At) -> At:
            return sent if links is None else everyone.push(sent, links, "z", key=k_links, time=time)

        return mixed(stepped(held)) if self.when == "before" else stepped(mixed(held))

    def step(
        self, fed: Federation, x: At, now: Pushed, lr: Any, time: Any, key: jax.Array, before: Any = 0
    ) -> Pushed:
        """An exchange; nodes note what they sent and heard, and w in a mean of `before` values so far."""
        held = self.exchange(fed, x, now.held, lr, time, key)
        if self.links is None:
            return Pushed(held, now.statistics)
        seen = fed.everyone.witnessed(self.links, key=step_keys(key)[1], time=time)
        return Pushed(held, fed.everyone.run(Noted(before), now.statistics, seen, held[1], key=key))

    def run(self, fed: Federation, x: At, start: Lower, rates: Any, key: jax.Array, first: Any = 0) -> Lower:
        """As many steps as there are `rates`, from what nodes keep; the first one is at the time `first`."""
        if self.links is not None:
            check_all_answer(fed)
        everyone = fed.everyone
        y, w, statistics = (everyone.take(value) for value in start)
        held = everyone.run(Weighted(), y, w, key=key)

        def body(index: Any, now: Pushed) -> Pushed:
            late = jnp.maximum(index - rates.shape[0] // 2, 0)
            return self.step(fed, x, now, rates[index], first + index, jr.fold_in(key, index), late)

        held, statistics = fed.loop(rates.shape[0], body, Pushed(held, statistics))
        y = everyone.run(Debiased(), held, key=key)
        return Lower(*(everyone.put(*pair) for pair in zip(start, (y, held[1], statistics), strict=True)))


def step_keys(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The keys of a step's batches and of its links."""
    k_batch, k_links = jr.split(key)
    return k_batch, k_links


class SGP(Algorithm[Nodes]):
    """Stochastic gradient push: every node descends on its own g_i and mixes with whom it hears.

        z_i ← Σ_j p_ji z_j ,  w_i ← Σ_j p_ji w_j ,  y_i = z_i/w_i

    with the gradient step before sending or after receiving. The weights that a node gives away sum to one,
    so no mass is lost when links are absent, and dividing by w corrects for nodes that hear more than
    others: over directed random networks all y_i approach the minimiser of the mean of g (up to the step
    size). In that mean node i has its share p_i of the weights of `Clients`: its step size is `α n p_i`.
    Where p_ij are doubly stochastic, w stays 1: decentralised SGD; with complete links, "before", it is
    FedAvg of one local step.

    x stays where it starts, at every node. A step is one exchange.

    Args:
        links: who hears whom (`fedbilevel.links`).
        lower_lr: α; a number or an optax schedule of the step. It must suit the node that counts most.
        when: "before" or "after".

    Cost a step: one round; a message of d_y + 1 scalars over every link that is present; one g_y a node.

    References: A. Nedić, A. Olshevsky, Stochastic gradient-push for strongly convex functions on time-varying
    directed graphs, IEEE TAC 2016 ("after"); M. Assran et al., Stochastic gradient push for distributed deep
    learning, ICML 2019 ("before").
    """

    links: Links
    lower_lr: Rate = eqx.field(converter=rate)
    when: When = eqx.field(static=True, default="after")

    def __check_init__(self) -> None:
        check_links(self.links)
        PushSum(self.links, self.when)

    def among(self, n: int) -> SGP:
        network = self.links.network(n)
        check_push_sum(network)
        return eqx.tree_at(lambda method: method.links, self, network)

    def init(self, fed: Federation, key: jax.Array) -> Nodes:
        x0 = copies(fed.problem.constraint(fed.problem.x0), fed.n)
        return Nodes(fed.keep(x0), first_lower(fed), jnp.zeros((), jnp.int32))

    def step(self, fed: Federation, state: Nodes, key: jax.Array) -> tuple[Nodes, Info]:
        push, rates = PushSum(self.links, self.when), jnp.asarray(self.lower_lr)[None]
        lower = push.run(fed, fed.everyone.take(state.x), state.lower, rates, key, state.time)
        return Nodes(state.x, lower, state.time + 1), {}

    def solution(self, state: Nodes) -> tuple[PyTree, PyTree]:
        return state.x, state.lower.y


def first_lower(fed: Federation) -> Lower:
    """Every node at y0 with weight one, having seen nothing."""
    check_learns_y(fed.problem)
    zeros = jnp.zeros((fed.n, fed.n))
    ones = jnp.ones(fed.n)
    nothing = {"sent": zeros, "heard": zeros, "exchanges": jnp.zeros(fed.n), "w": ones}
    return Lower(fed.keep(copies(fed.problem.y0, fed.n)), fed.keep(ones), fed.keep(nothing))


def rates_of_steps(lr: Any, steps: int) -> jax.Array:
    """A step size for each of the inner steps: of a number, a schedule of the inner step, or a table."""
    check_count("lower_steps", steps)
    value = jax.vmap(lr)(jnp.arange(steps)) if callable(lr) else jnp.asarray(lr)
    if value.shape not in ((), (steps,)):
        raise ValueError(
            f"lower_lr has the shape {value.shape}; give a number, or one for each of {steps} steps"
        )
    return jnp.broadcast_to(value, (steps,))
