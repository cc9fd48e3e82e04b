"""Decoders: how what travels, x, becomes what learns, y, and how a change of y becomes one of x."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.random as jr

from fedbilevel.adjoint.neumann import Neumann
from fedbilevel.data.clients import Clients
from fedbilevel.fed.codec import Codec
from fedbilevel.fed.loop import branch, repeat
from fedbilevel.local.descent import Descent
from fedbilevel.local.narrow import Narrow
from fedbilevel.local.work import Amount, Work, amount, check_amounts, of_client
from fedbilevel.name import check_choice
from fedbilevel.number import check_positive, whole
from fedbilevel.problem.base import Problem
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree, scale

STARTS = ("cold", "warm", "offset")
"""Where a decoder begins: always at the same point ("cold"); where the client's last call ended ("warm"); or
at the same point, with only the difference from there decoded ("offset")."""


class Decoded(NamedTuple):
    """What a client made of x in a round.

    Attributes:
        y: `y_m(x)`.
        memory: what it keeps for its next round; () if nothing.
        held: like y: 1 at the numbers that it holds and trains, 0 elsewhere; None if it holds all.
        part: what it holds as a small model, which is then trained itself.
    """

    y: PyTree
    memory: PyTree = ()
    held: PyTree | None = None
    part: Narrow | None = None


class Decoder(eqx.Module):
    """`y_m(x)`, and the transpose of its derivative.

    A decoder must say what the first x is, what everybody makes beforehand (`shared`, handed to all other
    methods), and how to decode and encode. One that begins where its last call ended says that it is `warm`;
    one that keeps something else between rounds gives its own `memory` and `decoded`.
    """

    @abc.abstractmethod
    def first(self, problem: Problem, shared: PyTree) -> PyTree:
        """The server's first x."""

    def remarks(self, problem: Problem, clients: Clients) -> tuple[str, ...]:
        """Lines that a user may want to read before a run."""
        return ()

    @abc.abstractmethod
    def shared(self, problem: Problem) -> PyTree:
        """Arrays that everybody makes from what was agreed, once for all rounds; () if there are none."""

    @abc.abstractmethod
    def decode(self, me: Client, x: PyTree, start: PyTree, shared: PyTree) -> PyTree:
        """`y_m(x)`; `start` is a y to begin from, which only warm decoders use."""

    @abc.abstractmethod
    def encode(self, me: Client, x: PyTree, y: PyTree, change: PyTree, shared: PyTree) -> PyTree:
        """`(∂y_m/∂x)ᵀ · change`, like x, at the decoded y; `change` is zero at numbers that are not held."""

    def allowed(self, problem: Problem, x: PyTree) -> PyTree:
        """x where it may be: only a decoder of the problem's own x knows a constraint."""
        return x

    def server_lr(self, problem: Problem) -> float:
        """The server's step with which a mean change of y comes back whole, in the mean over sketches."""
        return 1.0

    def codec(self, problem: Problem, clients: int) -> Codec | None:
        """How a client writes `Δx` for the wire; None: as it is."""
        return None

    @property
    def over_holders(self) -> bool:
        """Whether a number of x is averaged over those who hold it; then what is held must be like x."""
        return False

    @property
    def alike(self) -> bool:
        """Whether all clients decode x to the same y without their data, so that the server can too."""
        return False

    @property
    def warm(self) -> bool:
        """Whether a client's decoding begins where its last one ended."""
        return False

    @property
    def shown(self) -> bool:
        """Whether clients keep what they decoded last for onlookers alone; a warm one needs it anyway."""
        return not self.warm

    def first_memory(self, problem: Problem) -> PyTree:
        """What a client keeps between rounds, before the first one; None if nothing."""
        return problem.y0 if self.warm else None

    def decoded(self, me: Client, x: PyTree, memory: PyTree, shared: PyTree) -> Decoded:
        """All that a client makes of x; `memory`: what it kept, () if nothing."""
        y = self.decode(me, x, memory if self.warm else me.problem.y0, shared)
        return Decoded(y, y if self.warm else ())


class GradientDecoder(Decoder):
    """`y_m(x) = argmin_y g_m(x, y)` by gradient steps on the problem's own lower level.

    Decode: `I_dec` steps `y ← y − γ∇_y g_m(x, y; ζ)`, each on a fresh batch. Encode, at the decoded y:

        (∂y_m/∂x)ᵀ Δy ≈ −J (τ Σ_{q=0..Q} (I − τH)^q) Δy

    with a fresh batch for every product. Cost: I_dec of g_y, Q of g_yy, one of g_xy.

    Args:
        lower_lr: γ, step size of the decoder.
        lower_steps: I_dec; a number, or a tuple with one for each client.
        terms: Q; the series has Q + 1 terms.
        adjoint_lr: τ, at most the inverse of H's largest eigenvalue; None: γ.
        start: "warm", where the client's last decoding ended, or "cold", the problem's y0.

    Reference: J. Li, H. Huang, Resolving the tug-of-war: a separation of communication and learning in
    federated learning, NeurIPS 2023, equation 3, with the sign of −∂y/∂x taken back.
    """

    lower_lr: Any
    lower_steps: Amount = eqx.field(static=True, converter=amount)
    terms: int = eqx.field(static=True, converter=whole)
    adjoint_lr: Any = None
    start: str = eqx.field(static=True, default="warm")

    def __check_init__(self) -> None:
        check_amounts(self, "lower_steps")
        check_choice("start", self.start, ("cold", "warm"))
        check_positive(self, "lower_lr")
        if self.adjoint_lr is not None:
            check_positive(self, "adjoint_lr")
        if type(self.terms) is not int or self.terms < 0:
            raise ValueError(f"terms is {self.terms!r}; it must be a whole number of at least 0")

    @property
    def warm(self) -> bool:
        return self.start == "warm"

    def first(self, problem: Problem, shared: PyTree) -> PyTree:
        return problem.constraint(problem.x0)

    def allowed(self, problem: Problem, x: PyTree) -> PyTree:
        return problem.constraint(x)

    def shared(self, problem: Problem) -> PyTree:
        return ()

    def decode(self, me: Client, x: PyTree, start: PyTree, shared: PyTree) -> PyTree:
        begin = start if self.warm else me.problem.y0
        return Descent(self.lower_lr, Work("lower", self.lower_steps))(me, x, begin)

    def encode(self, me: Client, x: PyTree, y: PyTree, change: PyTree, shared: PyTree) -> PyTree:
        k_products, k_mixed = jr.split(me.key)

        def product(index: Any, v: PyTree, memo: PyTree) -> tuple[PyTree, PyTree]:
            return me.g_yy(x, y, v, me.batch("lower", jr.fold_in(k_products, index))), memo

        rate = self.lower_lr if self.adjoint_lr is None else self.adjoint_lr
        u = Neumann(self.terms + 1, 1 / rate).solve(product, change, (), me.key, repeat).u
        return scale(-1, me.g_xy(x, y, u, me.batch("lower", k_mixed)))


def _several(decoders: Any) -> tuple[Decoder, ...]:
    """Decoders as a tuple; one alone is one of them."""
    own = (decoders,) if isinstance(decoders, Decoder) else decoders
    if not isinstance(own, list | tuple) or not all(isinstance(each, Decoder) for each in own):
        raise ValueError(f"decoders is {decoders!r}; it must be a tuple of decoders")
    return tuple(own)


class EachDecoder(Decoder):
    """Another decoder for every kind of client, all of the same x.

    Args:
        decoders: one of each kind; they may keep nothing between rounds.
        assignment: which of them a client has: a tuple with one number for each client.
    """

    decoders: tuple[Decoder, ...] = eqx.field(converter=_several)
    assignment: Amount = eqx.field(static=True, converter=amount)

    def __check_init__(self) -> None:
        if not self.decoders:
            raise ValueError("decoders is empty; give at least one")
        chosen = self.assignment if isinstance(self.assignment, tuple) else (self.assignment,)
        for number in chosen:
            if type(number) is not int or not 0 <= number < len(self.decoders):
                raise ValueError(
                    f"assignment names the decoder {number!r}, but there are {len(self.decoders)}: give "
                    "whole numbers counted from 0"
                )

    def first(self, problem: Problem, shared: PyTree) -> PyTree:
        firsts = [own.first(problem, theirs) for own, theirs in zip(self.decoders, shared, strict=True)]
        forms = [jax.eval_shape(lambda x: x, x) for x in firsts]
        if any(form != forms[0] for form in forms):
            raise ValueError(f"the decoders are of different x, so that no mean can be made: {forms}")
        return firsts[0]

    def allowed(self, problem: Problem, x: PyTree) -> PyTree:
        return self.decoders[0].allowed(problem, x)

    def shared(self, problem: Problem) -> PyTree:
        return tuple(own.shared(problem) for own in self.decoders)

    def first_memory(self, problem: Problem) -> PyTree:
        keeping = [type(own).__name__ for own in self.decoders if own.first_memory(problem) is not None]
        if keeping:
            raise ValueError(
                f"{', '.join(keeping)} keeps something between rounds, which decoders that differ between "
                'clients cannot; a warm one can be made with start="cold"'
            )

    def server_lr(self, problem: Problem) -> float:
        """What all of them say."""
        wanted = sorted({own.server_lr(problem) for own in self.decoders})
        if len(wanted) > 1:
            raise ValueError(
                f'server_lr is "auto", but the decoders say different ones: {wanted}; give a number'
            )
        return wanted[0]

    @property
    def shown(self) -> bool:
        return False  # their y may differ in shape

    def decode(self, me: Client, x: PyTree, start: PyTree, shared: PyTree) -> PyTree:
        """`y_m(x)`, if all decoders give trees of one form; otherwise pick the client's own first."""
        return self._chosen(me, "decode", x, start, shared=shared)

    def encode(self, me: Client, x: PyTree, y: PyTree, change: PyTree, shared: PyTree) -> PyTree:
        return self._chosen(me, "encode", x, y, change, shared=shared)

    def _chosen(self, me: Client, method: str, *values: PyTree, shared: PyTree) -> PyTree:
        def own(place: int) -> Any:
            return lambda: getattr(self.decoders[place], method)(me, *values, shared[place])

        return branch(of_client(self.assignment, me.id), [own(place) for place in range(len(self.decoders))])
