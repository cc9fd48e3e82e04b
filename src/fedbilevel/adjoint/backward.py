"""Hypergradients over a network: what a node computes between two exchanges of adjoints.

The lower level is an iteration z ← P φ(z) + ψ(z) over the network; with the gradient step before sending
(φ = z − α∇_y g(z/w), ψ = 0) or after receiving (φ = z, ψ = −α∇_y g(z/w)). If m is what a node receives of its
neighbours' adjoints u, the transposed derivative is, in both cases,

    u ← m − (α/w) H q,    v ← v − α J q,    q = m (before) or the node's own u (after).

Where nodes count by weights, α is that of the node: its relative weight (1 in the mean) times the common one.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.fed.program import Program
from fedbilevel.number import whole
from fedbilevel.problem.oracle import Client, Stacks
from fedbilevel.tree import PyTree, add, norm, row, scale, step

When: TypeAlias = Literal["before", "after"]
"""Whether a node makes its gradient step before it sends, or after it has received."""

Outer: TypeAlias = Literal["global", "own", "local"]
"""Whose outer cost: the mean over nodes, the node's own, or its own as if it had no neighbours."""


class AdjointStart(Program):
    """`(x, y, w, relative) ↦ (direct, c)`: the direct gradient, like x, and `∇_y f/w`, one row a target.

    For the mean cost there is one target, and both are multiplied by the node's share of it, 1/n times its
    relative weight. For every node's own cost there are n, and a node starts with its own row only. `whole`:
    of all of the node's samples, not of a minibatch.
    """

    outer: Outer = eqx.field(static=True)
    nodes: int = eqx.field(static=True, converter=whole)
    whole: bool = eqx.field(static=True, default=False)

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y, w, relative = values
        seen = me.with_batches_of(None) if self.whole else me
        f_x, f_y = seen.f_x_and_y(x, y, seen.batch("upper", me.key))
        if self.outer == "own":
            mine = (jnp.arange(self.nodes) == me.id).astype(w.dtype)
            c = scale(1 / w, f_y)
            return f_x, jax.tree.map(lambda leaf: jnp.multiply.outer(mine.astype(leaf.dtype), leaf), c)
        share = relative / self.nodes if self.outer == "global" else 1.0
        return scale(share, f_x), jax.tree.map(lambda leaf: leaf[None], scale(share / w, f_y))


class Backward(Program):
    """`(x, y, w, relative, v, vectors, c, received, again) ↦ (v, vectors)`: a step of the adjoint recursion.

    `vectors` are `(u,)`, or `(u, w̃)` where variance is reduced, each with a leading axis of targets,

        v ← a v − α J(a q_u + (1 − a) q_w̃)
        u ← Âu
        w̃ ← b (Âw̃ + c) + (1 − b)(w̃ + u)

    with Âu = m − (α/w) (H + damping) q. With (a, b) = (1, 0) it is the plain recursion, and w̃ is not carried.

    Args:
        lr: α of a node that has the mean weight, the step size of the lower level.
        keep: a.
        renew: b.
        when: where the lower level's gradient step is.
        fresh: a batch of its own for J, and messages of its own: `again`, which else is `received`.
        damping: added to the diagonal of H; None: nothing.
    """

    lr: Any
    keep: Any
    renew: Any
    when: When = eqx.field(static=True)
    fresh: bool = eqx.field(static=True, default=False)
    damping: Any = None

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y, w, relative, v, vectors, c, received, again = values
        q = received if self.when == "before" else vectors
        jq, hq = self._products(me, (x, y), q, again if self.when == "before" else vectors)
        lr = self.lr * relative
        moved = step(received, lr / w, hq if self.damping is None else add(hq, scale(self.damping, q)))
        return self._mixed_v(v, lr, jq), self._mixed(vectors, moved, c)

    def _products(
        self, me: Client, at: tuple[PyTree, PyTree], q: Stacks, q_v: Stacks
    ) -> tuple[Stacks, Stacks]:
        """`J q` and `H q` for every vector: in one pass over one batch, or each on a batch of its own."""
        if not self.fresh:
            return me.g_xy_and_yy_each(*at, q, me.batch("lower", me.key))
        k_v, k_u = jr.split(me.key)
        jq = me.g_xy_each(*at, q_v, me.batch("lower", k_v))
        return jq, me.g_yy_each(*at, q, me.batch("lower", k_u))

    def _mixed_v(self, v: PyTree, lr: Any, jq: Stacks) -> PyTree:
        change = jq[0] if len(jq) == 1 else add(scale(self.keep, jq[0]), scale(1 - self.keep, jq[1]))
        return step(scale(self.keep, v), lr, change)

    def _mixed(self, vectors: Stacks, moved: Stacks, c: PyTree) -> Stacks:
        if len(moved) == 1:
            return moved
        anew, longer = add(moved[1], c), add(vectors[1], moved[0])
        return moved[0], add(scale(self.renew, anew), scale(1 - self.renew, longer))


class Begun(Program):
    """`(x, c) ↦ (v, vectors)` before the first step: v = 0, u = w̃ = c."""

    kinds: int = eqx.field(static=True, converter=whole)

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, c = values
        targets = jax.tree.leaves(c)[0].shape[0]
        v = jax.tree.map(lambda leaf: jnp.zeros((targets, *leaf.shape), leaf.dtype), x)
        return v, (c,) * self.kinds


class Lengths(Program):
    """`(c, vectors) ↦ (‖c‖, ‖u‖)`, `(2,)`: how long the adjoint was before the first step, and is now."""

    def __call__(self, me: Client, *values: Any) -> PyTree:
        c, vectors = values
        lengths = jnp.stack([norm(c), norm(vectors[0])])
        # An infinity, which squares of large numbers may be, would pass for a state that diverged; and a
        # series that ended in NaN has grown beyond all numbers.
        return jnp.nan_to_num(lengths, nan=jnp.finfo(lengths.dtype).max)


class Total(Program):
    """`(direct, v) ↦ direct + v`, of this node's own target where there are several."""

    outer: Outer = eqx.field(static=True)

    def __call__(self, me: Client, *values: Any) -> PyTree:
        direct, v = values
        return add(direct, row(v, me.id if self.outer == "own" else 0))
