"""FedSep's decoder for clients that cannot hold the whole model: it learns which kernels a client needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.data.clients import Clients
from fedbilevel.fed.codec import Codec, Partial
from fedbilevel.fed.ledger import Entry, count
from fedbilevel.fed.loop import repeat
from fedbilevel.local.decode import Decoded, Decoder
from fedbilevel.local.mask_net import MaskNet
from fedbilevel.local.narrow import Narrow
from fedbilevel.local.optimizer import Named
from fedbilevel.name import check_choice
from fedbilevel.number import check_count, check_not_negative, check_positive, whole
from fedbilevel.problem.base import Problem, ProblemError, objective
from fedbilevel.problem.oracle import Client
from fedbilevel.problem.submodel import (
    Keep,
    Kernels,
    Ratios,
    described,
    kernels_in,
    own_ratio,
    ratios_setting,
    widths,
)
from fedbilevel.selection import best
from fedbilevel.tree import PyTree, add, scale, times


class Submodel(Decoder):
    """What travels is the whole model x = ω; a client trains the kernels that it needs most, `θ = a ⊙ ω`.

        a = argmin  f_m(a ⊙ ω) + β log(max(T(a), ρT)/(ρT))

    T(a) are the FLOPs of the sub-model, T those of the whole, ρ the client's width ratio. a is soft, and made
    by a small network of the client's own (`MaskNet`), which learns by AdamW on its upper-level data. Then
    the ρ kernels of every layer with the largest a are held whole, and all others are zero (about ρ² of
    the FLOPs). Encode: `Δω = a ⊙ Δθ`; the server takes the mean over all clients of the cohort, as the paper
    writes it, or, for every number, over those that hold it, as `HeteroFL` and its relatives do (`average`).

    Every client keeps its network. The mask is learnt further in every `refresh`-th round that the client
    takes part in, with AdamW started anew, and used as it is in between.

    The derivative of θ has a second term, `diag(ω) ∂a/∂ω`, which the paper leaves out. With `full` it is
    there: the soft mask is then learnt from the same start, on all of the client's data, in every round, so
    that it is a function of ω; it is differentiated through all steps of that.

    Args:
        ratios: ρ: a number, a tuple with one for each client, or "random": each client's is drawn once from
            1, 1/2, 1/4, 1/8, 1/16.
        penalty: β, of a sub-model that is larger than ρ.
        mask_lr: AdamW's step size.
        mask_steps: how many steps of it a refreshment takes.
        refresh: rounds of a client from one refreshment to the next.
        average: "all" or "holders"; what a number of x moves by is the mean over these.
        full: with the second term.
        soft: hold all kernels as much as a says, in the place of the best ones: smooth, and no smaller;
            only with `full`.
        hidden: width of the small network.
        seed: draws the small network.
        ratio_seed: draws the ratios.
        kernels: of the parameters y0, with the shape of a sample; None: found in the problem's upper
            objective, and in its samples' `inputs`.
        narrow: learn with the small model itself, as for `HeteroFL`; not with `soft`. Masks are still learnt
            on the whole model.

    Cost: `mask_steps` calls of f_y in a round with a refreshment; with `full`, encoding is counted as two
    more for each of them. The whole model comes down; a client sends its part, and one bit for each kernel of
    the model, which says what it holds (unless that is all).

    Reference: J. Li, H. Huang, Resolving the tug-of-war: a separation of communication and learning in
    federated learning, NeurIPS 2023, section 4.2, equations 7 and 8.
    """

    ratios: Ratios = eqx.field(static=True, converter=ratios_setting, default="random")
    penalty: Any = 10.0
    mask_lr: Any = 0.01
    mask_steps: int = eqx.field(static=True, converter=whole, default=10)
    refresh: int = eqx.field(static=True, converter=whole, default=2)
    average: Literal["all", "holders"] = eqx.field(static=True, default="all")
    full: bool = eqx.field(static=True, default=False)
    soft: bool = eqx.field(static=True, default=False)
    hidden: int = eqx.field(static=True, converter=whole, default=16)
    seed: int = eqx.field(static=True, converter=whole, default=0)
    ratio_seed: int = eqx.field(static=True, converter=whole, default=0)
    kernels: Kernels | None = eqx.field(static=True, default=None)
    narrow: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        for name in ("mask_steps", "refresh", "hidden"):
            check_count(name, getattr(self, name))
        check_positive(self, "mask_lr")
        check_not_negative(self, "penalty")
        check_choice("average", self.average, ("all", "holders"))
        if self.full and self.average == "holders":
            raise ValueError(
                'average is "holders", but with `full` every number of x may move; use average="all"'
            )
        if self.soft and not self.full:
            raise ValueError("soft masks are only for `full`, whose encoder knows them; set full=True")
        if self.soft and self.narrow:
            raise ValueError(
                "with soft masks a client holds all kernels: there is no small model; set narrow=False"
            )

    # ------------------------------------------------------------ as a decoder

    def first(self, problem: Problem, shared: PyTree) -> PyTree:
        return problem.y0

    def shared(self, problem: Problem) -> PyTree:
        return ()

    def remarks(self, problem: Problem, clients: Clients) -> tuple[str, ...]:
        """What the clients' models cost."""
        shape = clients.input_shape("upper")
        kernels = kernels_in(problem, shape) if self.kernels is None else self.kernels
        return described(kernels, widths(self.ratios, clients.n, self.ratio_seed))

    @property
    def shown(self) -> bool:
        return False  # a whole model for each client, most of it zero

    def first_memory(self, problem: Problem) -> PyTree:
        if self.full:
            return None
        kernels = kernels_in(problem) if self.kernels is None else self.kernels
        return {"phi": self._phi(kernels, problem.y0), "rounds": jnp.zeros((), jnp.int32)}

    def codec(self, problem: Problem, clients: int) -> Codec | None:
        """Only kernels that a client holds change: it sends these, and which they are (`full`: all of x)."""
        kernels = kernels_in(problem) if self.kernels is None else self.kernels
        ratios = widths(self.ratios, clients, self.ratio_seed)
        return None if self.full else Partial(tuple(_message_bytes(kernels, own) for own in ratios))

    def decode(self, me: Client, x: PyTree, start: PyTree, shared: PyTree) -> PyTree:
        return self._from_the_start(me, x).y

    def decoded(self, me: Client, x: PyTree, memory: PyTree, shared: PyTree) -> Decoded:
        if self.full:
            return self._from_the_start(me, x)
        rounds = memory["rounds"]
        steps = jnp.where(rounds % self.refresh == 0, self.mask_steps, 0)
        phi = self._learnt(me, x, memory["phi"], steps)
        return self._part(me, x, phi, {"phi": phi, "rounds": rounds + 1})

    def encode(self, me: Client, x: PyTree, y: PyTree, change: PyTree, shared: PyTree) -> PyTree:
        if not self.full:
            return change  # a ⊙ Δθ: what is not held did not move
        kernels = self._kernels(me)
        count(Entry("call", "f_y"), 2 * self.mask_steps)
        mask, pull = jax.vjp(lambda w: kernels.mask(w, self._function_of(me, w)), x)
        return add(times(mask, change) if self.soft else change, pull(times(x, change))[0])

    @property
    def over_holders(self) -> bool:
        return self.average == "holders"

    def _from_the_start(self, me: Client, x: PyTree) -> Decoded:
        """What a client makes of x by a mask that is learnt from the start."""
        data = me.with_batches_of(None) if self.full else me
        return self._part(me, x, self._learnt(data, x, self._phi(self._kernels(me), x), self.mask_steps), ())

    def _part(self, me: Client, x: PyTree, phi: PyTree, memory: PyTree) -> Decoded:
        """The sub-model: ω times the soft mask of φ, or its best kernels."""
        kernels = self._kernels(me)
        soft = self._net(kernels)(phi)
        if self.soft:
            return Decoded(times(kernels.mask(x, soft), x), memory)
        part = self._best(me, kernels, soft)
        mask = kernels.mask(x, part.keep)
        return Decoded(times(mask, x), memory, mask, part if self.narrow else None)

    # ----------------------------------------------------------- the soft mask

    def _phi(self, kernels: Kernels, like: PyTree) -> PyTree:
        dtype = jnp.result_type(jax.tree.leaves(like)[0])
        return self._net(kernels).init(jr.key(self.seed), dtype)

    def _net(self, kernels: Kernels) -> MaskNet:
        return MaskNet(kernels.sizes, self.hidden)

    def _rule(self) -> Named:
        # The root of a sum of squares has no derivative at zero: with a little more under it, it has one.
        return Named("adamw", {"learning_rate": self.mask_lr, "eps_root": 1e-12 if self.full else 0.0})

    def _learnt(self, me: Client, x: PyTree, phi: PyTree, steps: Any) -> PyTree:
        """φ after so many steps, which are counted."""

        def body(index: Any, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            batch = me.batch("upper", jr.fold_in(me.key, index))
            gradient = self._gradient(me, x, carry[0], lambda y: me.f_y(x, y, batch))
            return self._rule().step(carry[0], gradient, carry[1])

        learnt, _ = repeat(steps, body, (phi, self._rule().init(phi)))
        return learnt

    def _function_of(self, me: Client, x: PyTree) -> list[jax.Array]:
        """The soft mask as a function of the whole model, on all data: not counted, can be differentiated."""
        batch, phi = me.with_batches_of(None).batch("upper", me.key), self._phi(self._kernels(me), x)

        def slope(y: PyTree) -> PyTree:
            return jax.grad(lambda y: objective(me.problem, "upper", x, y, batch))(y)

        def body(carry: tuple[PyTree, PyTree], _: None) -> tuple[tuple[PyTree, PyTree], None]:
            return self._rule().step(carry[0], self._gradient(me, x, carry[0], slope), carry[1]), None

        (learnt, _), _ = jax.lax.scan(body, (phi, self._rule().init(phi)), None, self.mask_steps)
        return self._net(self._kernels(me))(learnt)

    def _gradient(self, me: Client, x: PyTree, phi: PyTree, slope: Callable[[PyTree], PyTree]) -> PyTree:
        """Of the mask's objective in φ, by that of the loss in y."""
        kernels = self._kernels(me)
        net = self._net(kernels)
        y, pull = jax.vjp(lambda phi: times(kernels.mask(x, net(phi)), x), phi)
        excess = jax.grad(lambda phi: self._excess(me, kernels, net(phi)))(phi)
        return add(pull(slope(y))[0], scale(self.penalty, excess))

    def _excess(self, me: Client, kernels: Kernels, keep: Keep) -> jax.Array:
        """`log(max(T(a), ρT)/(ρT))`."""
        table, place = own_ratio(self.ratios, me.id, self.ratio_seed)
        share = kernels.cost(keep)["flops"] / float(kernels.cost(1.0)["flops"])  # no 32-bit whole number
        ratio = jnp.asarray(table, share.dtype)[place]
        return jnp.log(jnp.maximum(share, ratio) / ratio)

    def _best(self, me: Client, kernels: Kernels, soft: Keep) -> Narrow:
        """As many of the best kernels as the client can hold."""
        table, place = own_ratio(self.ratios, me.id, self.ratio_seed)
        counts = jnp.asarray([kernels.counts(ratio) for ratio in table], jnp.int32)[place]
        keep = [best(own, counts[name]) for name, own in enumerate(soft)]
        return Narrow(kernels, keep, table, place)

    def _kernels(self, me: Client) -> Kernels:
        """The kernels of the client's model, with the shape of its samples."""
        if self.kernels is not None:
            return self.kernels
        shape = me.input_shape("upper")
        if shape is None:
            raise ProblemError(
                "the FLOPs of a sub-model depend on the shape of a sample, that of the column `inputs` of "
                "the data; there is none: give kernels=Kernels.of(model, parameters, input_shape)"
            )
        return kernels_in(me.problem, shape)


def _message_bytes(kernels: Kernels, ratio: float) -> int:
    """Of a sub-model, and of the mask that the client learnt, which it alone knows: a bit for each kernel."""
    mask = 0 if kernels.counts(ratio) == kernels.sizes else math.ceil(sum(kernels.sizes) / 8)
    return int(kernels.cost(ratio)["bytes"]) + mask
