"""Hypergradients by messages between neighbours: HGP, VR-HGP and exact recurrent backpropagation.

At the stationary point of the lower level's iteration over the network, with A and B the transposed
derivatives of that iteration in z and x (means over the random links), the hypergradient is `c_x + B (I −
A)⁻¹ c`. Its series needs what node i sent to j to come back from j to i. Hypergradient push takes instead
what i receives, and divides by how often it does: over directed links too, the mean is right.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
import numpy.typing as npt

from fedbilevel.adjoint.backward import AdjointStart, Backward, Begun, Lengths, Outer, Total, When
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.network import Links, Network, Reversed
from fedbilevel.fed.network_check import check_both_ways, check_undirected
from fedbilevel.fed.place import At
from fedbilevel.number import check_count, check_not_negative, check_shares, known_number, whole

Matrix = npt.NDArray[Any]


class Equilibrium(NamedTuple):
    """Where the lower level has come to rest, at the nodes, and how its iteration got there.

    Attributes:
        x, y, w: upper variable, debiased lower variable `z/w`, push-sum weight of every node (over random
            links its mean).
        receive: `(n,)` at every node: `p̄_ij/δ̄_{j→i}`, its weights for what it receives.
        links: the network.
        lr: α.
        when: where the gradient step is.
        time: the number of the next exchange.
    """

    x: At
    y: At
    w: At
    receive: At
    links: Links
    lr: Any
    when: When
    time: Any = 0


class PushAdjoint(eqx.Module):
    """The recursion of hypergradient push: `HGP`, `VRHGP` and `RecurrentBackpropagation` make one.

        v ← a (v + B̂u) + (1 − a) B̂w̃
        u' ← Âu
        w̃ ← b (Âw̃ + c) + (1 − b)(w̃ + u') ;  u ← u'            v = 0, u = w̃ = c at first

    and the hypergradient is v and the direct gradient. (a, b) = (1, 0) is HGP, where only u is sent. Nodes
    count by the weights of `Clients`, in the iteration and in the mean cost. Its links must come from one
    distribution: over a schedule (`links.Given` with several matrices) the exchanges would have to go back in
    time, and what comes out is biased, however many the terms (`ITD` is exact there).

    Args:
        terms: M, how many rounds.
        alpha, beta: a and b.
        edges: "shared": one draw of links and one batch for both lines of a round; "independent": one each,
            as the theory has it. Both are unbiased. Where the lower level steps after receiving, the
            first line needs no messages.
        outer: whose cost is differentiated by x_i: the "global" mean over nodes; the node's "own" (n times
            the traffic); or its own as if it had no neighbours, "local", without traffic. The last two are
            for comparison: they do not descend on the mean cost.
        back: "debiased": what arrives, weighed by the receiver (needs links both ways); "reversed": the
            sender's weights of the opposite link (needs undirected links, exact where these are fixed).
        reduced: whether w̃ is carried and sent beside u (VR-HGP); without, (a, b) must be (1, 0).
        whole: start from `∇f_i` of all of a node's samples, as the paper does, not of a minibatch. Where f
            and g are one loss on the same samples, the mean `∇f` is nearly zero at rest, all else noise.
        damping: added to the diagonal of every H_i, where g is not strongly convex in y and the series would
            grow; the hypergradient is then that of g plus `damping/2 ‖y − y_rest‖²`. None: nothing.

    The series converges where its terms shrink. Where the lower level steps before sending, a term becomes
    `(I − (α/w) H) P u`, shorter if α is below `2w/λ`, λ the largest curvature of g at any node. Where
    it steps after receiving, it becomes `P u − (α/w) H u`, and the bound is about half of that: over fixed
    symmetric weights `(1 + λ_min(P))/λ`, which is `1/λ` over complete links. Along negative curvature that
    nodes share no α is small enough.

    Cost a node and round: one g_xy and g_yy each (VR-HGP: two), on one batch if shared; a message of d_y
    scalars (VR-HGP: 2d_y) a link. Independent edges where the lower level steps before sending: two messages.

    Reference: N. Terashita, S. Hara, Personalized decentralized bilevel optimization over random directed
    networks, 2022, algorithms 4 and 5 (with w in line 22 of the latter, and v starting from zero).
    """

    terms: int = eqx.field(static=True, converter=whole)
    alpha: Any = 1.0
    beta: Any = 0.0
    edges: Literal["shared", "independent"] = eqx.field(static=True, default="shared")
    outer: Outer = eqx.field(static=True, default="global")
    back: Literal["debiased", "reversed"] = eqx.field(static=True, default="debiased")
    reduced: bool = eqx.field(static=True, default=False)
    whole: bool = eqx.field(static=True, default=False)
    damping: Any = None

    def __check_init__(self) -> None:
        check_count("terms", self.terms, least=0)
        check_shares(self, "alpha", "beta")
        if self.damping is not None:
            check_not_negative(self, "damping")
        numbers = [known_number(value) for value in (self.alpha, self.beta)]
        if not self.reduced and None not in numbers and numbers != [1, 0]:
            raise ValueError(
                f"alpha is {self.alpha} and beta {self.beta}, which plain hypergradient push does not have; "
                "they are of VRHGP"
            )
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {allowed}")

    def check(self, network: Network) -> None:
        """Raise an error that explains if the recursion cannot run over these links."""
        if self.outer == "local":
            return
        (check_undirected if self.back == "reversed" else check_both_ways)(network)
        if network.base.shape[0] > 1:
            warnings.warn(
                "these links are a schedule of several matrices, over which the hypergradient is biased, "
                "however many its terms: exchanges would have to go back in time. ITD is exact there",
                stacklevel=2,
            )

    def exchanges(self, when: When) -> int:
        """How many exchanges the recursion takes."""
        return 0 if self.outer == "local" else self.terms * (2 if self._twice(when) else 1)

    def hypergradient(self, fed: Federation, at: Equilibrium, key: jax.Array) -> At:
        """The hypergradient in its own x, at every node."""
        return self.solve(fed, at, key)[0]

    def solve(self, fed: Federation, at: Equilibrium, key: jax.Array) -> tuple[At, At]:
        """The hypergradient, and the lengths of the first and the last term, `(2,)`, at every node."""
        everyone = fed.everyone
        k_start, k_rounds = jr.split(key)
        point = *at[:3], everyone.relative_weights(alike=self.outer == "local")
        start = everyone.run(AdjointStart(self.outer, fed.n, self.whole), *point, key=k_start)
        begun = everyone.run(Begun(2 if self.reduced else 1), at.x, start[1], key=key)

        def body(index: Any, carry: tuple[At, At]) -> tuple[At, At]:
            v, vectors = carry
            k_run, k_links, k_again = jr.split(jr.fold_in(k_rounds, index), 3)
            twice = self._twice(at.when)
            time = at.time + (2 if twice else 1) * index
            received = self._received(fed, at, vectors, time, k_links)
            again = self._received(fed, at, vectors, time + 1, k_again) if twice else received
            out = everyone.run(self._program(at), *point, v, vectors, start[1], received, again, key=k_run)
            return out[0], out[1]

        v, vectors = fed.loop(self.terms, body, (begun[0], begun[1]))
        lengths = everyone.run(Lengths(), start[1], vectors, key=key)
        return everyone.run(Total(self.outer), start[0], v, key=key), lengths

    def _program(self, at: Equilibrium) -> Backward:
        fresh = self.edges == "independent"
        return Backward(at.lr, self.alpha, self.beta, at.when, fresh, self.damping)

    def _twice(self, when: When) -> bool:
        return self.edges == "independent" and when == "before" and self.outer != "local"

    def _received(self, fed: Federation, at: Equilibrium, vectors: At, time: Any, key: jax.Array) -> At:
        if self.outer == "local":
            return vectors
        if self.back == "reversed":
            return fed.everyone.push(vectors, Reversed(at.links), "u", key=key, time=time)
        return fed.everyone.push(vectors, at.links, "u", key=key, time=time, receive=at.receive)


_CHOICES = {
    "edges": ("shared", "independent"),
    "outer": ("global", "own", "local"),
    "back": ("debiased", "reversed"),
}


def HGP(terms: int, **options: Any) -> PushAdjoint:
    """Hypergradient push, the plain recursion: unbiased, but over random links no better with more terms."""
    return PushAdjoint(terms, **options)


def VRHGP(terms: int, alpha: Any = 0.9, beta: Any = 0.1, **options: Any) -> PushAdjoint:
    """Hypergradient push with reduced variance, a mean of two estimates whose error falls with M.

    Args:
        terms: M, rounds of hypergradient push.
        alpha: how much of v is kept in a round, between 0 and 1.
        beta: how much of w̃ is made anew in a round, between 0 and 1.
        **options: as for `PushAdjoint`.
    """
    return PushAdjoint(terms, alpha, beta, reduced=True, **options)


def growth(lengths: Any) -> float:
    """The longest last term of a node over the longest first one; 0 where there is none.

    It falls with the number of terms where the series converges (see `PushAdjoint`), and rises where it does
    not. Over links that come and go a node may hear more than the mean by chance, and it may rise a little.

    Args:
        lengths: `(n, 2)`, those of the first and the last term at every node.
    """
    first, last = np.max(np.asarray(lengths, float), axis=0).tolist()
    return min(last / first, sys.float_info.max) if first > 0 else 0.0  # infinities have no place in JSON


def receiving_weights(network: Network) -> Matrix:
    """`(n, n)`: `p̄_ij/δ̄_{j→i}`, node i's factor of what it receives from j; 0 where it never hears j."""
    heard = network.heard()
    return np.where(heard > 0, network.expected().T / np.where(heard > 0, heard, 1), 0.0)


def RecurrentBackpropagation(terms: int, **options: Any) -> PushAdjoint:
    """The exact recursion `u ← Aᵀ-step`, with messages sent back over the links: undirected ones only."""
    return PushAdjoint(terms, back="reversed", **options)
