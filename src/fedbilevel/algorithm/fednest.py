"""FedNest and its variants: bilevel, minimax, compositional and single-level problems."""

from __future__ import annotations

from typing import Any, Literal

import equinox as eqx
import jax
import jax.random as jr

from fedbilevel.adjoint.base import Adjoint
from fedbilevel.adjoint.cg import ConjugateGradients
from fedbilevel.adjoint.neumann import Neumann
from fedbilevel.algorithm.base import Info, TwoVariables, Variables
from fedbilevel.algorithm.chains import chained_hypergradient
from fedbilevel.algorithm.exchange import Point, global_adjoint
from fedbilevel.algorithm.rounds import lower_round, upper_round
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.place import At
from fedbilevel.local.descent import Both, Descent, HyperDescent
from fedbilevel.local.gradients import Assemble, OwnHypergradient
from fedbilevel.local.work import Amount, Work, amount, check_amounts, most
from fedbilevel.name import check_choice
from fedbilevel.number import check_count, check_not_negative, whole
from fedbilevel.schedule import Rate, rate
from fedbilevel.tree import PyTree


class FedNest(TwoVariables):
    """Federated nested optimisation: T rounds on y, then a round on x with a global hypergradient.

    A step, with one cohort S for both levels:

        repeat T times:  y ← FedInn(x, y)      q = mean ∇_y g_i(x, y);  τ local SVRG steps on y
        u ← FedIHGP(x, y)                      N' or N products mean H_i v
        x ← FedOut(x, y, u)                    h = mean (∇_x f_i − J_i u);  τ local SVRG steps on x

    Minimax problems need no adjoint (and bill `∇_y f` as g_y, since g = −f); compositional ones have
    H = I, so the adjoint is one exchange; single-level ones have no y. The other methods of the family
    are switches of this one:

    | method         | inner  | outer    | alternate | exchanges a step |
    |----------------|--------|----------|-----------|------------------|
    | FedNest        | svrg   | global   | yes       | 2T + N' + 3      |
    | FedNestSGD     | sgd    | global   | yes       | T + N' + 3       |
    | LFedNest       | sgd    | local    | yes       | T + 1            |
    | LFedNestSVRG   | svrg   | local    | yes       | 2T + 1           |
    | LFedNestNonAlt | sgd    | local    | no        | 1                |

    FedMBO is FedNest with another series, "chains".

    Args:
        upper_lr: α, step size for x; a number or an optax schedule.
        lower_lr: β, step size for y.
        upper_steps: τ, local steps on x; a number, or a tuple with one for each client.
        lower_steps: τ, local steps on y; likewise.
        lower_rounds: T, rounds on y before x moves.
        terms: N, the terms of the series or the iterations of CG.
        smoothness: ℓ, an upper bound of the largest eigenvalue of `mean H_i` (of every `H_i` where the
            outer level is local or the series is "chains"); "auto" measures it at the start (`solve` does
            that and bills it). CG does not need it.
        series: "sampled" (FedIHGP: one random term), "sum" (the truncated series), "cg", "chains" (FedMBO:
            a random term for each client of the cohort, its factors those of single clients), or "none":
            the direct gradient `∇_x f` alone, to see what the indirect one is worth.
        cohort: clients in a round; None: all.
        damping: added to the diagonal of H when g is not strongly convex.
        upper_epochs, lower_epochs: shuffled passes over the data in the place of steps.
        scale_by_steps: client i steps with `lr/τ_i`, as the theory does.
        residual: put `adjoint_residual`, `‖H u − ∇_y f‖/‖∇_y f‖`, into the history, for one more exchange.
            Where the outer level is local it is the mean of the clients' own, with `adjoint_failed`, the
            share of clients whose series cannot converge or whose Hessian is not positive definite, for
            one more product a step and two more scalars up.
        inner: "svrg" (local steps corrected by the mean gradient, one more exchange a round) or "sgd".
        outer: "global", the hypergradient of the mean, or "local": every client's own, without exchanges.
        alternate: y moves before x does; False: both at once, in the same local steps.

    Cost a step and client, everyone in the cohort, with N' products: `2d_x + (2T + N' + 2)d_y` scalars
    down, `2d_x + (2T + N' + 1)d_y` up (`sum`: N' = N − 1, `cg`: N' = N); T(1 + 2τ) calls of g_y (τ of the
    lower level; `inner="sgd"`: T τ), N' of g_yy, 1 + 2τ of f_x (τ of the upper level), one each of f_y
    and g_xy.

    Reference: D. A. Tarzanagh, M. Li, C. Thrampoulidis, S. Oymak, FedNest: Federated bilevel,
    minimax, and compositional optimization, ICML 2022.
    """

    upper_lr: Rate = eqx.field(converter=rate)
    lower_lr: Rate = eqx.field(converter=rate)
    upper_steps: Amount = eqx.field(static=True, converter=amount, default=1)
    lower_steps: Amount = eqx.field(static=True, converter=amount, default=1)
    lower_rounds: int = eqx.field(static=True, converter=whole, default=1)
    terms: int = eqx.field(static=True, converter=whole, default=5)
    smoothness: Any = "auto"
    series: Literal["sampled", "sum", "cg", "chains", "none"] = eqx.field(static=True, default="sampled")
    cohort: int | None = eqx.field(static=True, converter=whole, default=None)
    damping: Any = 0.0
    upper_epochs: Amount | None = eqx.field(static=True, converter=amount, default=None)
    lower_epochs: Amount | None = eqx.field(static=True, converter=amount, default=None)
    scale_by_steps: bool = eqx.field(static=True, default=False)
    residual: bool = eqx.field(static=True, default=False)
    inner: Literal["svrg", "sgd"] = eqx.field(static=True, default="svrg")
    outer: Literal["global", "local"] = eqx.field(static=True, default="global")
    alternate: bool = eqx.field(static=True, default=True)

    def __check_init__(self) -> None:
        check_amounts(self, "upper_steps", "lower_steps", "upper_epochs", "lower_epochs")
        check_count("lower_rounds", self.lower_rounds)
        check_count("terms", self.terms)
        check_smoothness(self.smoothness)
        check_not_negative(self, "damping")
        for name, options in _OPTIONS.items():
            check_choice(name, getattr(self, name), options)
        if not self.alternate and (self.inner, self.outer) != ("sgd", "local"):
            raise ValueError(
                'alternate=False needs inner="sgd" and outer="local": nothing is exchanged between'
            )
        if self.series == "chains" and (self.outer == "local" or self.residual):
            raise ValueError(
                'series="chains" needs outer="global" and residual=False: every chain has a u of its own, '
                "made by exchanges, and no system that it solves"
            )

    # ---------------------------------------------------------------- a step

    def step(self, fed: Federation, state: Variables, key: jax.Array) -> tuple[Variables, Info]:
        k_cohort, k_inner, k_outer = jr.split(key, 3)
        cohort = fed.cohort(k_cohort, self.cohort)
        if not self.alternate and fed.problem.structure != "single_level":
            return self._both_at_once(fed, cohort, state, k_inner)
        x_there, x_note = cohort.read(fed.publish(state.x, "x"))
        y = state.y
        if fed.problem.structure != "single_level":
            y = fed.loop(
                self.lower_rounds,
                lambda t, y: self._inner(cohort, x_there, y, jr.fold_in(k_inner, t)),
                y,
            )
        x, info = self._outer(fed, cohort, Point(x_note, fed.publish(y, "y")), k_outer)
        return Variables(x, y), info

    # ----------------------------------------------------------- FedInn (alg. 4, 6)

    def _inner(self, cohort: Cohort, x: At, y: PyTree, key: jax.Array) -> PyTree:
        """`y⁺ = FedInn(x, y)`: with an anchor two exchanges, without one."""
        anchored = self.inner == "svrg"
        return lower_round(cohort, self._descent("lower"), x, y, key, anchored=anchored)[0]

    # -------------------------------------------------------- FedOut (alg. 2, 3, 5)

    def _outer(self, fed: Federation, cohort: Cohort, point: Point, key: jax.Array) -> tuple[PyTree, Info]:
        """`x⁺ = FedOut(x, y)`, or its local form."""
        k_hyper, k_steps = jr.split(key)
        if self.outer == "local":
            x, y, _ = point.read(cohort)
            new = cohort.mean(cohort.run(self._hyper_descent(fed), x, y, key=k_steps), "x")
            return new if self.residual else (new, {})
        h, point, info = self._hypergradient(fed, cohort, point, k_hyper)
        return upper_round(cohort, self._descent("upper"), point, h, k_steps), info

    def _hypergradient(
        self, fed: Federation, cohort: Cohort, point: Point, key: jax.Array
    ) -> tuple[PyTree, Point, Info]:
        """`h = mean (∇_x f_i − J_i u)`, u by FedIHGP: an estimate of `∇h(x)` if y is `y*(x)`."""
        adjoint = self.adjoint(fed.problem.structure)
        if self.series == "chains" and isinstance(adjoint, Neumann) and fed.problem.structure == "bilevel":
            return chained_hypergradient(fed, adjoint, cohort, self.cohort, point, key)
        k_adjoint, k_assemble = jr.split(key)
        u: list[PyTree] = []
        info: Info = {}
        if adjoint is not None:
            solved, point, info = global_adjoint(
                fed, adjoint, cohort, self.cohort, point, k_adjoint, residual=self.residual
            )
            u = [solved]
        h, point = point.ask(cohort, Assemble(), "h", k_assemble, *u)
        return h, point, info

    def hypergradient(self, fed: Federation, x: PyTree, y: PyTree, key: jax.Array) -> PyTree:
        """This method's estimate of the hypergradient at `(x, y)`, one draw of it."""
        k_cohort, k_hyper = jr.split(key)
        cohort = fed.cohort(k_cohort, self.cohort)
        point = Point(fed.publish(x, "x"), fed.publish(y, "y"))
        if self.outer == "global":
            return self._hypergradient(fed, cohort, point, k_hyper)[0]
        program = OwnHypergradient(self.adjoint(fed.problem.structure))
        return point.ask(cohort, program, "h", k_hyper)[0]

    def _both_at_once(
        self, fed: Federation, cohort: Cohort, state: Variables, key: jax.Array
    ) -> tuple[Variables, Info]:
        """Each client descends on its own y_i, then on x_i at that y_i; both are averaged."""
        program = Both(self._descent("lower"), self._hyper_descent(fed), self.lower_rounds)
        there = cohort.send(state.x, "x"), cohort.send(state.y, "y")
        x, y = cohort.mean(cohort.run(program, *there, key=key), "xy")
        x, info = x if self.residual else (x, {})
        return Variables(x, y), info

    # ------------------------------------------------------------ the parts

    def adjoint(self, structure: str) -> Adjoint | None:
        """How this method solves `H u = ∇_y f` on a problem of the given structure."""
        if structure in ("minimax", "single_level") or self.series == "none":
            return None
        if structure == "compositional":  # H is the identity: one term is exact
            return Neumann(terms=1, smoothness=1.0)
        if self.series == "cg":
            return ConjugateGradients(self.terms, self.damping)
        if isinstance(self.smoothness, str):
            raise ValueError(
                f'smoothness is "{self.smoothness}"; it must be a number by now. `fedbilevel.solve` '
                'measures "auto" before the first step; elsewhere use `fedbilevel.diagnose`.'
            )
        return Neumann(self.terms, self.smoothness, self.series == "sampled", self.damping)

    @property
    def needs_smoothness(self) -> bool:
        return isinstance(self.smoothness, str) and self.series not in ("cg", "none")

    @property
    def inverts_own_hessians(self) -> bool:
        return self.outer == "local" or self.series == "chains"

    @property
    def local_lower_steps(self) -> int:
        return most(self.lower_steps) * (1 if self.alternate else self.lower_rounds)

    def _descent(self, level: Literal["upper", "lower"]) -> Descent:
        return Descent(getattr(self, f"{level}_lr"), self._work(level))

    def _hyper_descent(self, fed: Federation) -> HyperDescent:
        adjoint = self.adjoint(fed.problem.structure)
        return HyperDescent(self.upper_lr, self._work("upper"), adjoint, self.residual)

    def _work(self, level: Literal["upper", "lower"]) -> Work:
        steps, epochs = getattr(self, f"{level}_steps"), getattr(self, f"{level}_epochs")
        return Work(level, steps, epochs, self.scale_by_steps)


def check_smoothness(value: Any) -> None:
    """Raise an error that explains unless ℓ is a positive number (or traced), or "auto"."""
    if value == "auto" or isinstance(value, jax.Array) or (isinstance(value, float | int) and value > 0):
        return
    raise ValueError(
        f"smoothness is {value!r}; it must be a positive number, an upper bound of the largest eigenvalue "
        'of the Hessian of g in y, or "auto" to have it measured'
    )


_OPTIONS = {
    "series": ("sampled", "sum", "cg", "chains", "none"),
    "inner": ("svrg", "sgd"),
    "outer": ("global", "local"),
}
