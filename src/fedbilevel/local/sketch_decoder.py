"""Decoders of a sketch: what travels is `ω ∈ R^p`, what learns is `θ ∈ R^d`, with p far below d."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedbilevel.local.count_sketch import SparseJL
from fedbilevel.local.decode import STARTS, Decoder
from fedbilevel.local.lasso import METHODS, active_set, lasso, lasso_adjoint, least_squares
from fedbilevel.local.sketch import SRHT, Gaussian, Operator, Sketch
from fedbilevel.name import check_choice
from fedbilevel.number import check_count, check_not_negative, check_positive, whole
from fedbilevel.problem.base import Problem
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree, size

KINDS = ("gaussian", "srht", "sparse")
"""A dense matrix, a subsampled Hadamard transform, or a sparse matrix."""


def sketch_of(kind: str, size: int, seed: int, memory: int) -> Sketch:
    """A sketch by name."""
    check_choice("sketch", kind, KINDS)
    if kind == "gaussian":
        return Gaussian(size, seed, memory)
    return SRHT(size, seed) if kind == "srht" else SparseJL(size, seed, min(4, size))


class Agreed(NamedTuple):
    """What everybody makes from the seed.

    Attributes:
        stored: of the sketch.
        bound: `‖S‖²`; () where it is not needed, or differs between clients.
        image: `Sθ₀`, the first ω, `(p,)`; 0 where clients have sketches of their own.
    """

    stored: PyTree
    bound: Any
    image: jax.Array


class Here(NamedTuple):
    """A client's sketch, `‖S‖²` (or ()), and `θ₀`, `(d,)`."""

    operator: Operator
    bound: Any
    origin: jax.Array


@eqx.filter_jit
def _made(sketch: Sketch, origin: jax.Array, id: int | None, bounded: bool) -> Agreed:
    """A sketch's arrays, its `‖S‖²` if asked for, and `Sθ₀`: one program, compiled once for all runs."""
    stored = sketch.stored(origin.size, origin.dtype, id)
    bound = sketch.norm_squared(origin.size, stored, origin.dtype, id) if bounded else ()
    return Agreed(stored, bound, sketch.apply(origin, stored, id))


class Sketched(Decoder):
    """What all decoders of a sketch have in common: `ω₁ = Sθ₀` with `θ₀` the problem's y0, as a vector.

    With sketches of their own clients have no common `Sθ₀`; then ω is that of `θ − θ₀`, and `ω₁ = 0`.
    """

    @property
    @abc.abstractmethod
    def start(self) -> str:
        """Where the decoder begins."""

    @property
    @abc.abstractmethod
    def own_sketches(self) -> bool:
        """Whether every client has a sketch of its own."""

    @abc.abstractmethod
    def kind(self) -> Sketch:
        """The sketch."""

    @abc.abstractmethod
    def needs_bound(self) -> bool:
        """Whether `‖S‖²` is needed to decode."""

    @abc.abstractmethod
    def check(self, bound: Any) -> None:
        """Raise an error that explains if the settings do not fit a sketch with this `‖S‖²`."""

    def __check_init__(self) -> None:
        check_choice("start", self.start, STARTS)
        self.kind()  # which checks its own settings
        if self.own_sketches and self.start != "offset":
            raise ValueError(
                f"start is {self.start!r}, but where clients have sketches of their own, no ω is that of θ₀ "
                'for all of them; use start="offset"'
            )

    @property
    def alike(self) -> bool:
        return not (self.own_sketches or self.warm)

    @property
    def warm(self) -> bool:
        return self.start == "warm"

    def first(self, problem: Problem, shared: PyTree) -> PyTree:
        return Agreed(*shared).image

    def server_lr(self, problem: Problem) -> float:
        """d/p: decoding what was encoded is a projection onto p of d directions, a p/d-th in the mean."""
        return size(problem.y0) / self.kind().size

    def shared(self, problem: Problem) -> PyTree:
        """The sketch's arrays, `‖S‖²` and `Sθ₀`; of a sketch that differs between clients only the zero."""
        sketch, (origin, _) = self.kind(), ravel_pytree(problem.y0)
        sketch.check(origin.size)
        made = _made(sketch, origin, 0 if self.own_sketches else None, self.needs_bound())
        self.check(made.bound)
        return Agreed((), (), jnp.zeros_like(made.image)) if self.own_sketches else made

    def here(self, me: Client, shared: PyTree) -> Here:
        """This client's sketch."""
        sketch, (stored, bound, _), (origin, _) = self.kind(), shared, ravel_pytree(me.problem.y0)
        if not self.own_sketches:
            return Here(sketch.operator(origin.size, stored), bound, origin)
        stored = sketch.stored(origin.size, origin.dtype, me.id)
        if self.needs_bound():
            bound = sketch.norm_squared(origin.size, stored, origin.dtype, me.id)
        return Here(sketch.operator(origin.size, stored, me.id), bound, origin)


class SketchLasso(Sketched):
    """`θ(ω) = argmin_θ ½‖Sθ − ω‖² + β‖θ‖₁`, by proximal gradient steps.

    Encode: `Δω = (S_Aᵀ)⁺ Δθ_A` on the active set A, by conjugate gradients (see `lasso_adjoint`). It is the
    derivative of the solution where there is only one, with the columns of S_A independent: almost surely
    for a Gaussian S, but not for the others with a handful of rows. A θ after few steps is not quite there.
    With |A| near p the system is badly conditioned, and the number of iterations bounds what rounding and
    noise do.

    Where the decoder begins:

    * "offset": `θ = θ₀ + lasso(ω − Sθ₀)` with θ₀ the problem's y0: the first y is y0, and what was learnt is
      sparse;
    * "cold": `θ = lasso(ω)`, from 0: the model itself is sparse, and the first one is only what p numbers
      tell of y0;
    * "warm": `θ = lasso(ω)`, from the client's last θ, y0 at first.

    Args:
        size: p, numbers in a sketch.
        penalty: β, of the absolute values: more of it, fewer that are not zero.
        lower_lr: γ, below `2/‖S‖²` (accelerated: at most `1/‖S‖²`); None: `1/‖S‖²`.
        lower_steps: I_dec.
        sketch: "gaussian", "srht" (fast) or "sparse" (fast).
        method: "ista" or "fista" (accelerated).
        start: see above.
        seed: of S; everybody makes the same.
        own_sketches: every client has a sketch of its own, from the seed and its number (needs "offset");
            made anew in every round.
        memory: bytes that a Gaussian S may take (for each client, if they have their own); a larger one
            is made anew, block by block, in every product.
        cg_iterations: of the encoder, at most.
        when_flat: what to encode where nothing is active. The decoder is constant there, as it is with
            "offset" at the first ω, and "zero", the derivative, would keep it there for ever. "linear": take
            all entries as active, so that ω collects what is learnt until it passes the threshold.

    Reference: J. Li, H. Huang, FedSep, section 4.1 (whose equation 5 has the sign of −∂θ/∂ω wrong).
    """

    size: int = eqx.field(static=True, converter=whole)
    penalty: Any
    lower_lr: Any = None
    lower_steps: int = eqx.field(static=True, converter=whole, default=10)
    sketch: str = eqx.field(static=True, default="gaussian")
    method: str = eqx.field(static=True, default="ista")
    start: str = eqx.field(static=True, default="offset")
    seed: int = eqx.field(static=True, converter=whole, default=0)
    own_sketches: bool = eqx.field(static=True, default=False)
    memory: int = eqx.field(static=True, converter=whole, default=2**30)
    cg_iterations: int = eqx.field(static=True, converter=whole, default=50)
    when_flat: str = eqx.field(static=True, default="linear")

    def __check_init__(self) -> None:
        check_count("lower_steps", self.lower_steps)
        check_count("cg_iterations", self.cg_iterations)
        check_choice("method", self.method, METHODS)
        check_choice("when_flat", self.when_flat, ("linear", "zero"))
        if self.lower_lr is not None:
            check_positive(self, "lower_lr")
        check_not_negative(self, "penalty")

    def kind(self) -> Sketch:
        return sketch_of(self.sketch, self.size, self.seed, self.memory)

    def needs_bound(self) -> bool:
        return True

    def check(self, bound: Any) -> None:
        known = not any(isinstance(value, jax.core.Tracer) for value in (bound, self.lower_lr))
        if self.lower_lr is None or not known:
            return
        share = float(self.lower_lr) * float(bound)
        # ‖S‖² was found by power iteration, from below: a twentieth less than 2 is on the safe side. With
        # momentum nothing is certain above 1/‖S‖²; that itself, perhaps rounded, may be given.
        most, too_much = (1.9, share >= 1.9) if self.method == "ista" else (1, share > 1 + 1e-5)
        if too_much:
            raise ValueError(
                f"lower_lr is {float(self.lower_lr):.3g}, but steps by {self.method!r} may diverge from "
                f"{most}/‖S‖² = {most / float(bound):.3g} on; give less, or None for 1/‖S‖² = "
                f"{1 / float(bound):.3g}"
            )

    def decode(self, me: Client, x: PyTree, start: PyTree, shared: PyTree) -> PyTree:
        here, unravel = self.here(me, shared), ravel_pytree(me.problem.y0)[1]
        begin = ravel_pytree(start)[0] if self.warm else jnp.zeros_like(here.origin)
        theta = lasso(
            here.operator,
            self._omega(x, shared),
            begin,
            penalty=self.penalty,
            lr=self._rate(here),
            steps=self.lower_steps,
            method=self.method,
        )
        return unravel(theta + here.origin if self.start == "offset" else theta)

    def encode(self, me: Client, x: PyTree, y: PyTree, change: PyTree, shared: PyTree) -> PyTree:
        here, flat = self.here(me, shared), ravel_pytree(y)[0]
        theta, omega = flat - here.origin if self.start == "offset" else flat, self._omega(x, shared)
        active = active_set(here.operator, omega, theta, penalty=self.penalty, lr=self._rate(here))
        if self.when_flat == "linear":
            active = active | ~jnp.any(active)
        return lasso_adjoint(here.operator, active, ravel_pytree(change)[0], self.cg_iterations)

    def _rate(self, here: Here) -> Any:
        return 1 / here.bound if self.lower_lr is None else self.lower_lr

    def _omega(self, x: jax.Array, shared: PyTree) -> jax.Array:
        return x - Agreed(*shared).image if self.start == "offset" else x


class LinearSketch(Sketched):
    """`θ(ω) = θ₀ + Sᵀ(SSᵀ)⁻¹(ω − Sθ₀)`: the θ nearest to θ₀ with `Sθ = ω`; the LASSO with β = 0.

    Encode: `Δω = (SSᵀ)⁻¹SΔθ`. Both by conjugate gradients. θ₀ is the problem's y0 ("offset"), 0 ("cold") or
    the client's last θ ("warm").

    Args:
        size: p, numbers in a sketch.
        sketch: "gaussian", "srht" (fast) or "sparse" (fast).
        start: what θ₀ is, see above.
        seed: of S; everybody makes the same.
        own_sketches: as for `SketchLasso`.
        memory: as for `SketchLasso`.
        cg_iterations: of the decoder and the encoder, at most: with fewer than p, `Sθ = ω` holds only about.

    Reference: J. Li, H. Huang, FedSep, remark 2 (whose `(SᵀS)⁻¹` does not exist for p < d).
    """

    size: int = eqx.field(static=True, converter=whole)
    sketch: str = eqx.field(static=True, default="gaussian")
    start: str = eqx.field(static=True, default="offset")
    seed: int = eqx.field(static=True, converter=whole, default=0)
    own_sketches: bool = eqx.field(static=True, default=False)
    memory: int = eqx.field(static=True, converter=whole, default=2**30)
    cg_iterations: int = eqx.field(static=True, converter=whole, default=50)

    def __check_init__(self) -> None:
        check_count("cg_iterations", self.cg_iterations)

    def kind(self) -> Sketch:
        return sketch_of(self.sketch, self.size, self.seed, self.memory)

    def needs_bound(self) -> bool:
        return False

    def check(self, bound: Any) -> None:
        """Everything fits."""

    def decode(self, me: Client, x: PyTree, start: PyTree, shared: PyTree) -> PyTree:
        here, unravel = self.here(me, shared), ravel_pytree(me.problem.y0)[1]
        if self.start == "cold":
            return unravel(least_squares(here.operator, x, self.cg_iterations))
        if self.start == "offset":
            base, image = here.origin, Agreed(*shared).image
        else:
            base = ravel_pytree(start)[0]
            image = here.operator.forward(base)
        return unravel(base + least_squares(here.operator, x - image, self.cg_iterations))

    def encode(self, me: Client, x: PyTree, y: PyTree, change: PyTree, shared: PyTree) -> PyTree:
        here = self.here(me, shared)
        return least_squares(here.operator.T, ravel_pytree(change)[0], self.cg_iterations)
