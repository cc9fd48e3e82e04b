"""Federated averaging with compressed messages, and FetchSGD."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from fedbilevel.algorithm.base import Algorithm, Info, check_learns_y, check_lengths
from fedbilevel.fed.codec import Codec, TopK, check_entries
from fedbilevel.fed.compress import Quantized, RandomK, check_bits
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.place import Kept
from fedbilevel.fed.program import Program
from fedbilevel.local.count_sketch import CountSketch
from fedbilevel.local.learn import Learn
from fedbilevel.local.optimizer import SGD, Optimizer, optimizer
from fedbilevel.local.work import Amount, amount, check_amounts
from fedbilevel.name import check_choice
from fedbilevel.number import check_count, check_not_negative, whole
from fedbilevel.problem.oracle import Client
from fedbilevel.schedule import Rate, rate
from fedbilevel.tree import PyTree, add, copies, scale, size, sub, zeros_like

CODECS = ("none", "topk", "random", "quantized")
"""How a change of the model may be written."""


class Change(Program):
    """`(x, y) ↦ Δy`: by how much a client's learning steps move y."""

    learn: Learn

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y = values
        return sub(self.learn(me, x, y), y)


class Averaged(NamedTuple):
    """Both variables, and what every client has not sent yet."""

    x: PyTree
    y: PyTree
    memory: Kept | None


class CompressedFedAvg(Algorithm[Averaged]):
    """Federated averaging of the model y on `f_i(x0, ·)`, whose changes are compressed on the way up.

        Δ_i = y_i^I − y ,  y_i^I after I steps of the optimiser on f_i from y
        y ← y + η_g mean C(Δ_i + e_i) ,   e_i ← Δ_i + e_i − C(Δ_i + e_i)

    with a codec C and e_i the client's memory of what C left out (`feedback`; without, e_i = 0). The mean of
    what is sparse at every client is not sparse, so the whole y comes down in every round.

    Args:
        learn: the optimiser of the local steps; it starts anew in a round.
        learn_steps: I; a number, or a tuple with one for each client.
        codec: C: "none"; "topk", the k entries of largest magnitude (`fed.TopK`); "random", k random entries
            (`fed.compress.RandomK`); "quantized", a few bits for every entry (`fed.compress.Quantized`).
        size: of a message: k for "topk" and "random", a number of entries or a share of all of them in
            (0, 1); for "quantized" the number of bits an entry. "none" has no use for it.
        feedback: clients remember what C left out. C is then the nearest value that it can write; without,
            "random" and "quantized" are unbiased.
        server_lr: η_g; a number or an optax schedule of the round.
        cohort: clients in a round; None: all.

    Cost a round and client: one exchange; x and y down; up y for "none", k values and k 32-bit positions for
    "topk", k values and one 32-bit seed for "random", `⌈bits·d/8⌉` bytes and one value a leaf for
    "quantized". I calls of f_y.

    References: A. F. Aji, K. Heafield, Sparse communication for distributed gradient descent, EMNLP 2017;
    S. U. Stich, J.-B. Cordonnier, M. Jaggi, Sparsified SGD with memory, NeurIPS 2018; D. Alistarh et al.,
    QSGD, NeurIPS 2017.
    """

    learn: Optimizer = eqx.field(converter=optimizer, default_factory=lambda: SGD(0.1))
    learn_steps: Amount = eqx.field(static=True, converter=amount, default=5)
    codec: Literal["none", "topk", "random", "quantized"] = eqx.field(static=True, default="none")
    size: int | float | None = eqx.field(static=True, default=None)
    feedback: bool = eqx.field(static=True, default=True)
    server_lr: Rate = eqx.field(converter=rate, default=1.0)
    cohort: int | None = eqx.field(static=True, converter=whole, default=None)

    def __check_init__(self) -> None:
        check_amounts(self, "learn_steps")
        check_choice("codec", self.codec, CODECS)
        if (self.codec == "none") != (self.size is None):
            raise ValueError(
                f"codec is {self.codec!r} and size is {self.size!r}: give `size` with every codec but "
                '"none", which has no use for it'
            )
        if self.codec == "quantized":
            check_bits(self.size)
        elif self.codec != "none":
            check_entries(self.size)

    def _codec(self, y: PyTree) -> Codec | None:
        size: Any = self.size
        if self.codec == "none":
            return None
        if self.codec == "topk":
            return TopK.like(y, size)
        kind = RandomK if self.codec == "random" else Quantized
        return kind.like(y, size, unbiased=not self.feedback)

    def init(self, fed: Federation, key: jax.Array) -> Averaged:
        check_lengths(self, fed.n)
        check_learns_y(fed.problem)
        x, y = fed.problem.constraint(fed.problem.x0), fed.problem.y0
        remembers = self.feedback and self._codec(y) is not None
        return Averaged(x, y, fed.keep(copies(zeros_like(y), fed.n)) if remembers else None)

    def step(self, fed: Federation, state: Averaged, key: jax.Array) -> tuple[Averaged, Info]:
        k_cohort, k_learn, k_codec = jr.split(key, 3)
        cohort, codec = fed.cohort(k_cohort, self.cohort), self._codec(state.y)
        there = cohort.send(state.x, "x"), cohort.send(state.y, "y")
        change = cohort.run(Change(Learn(self.learn, self.learn_steps)), *there, key=k_learn)
        if state.memory is None or codec is None:
            mean, memory = cohort.mean(change, "y", codec=codec, key=k_codec), state.memory
        else:
            mean, memory = cohort.mean_with_feedback(change, state.memory, "y", codec, key=k_codec)
        return Averaged(state.x, add(state.y, scale(self.server_lr, mean)), memory), {}

    def solution(self, state: Averaged) -> tuple[PyTree, PyTree]:
        return state.x, state.y


class SketchChange(Program):
    """`(x, y) ↦ S(Δy)`: the table of a client's change."""

    change: Change
    sketch: CountSketch

    def __call__(self, me: Client, *values: Any) -> PyTree:
        return self.sketch.sketch(ravel_pytree(self.change(me, *values))[0])


class Tables(NamedTuple):
    """Both variables, and the server's momentum and memory, as tables."""

    x: PyTree
    y: PyTree
    momentum: Float[Array, "rows columns"]
    memory: Float[Array, "rows columns"]


class FetchSGD(Algorithm[Tables]):
    """Changes of the model y travel as Count-Sketches; the server reads the largest entries of their sum.

        T = mean S(Δ_i) ,   u ← ρu + T ,   e ← e + η_g u
        v = the k entries of largest estimated magnitude of U(e) ,   e ← e − S(v) ,   y ← y + v

    where Δ_i is what I local steps on `f_i(x0, ·)` change, S(·) the table of a vector and U(·) the vector
    that is read from a table. Momentum u and memory e are tables themselves. What comes down is v, k values
    and positions, and can be applied only by those who hold y before: so all clients take part in every
    round, and there is no `cohort`. All start from the same y, which they agreed on.

    Args:
        learn: the optimiser of the local steps; it starts anew in a round.
        learn_steps: I; a number, or a tuple with one for each client. 1 with `SGD` is the paper's method,
            which sends gradients.
        rows, columns: of the tables: more rows, fewer bad estimates; more columns, better ones.
        k: how many entries come down: a number.
        momentum: ρ, of the server's sketch.
        server_lr: η_g; a number or an optax schedule of the round.
        seed: of the tables' hashes.

    Cost a round and client: one exchange; `rows · columns` scalars up, k values and k 32-bit positions down,
    sent after the server's step; I calls of f_y.

    Reference: D. Rothchild et al., FetchSGD: communication-efficient federated learning with sketching, ICML
    2020, algorithm 1 (whose programs also zero the momentum of the entries that were sent; not done here).
    """

    learn: Optimizer = eqx.field(converter=optimizer)
    learn_steps: Amount = eqx.field(static=True, converter=amount)
    rows: int = eqx.field(static=True, converter=whole)
    columns: int = eqx.field(static=True, converter=whole)
    k: int = eqx.field(static=True, converter=whole)
    momentum: Any = 0.9
    server_lr: Rate = eqx.field(converter=rate, default=1.0)
    seed: int = eqx.field(static=True, converter=whole, default=0)

    def __check_init__(self) -> None:
        check_amounts(self, "learn_steps")
        for name in ("rows", "columns", "k"):
            check_count(name, getattr(self, name))
        check_not_negative(self, "momentum")
        if isinstance(self.momentum, int | float) and self.momentum >= 1:
            raise ValueError(f"momentum is {self.momentum!r}; it must be at least 0 and below 1")

    @property
    def _sketch(self) -> CountSketch:
        return CountSketch(self.rows, self.columns, self.seed)

    def init(self, fed: Federation, key: jax.Array) -> Tables:
        check_lengths(self, fed.n)
        check_learns_y(fed.problem)
        x, y = fed.problem.constraint(fed.problem.x0), fed.problem.y0
        if self.k > size(y):
            raise ValueError(f"k is {self.k}, but y has {size(y)} entries; give at most as many")
        nothing = jnp.zeros((self.rows, self.columns), ravel_pytree(y)[0].dtype)
        return Tables(x, y, nothing, nothing)

    def step(self, fed: Federation, state: Tables, key: jax.Array) -> tuple[Tables, Info]:
        everyone, (flat, unravel) = fed.everyone, ravel_pytree(state.y)
        program = SketchChange(Change(Learn(self.learn, self.learn_steps)), self._sketch)
        # What all hold by now: they started alike, and had every update.
        there = everyone.agreed(state.x), everyone.agreed(state.y)
        table = everyone.mean(everyone.run(program, *there, key=key), "table")
        momentum = add(scale(self.momentum, state.momentum), table)
        total = add(state.memory, scale(self.server_lr, momentum))
        values, places = self._sketch.heavy(total, flat.size, self.k)
        everyone.send((values, places), "update")
        update = jnp.zeros_like(flat).at[places].set(values)
        memory = sub(total, self._sketch.sketch(update))
        return Tables(state.x, unravel(flat + update), momentum, memory), {}

    def solution(self, state: Tables) -> tuple[PyTree, PyTree]:
        return state.x, state.y
