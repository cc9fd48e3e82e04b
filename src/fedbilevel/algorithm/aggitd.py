"""AggITD: the series of the adjoint rides in the messages of the lower level."""

from __future__ import annotations

from typing import Any, Literal

import equinox as eqx
import jax
import jax.random as jr

from fedbilevel.algorithm.base import Info, TwoVariables, Variables, check_has_y
from fedbilevel.algorithm.exchange import Point
from fedbilevel.algorithm.rounds import lower_round, upper_round
from fedbilevel.draw import below
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.place import At
from fedbilevel.fed.program import Program
from fedbilevel.local.descent import Descent
from fedbilevel.local.gradients import Assemble, Curvature, UpperGradient
from fedbilevel.local.work import Amount, Work, amount, check_amounts, most
from fedbilevel.name import check_choice
from fedbilevel.number import check_count, whole
from fedbilevel.schedule import Rate, rate
from fedbilevel.tree import PyTree, scale, step


class AggITD(TwoVariables):
    """Aggregated iterative differentiation: N rounds on y, which carry the adjoint with them, and one on x.

    A step, with one cohort S and Q uniform in {0..N−1}, drawn anew in every step:

        for t = 0 .. N−1:  y_{t+1} ← FedInn(x, y_t)           as in FedNest; in the same messages
            t = N−Q−1:     r ← mean ∇_y f_i(x, y_t)
            t ≥ N−Q:       r ← r − λ mean H_i(x, y_t) r       Q factors in all
        h = mean (∇_x f_i − λN J_i r)                         at (x, y_N)
        x ← FedOut(x, y_N, h)                                 τ local SVRG steps on x

    At `y_t = y*(x)` the mean of h over Q is the hypergradient with N terms of the Neumann series and
    `ℓ = 1/λ`: what FedNest's sampled series estimates with Q + 1 exchanges more.

    With a sampled cohort all factors are those of one cohort, so that the mean of h over cohorts is not
    quite that of all clients. FedNest asks a cohort of its own for each factor, and each downloads x and y.

    Args:
        upper_lr: α, step size for x; a number or an optax schedule.
        lower_lr: β, step size for y.
        adjoint_lr: λ, step size of the adjoint: at most `1/λ_max(mean H_i)`.
        upper_steps: τ, local steps on x; a number, or a tuple with one for each client.
        lower_steps: τ, local steps on y; likewise.
        lower_rounds: N, rounds on y before x moves, and the terms of the series.
        cohort: clients in a step; None: all.
        inner: "svrg" (local steps corrected by the mean gradient q, one more exchange a round; the adjoint
            rides with q) or "sgd" (it rides with y).

    Cost a step and client: 2N + 2 exchanges (`inner="sgd"`: N + 2), however large Q is;
    `2d_x + (2N + Q + 2)d_y` scalars down, `2d_x + (2N + Q + 1)d_y` up (`sgd`: N in the place of 2N);
    N(1 + 2τ) calls of g_y (τ of the lower level; `sgd`: N τ), Q of g_yy, 1 + 2τ of f_x (τ of the upper
    level), one each of f_y and g_xy.

    Reference: P. Xiao, K. Ji, Communication-efficient federated hypergradient computation via aggregated
    iterative differentiation, ICML 2023.
    """

    upper_lr: Rate = eqx.field(converter=rate)
    lower_lr: Rate = eqx.field(converter=rate)
    adjoint_lr: Rate = eqx.field(converter=rate)
    upper_steps: Amount = eqx.field(static=True, converter=amount, default=1)
    lower_steps: Amount = eqx.field(static=True, converter=amount, default=1)
    lower_rounds: int = eqx.field(static=True, converter=whole, default=5)
    cohort: int | None = eqx.field(static=True, converter=whole, default=None)
    inner: Literal["svrg", "sgd"] = eqx.field(static=True, default="svrg")

    def __check_init__(self) -> None:
        check_amounts(self, "upper_steps", "lower_steps")
        check_count("lower_rounds", self.lower_rounds)
        check_choice("inner", self.inner, ("svrg", "sgd"))

    @property
    def local_lower_steps(self) -> int:
        return most(self.lower_steps)

    def init(self, fed: Federation, key: jax.Array) -> Variables:
        check_has_y(fed.problem)
        return super().init(fed, key)

    def step(self, fed: Federation, state: Variables, key: jax.Array) -> tuple[Variables, Info]:
        k_cohort, k_factors, k_lower, k_hyper, k_upper = jr.split(key, 5)
        cohort = fed.cohort(k_cohort, self.cohort)
        x, x_note = cohort.read(fed.publish(state.x, "x"))
        factors = below(k_factors, (), self.lower_rounds)
        y, r = self._lower(fed, cohort, x, state.y, factors, k_lower)
        u = scale(self.lower_rounds, scale(self.adjoint_lr, r))
        point = Point(x_note, fed.publish(y, "y"))
        h, point = point.ask(cohort, Assemble(), "h", k_hyper, u)
        descent = Descent(self.upper_lr, Work("upper", self.upper_steps))
        return Variables(upper_round(cohort, descent, point, h, k_upper), y), {}

    def _lower(
        self, fed: Federation, cohort: Cohort, x: At, y: PyTree, factors: jax.Array, key: jax.Array
    ) -> tuple[PyTree, PyTree]:
        """`(y_N, r)`: rounds without r, the one that starts it, and one for each of its factors."""
        descent = Descent(self.lower_lr, Work("lower", self.lower_steps))
        start = self.lower_rounds - 1 - factors

        def move(t: Any, y: PyTree, *r: PyTree, rider: Program | None = None) -> tuple[PyTree, PyTree]:
            own = jr.fold_in(key, t)
            return lower_round(cohort, descent, x, y, own, *r, anchored=self.inner == "svrg", rider=rider)

        def multiply(index: Any, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            y, r = carry
            y, hr = move(start + 1 + index, y, r, rider=Curvature())
            return y, step(r, self.adjoint_lr, hr)

        y = fed.loop(start, lambda t, y: move(t, y)[0], y)
        started = move(start, y, rider=UpperGradient())
        last: tuple[PyTree, PyTree] = fed.loop(factors, multiply, started)
        return last
