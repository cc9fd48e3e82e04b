"""Iterative differentiation through stochastic gradient push: exact, for small problems."""

from __future__ import annotations

from typing import Any, Literal

import equinox as eqx
import jax
import jax.random as jr

from fedbilevel.adjoint.backward import AdjointStart, Backward, Begun, Total
from fedbilevel.adjoint.push import Equilibrium
from fedbilevel.algorithm.sgp import PushSum, step_keys
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.network import Network, Reversed
from fedbilevel.fed.place import At
from fedbilevel.local.push_sum import Debiased, Restart, Weighted
from fedbilevel.local.trajectory import (
    BackwardAt,
    NoTangents,
    OwnTotal,
    Record,
    Room,
    SteppedTangents,
    ThroughTangents,
)
from fedbilevel.number import check_count, whole
from fedbilevel.tree import scale


class ITD(eqx.Module):
    """The derivative of `mean f_i(x_i, y_i)` after T steps of push-sum from y0, in every node's own x.

    It makes T steps of its own, with one step size (`adjoint_lr` of PDBO, whose "last" may be one that hardly
    moves y), and differentiates these
    steps, with the links and batches that they drew, so it is exact whether or not they have converged.
    "backward" remembers T points at every node and sends adjoints back over the links in reverse order:
    in a real network the links of the past are gone, and directed ones have no way back. "forward"
    carries the derivatives of z in every x, n d_x vectors like y, in every message, and sums at the end
    what all nodes found. A reference to compare others with, on small problems. Nodes count by the
    weights of `Clients`.

    Args:
        steps: T, of gradient push, which are differentiated.
        mode: "backward" or "forward".

    Cost: T rounds of push-sum, and for "backward" T more with d_y scalars a link, T g_xy and g_yy a node; for
    "forward" T more with n d_x d_y scalars a link, n d_x g_yy and d_x g_xy a node and step, and one round in
    which a node sends n d_x scalars and gets d_x.

    Reference: L. Franceschi et al., Forward and reverse gradient-based hyperparameter optimization, ICML
    2017; PDBO, appendix H.
    """

    steps: int = eqx.field(static=True, converter=whole)
    mode: Literal["backward", "forward"] = eqx.field(static=True, default="backward")

    def __check_init__(self) -> None:
        check_count("steps", self.steps)
        if self.mode not in ("backward", "forward"):
            raise ValueError(f'mode is {self.mode!r}; it must be "backward" or "forward"')

    def check(self, network: Network) -> None:
        """Any links will do: this is a reference, not a protocol."""

    def hypergradient(self, fed: Federation, at: Equilibrium, key: jax.Array) -> At:
        """The hypergradient in its own x, at every node."""
        k_start, k_steps = jr.split(key)
        through = self._backward if self.mode == "backward" else self._forward
        return through(fed, at, k_start, k_steps)

    def _backward(self, fed: Federation, at: Equilibrium, k_start: jax.Array, k_steps: jax.Array) -> At:
        everyone, push = fed.everyone, PushSum(at.links, at.when)
        held, relative = _begun(fed, at), everyone.relative_weights()
        history = everyone.run(Room(self.steps), held, key=k_start)

        def ahead(index: Any, carry: tuple[At, At]) -> tuple[At, At]:
            held, history = carry
            history = everyone.run(Record(index), history, held, key=k_start)
            return push.exchange(fed, at.x, held, at.lr, at.time + index, jr.fold_in(k_steps, index)), history

        held, history = fed.loop(self.steps, ahead, (held, history))
        direct, c = _at_the_end(fed, at, held, k_start)
        begun = everyone.run(Begun(1), at.x, c, key=k_start)
        rule = Backward(at.lr, 1.0, 0.0, at.when)

        def back(index: Any, carry: tuple[At, At]) -> tuple[At, At]:
            v, vectors = carry
            place = self.steps - 1 - index
            k_batch, k_links = step_keys(jr.fold_in(k_steps, place))
            links, time = Reversed(at.links), at.time + place
            received = everyone.push(vectors, links, "u", key=k_links, time=time)
            program = BackwardAt(rule, place)
            out = everyone.run(program, at.x, relative, history, v, vectors, c, received, key=k_batch)
            return out[0], out[1]

        v, _ = fed.loop(self.steps, back, (begun[0], begun[1]))
        return everyone.run(Total("global"), direct, v, key=k_start)

    def _forward(self, fed: Federation, at: Equilibrium, k_start: jax.Array, k_steps: jax.Array) -> At:
        everyone, push = fed.everyone, PushSum(at.links, at.when)
        held, relative = _begun(fed, at), everyone.relative_weights()
        tangents = everyone.run(NoTangents(fed.n), at.x, held[0], key=k_start)

        def ahead(index: Any, carry: tuple[At, At]) -> tuple[At, At]:
            held, tangents = carry
            key, time = jr.fold_in(k_steps, index), at.time + index
            k_batch, k_links = step_keys(key)

            def stepped(to: At) -> At:
                return everyone.run(SteppedTangents(at.lr), at.x, held, to, relative, tangents, key=k_batch)

            def mixed(sent: At) -> At:
                return everyone.push(sent, at.links, "tangents", key=k_links, time=time)

            new = mixed(stepped(tangents)) if at.when == "before" else stepped(mixed(tangents))
            return push.exchange(fed, at.x, held, at.lr, time, key), new

        held, tangents = fed.loop(self.steps, ahead, (held, tangents))
        direct, c = _at_the_end(fed, at, held, k_start)
        mine = everyone.run(ThroughTangents(), tangents, c, key=k_start)
        total = scale(fed.n, everyone.mean(mine, "sum", weight=[1.0] * fed.n))
        return everyone.run(OwnTotal(), at.x, direct, everyone.deal(total, "sum"), key=k_start)


def _begun(fed: Federation, at: Equilibrium) -> At:
    """`(z, w)` of every node where the problem starts."""
    everyone = fed.everyone
    start = everyone.run(Restart(), at.y, at.w, key=jr.key(0))
    return everyone.run(Weighted(), start[0], start[1], key=jr.key(0))


def _at_the_end(fed: Federation, at: Equilibrium, held: At, key: jax.Array) -> tuple[At, At]:
    """A node's share of the mean cost at the last point: its direct gradient, and that in z."""
    everyone = fed.everyone
    y, relative = everyone.run(Debiased(), held, key=key), everyone.relative_weights()
    start = everyone.run(AdjointStart("global", fed.n), at.x, y, held[1], relative, key=key)
    return start[0], start[1]
