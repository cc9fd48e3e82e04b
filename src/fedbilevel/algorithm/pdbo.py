"""PDBO: personalised decentralised bilevel optimisation over random, directed networks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.adjoint.backward import When
from fedbilevel.adjoint.push import HGP, VRHGP, Equilibrium, PushAdjoint, growth, receiving_weights
from fedbilevel.algorithm.base import Algorithm, Info, check_tunes_x
from fedbilevel.algorithm.sgp import Lower, PushSum, first_lower, rates_of_steps
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.network import Links, Network
from fedbilevel.fed.network_check import check_all_answer, check_links, check_push_sum
from fedbilevel.fed.place import At, Kept
from fedbilevel.fed.program import Program
from fedbilevel.local.optimizer import Adam, Optimizer, optimizer
from fedbilevel.local.push_sum import Displaced, ReceivingWeights, Restart
from fedbilevel.name import check_choice
from fedbilevel.number import check_count, whole
from fedbilevel.problem.oracle import Client
from fedbilevel.schedule import Rate, rate
from fedbilevel.tree import PyTree, copies, scale


class Upper(NamedTuple):
    """What nodes keep of the upper level: x, its push-sum weight, and the memory of the optimiser.

    Besides, the lengths of the first and the last term of the latest hypergradient, `(2,)`.
    """

    x: Kept
    w: Kept
    memory: Kept
    lengths: Kept


class PersonalState(NamedTuple):
    """Both levels at the nodes, and the number of exchanges so far."""

    upper: Upper
    lower: Lower
    time: jax.Array


class UpperStep(Program):
    """`(x, h, memory) ↦ (x, memory)`: a step of the node's own optimiser along its hypergradient."""

    rule: Optimizer

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, h, memory = values
        x, memory = self.rule.step(x, h, memory)
        return me.problem.constraint(x), memory


class Agreed(Program):
    """`(z, w) ↦ x = z/w`, where it may be."""

    def __call__(self, me: Client, *values: Any) -> PyTree:
        z, w = values
        return me.problem.constraint(scale(1 / w, z))


def rate_or_inner(value: Any) -> Any:
    """A step size, or which of the inner ones it is."""
    if not isinstance(value, str):
        return rate(value)
    check_choice("adjoint_lr", value, ("first", "last"))
    return value


class PDBO(Algorithm[PersonalState]):
    """Every node tunes hyperparameters x_i of its own, for the mean outer cost of all; nobody is the server.

        min over x_1..x_n of mean_i f_i(x_i, y_i) ,   y_i the consensus on argmin_y mean_i g_i(x_i, y)

    A step: M rounds of hypergradient push at the point the lower level has reached; a step of every node's
    optimiser on its x_i; T steps of stochastic gradient push under the new x. The start runs T steps under
    x0, so the first row of a history is the network at the initial hyperparameters. In both means nodes count
    by the weights of `Clients`.

    Args:
        links: who hears whom (`fedbilevel.links`).
        lower_lr: α of stochastic gradient push; a number, or an optax schedule of the INNER step.
        lower_steps: T, steps of gradient push on y in a step of x.
        upper: the optimiser of x_i: one of `fedbilevel.Adam`, `SGD`, of optax, or a dict of these for the
            blocks of x. (Transformations of optax are closures, which cannot be sent to another process.)
        terms: M, rounds of hypergradient push.
        alpha, beta: of VR-HGP; None for both: plain HGP.
        adjoint: another way to the hypergradient, in the place of `terms`, `alpha` and `beta`
            (`adjoint.HGP`, `VRHGP`, `RecurrentBackpropagation`; `algorithm.ITD`).
        adjoint_lr: α in the recursion of the hypergradient, which differentiates an inner step: a number, a
            schedule of the outer step, or the "first" or the "last" of `lower_lr`. M terms make an inverse of
            at most about αM: curvatures below `1/(αM)` count as if they were that. So the larger α is the
            better, up to where the series diverges. The authors' program has the last one.
        warm_start: go on from the last y, in the place of starting from y0 in every step.
        when: whether nodes make their gradient step "before" they send or "after" they have received.
        statistics: `p̄_ij/δ̄_{j→i}`, which correct for links that are rarely there: "estimated" by the nodes
            while they push, "known" from the network, or `(n, n)` numbers of one's own.
        consensus: agree on one x too, by push-sum after each step (CDBO).
        local: every node solves its own lower level, without exchanges (with `consensus`: CDBO-Local).

    Cost a step: `T + M` rounds; over every link that is present d_y + 1 scalars in T of them and d_y
    (VR-HGP: 2d_y) in M, neither of both where `local`; a node T calls of g_y, M (2M) of g_yy and g_xy, one of
    f_x and f_y. `consensus` adds a round, d_x + 1.

    Reference: N. Terashita, S. Hara, Personalized decentralized bilevel optimization over random directed
    networks, 2022.
    """

    links: Links
    lower_lr: Rate = eqx.field(converter=rate)
    lower_steps: int = eqx.field(static=True, converter=whole)
    upper: Optimizer = eqx.field(converter=optimizer, default=Adam(0.1))
    terms: int | None = eqx.field(static=True, converter=whole, default=None)
    alpha: Any = 0.9
    beta: Any = 0.1
    adjoint: Any = None
    adjoint_lr: Any = eqx.field(converter=rate_or_inner, default="first")
    warm_start: bool = eqx.field(static=True, default=False)
    when: When = eqx.field(static=True, default="after")
    statistics: Any = "estimated"
    consensus: bool = eqx.field(static=True, default=False)
    local: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        check_count("lower_steps", self.lower_steps)
        if isinstance(self.statistics, str) and self.statistics not in ("estimated", "known"):
            raise ValueError(
                f'statistics is {self.statistics!r}; it must be "estimated", "known" or a matrix'
            )
        if (self.alpha is None) != (self.beta is None):
            raise ValueError(f"alpha is {self.alpha} and beta {self.beta}; give both, or None for both (HGP)")
        check_links(self.links)
        PushSum(self.links, self.when)
        self._check_adjoint()

    def _check_adjoint(self) -> None:
        lacks = [name for name in ("check", "hypergradient") if not hasattr(self.adjoint, name)]
        if self.adjoint is not None and lacks:
            raise TypeError(
                f"adjoint is {self.adjoint!r}, which has no {lacks[0]}; give one such as "
                "fedbilevel.adjoint.HGP(terms), or None. One of your own has check(network) and "
                "hypergradient(fed, equilibrium, key)"
            )
        if (self.terms is None) == (self.adjoint is None):
            raise ValueError(
                f"terms is {self.terms!r} and adjoint {self.adjoint!r}; give one of the two: how many terms "
                "the hypergradient has, or another way to it, which has terms of its own"
            )
        adjoint = self._adjoint()  # its own settings are checked here
        if self.local and getattr(adjoint, "outer", None) != "local":
            raise ValueError(
                "with local=True nodes solve their own lower level, which asks nobody: "
                'the adjoint must have outer="local"'
            )

    def _adjoint(self) -> Any:
        if self.terms is None:
            return self.adjoint
        outer = {"outer": "local"} if self.local else {}
        plain = self.alpha is None
        return HGP(self.terms, **outer) if plain else VRHGP(self.terms, self.alpha, self.beta, **outer)

    def among(self, n: int) -> PDBO:
        network = self.links.network(n)
        check_push_sum(network)
        self._adjoint().check(network)
        return dataclasses.replace(self, links=network, statistics=self._statistics(network))

    def _statistics(self, network: Network) -> Any:
        if isinstance(self.statistics, str):
            return receiving_weights(network) if self.statistics == "known" else self.statistics
        n, numbers = network.base.shape[-1], jnp.asarray(self.statistics, float)
        if numbers.shape != (n, n):
            raise ValueError(f"statistics have shape {numbers.shape}; {n} clients need ({n}, {n})")
        if not bool(jnp.all(jnp.isfinite(numbers))):
            raise ValueError("statistics hold a NaN or an infinity; a link that is never heard has 0")
        return numbers

    def at(self, time: Any) -> Any:
        """A schedule of the inner step becomes the table of its values, which another process can read."""
        rates = rates_of_steps(self.lower_lr, self.lower_steps)
        return Algorithm.at(eqx.tree_at(lambda method: method.lower_lr, self, rates), time)

    # ------------------------------------------------------------------ steps

    def init(self, fed: Federation, key: jax.Array) -> PersonalState:
        check_tunes_x(fed.problem)
        x0 = copies(fed.problem.constraint(fed.problem.x0), fed.n)
        memory = jax.vmap(self.upper.init)(x0)
        lengths = fed.keep(jnp.zeros((fed.n, 2)))
        upper = Upper(fed.keep(x0), fed.keep(jnp.ones(fed.n)), fed.keep(memory), lengths)
        lower = self._descended(fed, upper, first_lower(fed), jnp.zeros((), jnp.int32), key)
        return PersonalState(upper, lower, jnp.asarray(self._inner_exchanges(), jnp.int32))

    def step(self, fed: Federation, state: PersonalState, key: jax.Array) -> tuple[PersonalState, Info]:
        k_adjoint, k_upper, k_links, k_lower = jr.split(key, 4)
        everyone, (x, weight, memory, _) = fed.everyone, state.upper
        h, lengths = self._hypergradient(fed, state, k_adjoint)
        out = everyone.run(UpperStep(self.upper), everyone.take(x), h, everyone.take(memory), key=k_upper)
        upper, time = Upper(x, weight, everyone.put(memory, out[1]), lengths), state.time + self._exchanges()
        if self.consensus:
            upper, time = self._agreed(fed, upper, out[0], time, k_links), time + 1
        else:
            upper = upper._replace(x=everyone.put(x, out[0]))
        start = state.lower if self.warm_start else _restarted(fed, state.lower)
        lower = self._descended(fed, upper, start, time, k_lower)
        return PersonalState(upper, lower, time + self._inner_exchanges()), {}

    def solution(self, state: PersonalState) -> tuple[PyTree, PyTree]:
        return state.upper.x, state.lower.y

    def findings(self, state: PersonalState, read: Callable[[Kept], PyTree]) -> dict[str, float]:
        """How the terms of the latest hypergradient grew, if there was one that has terms."""
        found = growth(read(state.upper.lengths))
        return {"push_growth": found} if found else {}

    # ------------------------------------------------------------------ parts

    def _hypergradient(self, fed: Federation, state: PersonalState, key: jax.Array) -> tuple[At, Kept]:
        """The hypergradient, and what nodes keep of its terms."""
        adjoint, at, kept = self._adjoint(), self._reached(fed, state), state.upper.lengths
        if not isinstance(adjoint, PushAdjoint):
            return adjoint.hypergradient(fed, at, key), kept
        h, lengths = adjoint.solve(fed, at, key)
        return h, fed.everyone.put(kept, lengths)

    def _descended(self, fed: Federation, upper: Upper, start: Lower, time: Any, key: jax.Array) -> Lower:
        links = None if self.local else self.links
        rates = rates_of_steps(self.lower_lr, self.lower_steps)
        return PushSum(links, self.when).run(fed, fed.everyone.take(upper.x), start, rates, key, time)

    def _reached(self, fed: Federation, state: PersonalState) -> Equilibrium:
        everyone = fed.everyone
        x, y = everyone.take(state.upper.x), everyone.take(state.lower.y)
        w = everyone.take(state.lower.statistics)["w"]  # one w may be so small that the recursion explodes
        receive = self._receive(fed, state.lower)
        return Equilibrium(x, y, w, receive, self.links, self.adjoint_rate(), self.when, state.time)

    def adjoint_rate(self) -> Any:
        """α in the recursion of the hypergradient: a number, once `at` has evaluated schedules."""
        if not isinstance(self.adjoint_lr, str):
            return self.adjoint_lr
        rates = rates_of_steps(self.lower_lr, self.lower_steps)
        return rates[0] if self.adjoint_lr == "first" else rates[-1]

    def _receive(self, fed: Federation, lower: Lower) -> At:
        everyone = fed.everyone
        if isinstance(self.statistics, str):
            return everyone.run(ReceivingWeights(), everyone.take(lower.statistics), key=jr.key(0))
        return everyone.take(fed.keep(self.statistics))

    def _exchanges(self) -> int:
        """How many exchanges a hypergradient takes. (Those of other kinds are references, not protocols.)"""
        adjoint = self._adjoint()
        return adjoint.exchanges(self.when) if isinstance(adjoint, PushAdjoint) else 0

    def _inner_exchanges(self) -> int:
        return 0 if self.local else self.lower_steps

    def _agreed(self, fed: Federation, upper: Upper, moved: At, time: Any, key: jax.Array) -> Upper:
        """x after a step, mixed with the neighbours': push-sum with a weight of its own."""
        check_all_answer(fed)
        everyone = fed.everyone
        before, w = everyone.take(upper.x), everyone.take(upper.w)
        # The hypergradient of the mean cost has the weights already; that of a node's own cost has not.
        mean_cost = getattr(self._adjoint(), "outer", "global") == "global"
        relative = everyone.relative_weights(alike=mean_cost)
        sent = everyone.run(Displaced(), before, moved, w, relative, key=key)
        mixed = everyone.push(sent, self.links, "x", key=key, time=time)
        x = everyone.run(Agreed(), mixed[0], mixed[1], key=key)
        return upper._replace(x=everyone.put(upper.x, x), w=everyone.put(upper.w, mixed[1]))


def _restarted(fed: Federation, lower: Lower) -> Lower:
    """y at y0 with weight one; what nodes know of the network stays."""
    everyone = fed.everyone
    begun = everyone.run(Restart(), everyone.take(lower.y), everyone.take(lower.w), key=jr.key(0))
    return lower._replace(y=everyone.put(lower.y, begun[0]), w=everyone.put(lower.w, begun[1]))
