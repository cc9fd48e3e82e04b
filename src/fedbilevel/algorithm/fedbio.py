"""FedBiO: local steps on all variables at once, the adjoint among them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.random as jr

from fedbilevel.adjoint.neumann import Neumann
from fedbilevel.algorithm.base import Algorithm, Info, check_lengths, decides
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.place import At, Kept
from fedbilevel.local.field import Field, GlobalField, LocalField, Ownership, Values
from fedbilevel.local.field_steps import FieldSteps
from fedbilevel.local.work import Amount, amount, check_amounts, most
from fedbilevel.number import check_count, whole
from fedbilevel.schedule import Rate, rate
from fedbilevel.tree import PyTree, copies, zeros_like

Lower = Literal["global", "local"]
Upper = Literal["shared", "own"]


class FieldState(NamedTuple):
    """The variables that are averaged, and those that every client keeps for itself, each in their order."""

    shared: Values
    own: tuple[Kept, ...]


class FedBiO(Algorithm[FieldState]):
    """Federated bilevel optimisation with local steps; u tracks the adjoint `u* = H⁻¹∇_y f`.

    A step is one round: every client makes I local steps, all directions at the old point,

        y ← y − γ ∇_y g(x, y)
        x ← x − η (∇_x f(x, y) − J(x, y) u)
        u ← u − τ (H(x, y) u − ∇_y f(x, y))

    each term on an independent batch, and the server averages (x, y, u). The fixed point is biased by
    the clients' drift in proportion to the step sizes where clients differ and I > 1.

    Args:
        upper_lr: η, step size for x; a number or an optax schedule of the round.
        lower_lr: γ, step size for y.
        adjoint_lr: τ, step size for u.
        sync_every: I, local steps between two averages; a number, or a tuple with one for each client.
        cohort: clients in a round; None: all.
        lower: "global": one y for everybody; "local": every client has its own y, the minimiser of its
            own g_i, which never leaves it (`FedBiOLocal`).
        terms: Q, where the lower level is local: `u = τ Σ_{q≤Q} (I − τH)^q ∇_y f`, Q products a step.
        upper: "shared": one x for everybody; "own": client i has a block x_i of x that only its f_i and g_i
            see, and that never leaves it; its step size is η/M, since f is the mean over M clients.

    Cost a step and client: one exchange, `d_x + 2d_y` scalars each way; I calls each of f_x, f_y, g_y, g_xy,
    g_yy. Local lower level: `d_x` scalars, and Q I calls of g_yy. Own upper variables: no `d_x`.

    Reference: J. Li, F. Huang, H. Huang, Communication-efficient federated bilevel optimization with
    global and local lower level problems, NeurIPS 2023, algorithms 1 and 3.
    """

    upper_lr: Rate = eqx.field(converter=rate)
    lower_lr: Rate = eqx.field(converter=rate)
    adjoint_lr: Rate = eqx.field(converter=rate)
    sync_every: Amount = eqx.field(static=True, converter=amount, default=1)
    cohort: int | None = eqx.field(static=True, converter=whole, default=None)
    lower: Lower = eqx.field(static=True, default="global")
    terms: int = eqx.field(static=True, converter=whole, default=5)
    upper: Upper = eqx.field(static=True, default="shared")

    def __check_init__(self) -> None:
        check_field_settings(self)

    @property
    def local_lower_steps(self) -> int:
        return most(self.sync_every) if self.lower == "global" else 1

    def init(self, fed: Federation, key: jax.Array) -> FieldState:
        return first_variables(self, fed)

    def step(self, fed: Federation, state: FieldState, key: jax.Array) -> tuple[FieldState, Info]:
        k_cohort, k_steps = jr.split(key)
        cohort = fed.cohort(k_cohort, self.cohort)
        whose = ownership(self)
        program = FieldSteps(field_of(self), rates_of(self, fed.n), self.sync_every, whose)
        out = cohort.run(program, *placed(cohort, whose, state, "z"), key=k_steps)
        return FieldState(cohort.mean(out[0], "z"), kept(cohort, state.own, out[1])), {}

    def solution(self, state: FieldState) -> tuple[PyTree, PyTree]:
        x, y, *_ = ownership(self).joined(*state)
        return x, y


@decides("lower", "upper")
def FedBiOLocal(upper_lr: Rate, lower_lr: Rate, adjoint_lr: Rate, **options: Any) -> FedBiO:
    """FedBiO where every client's lower level is its own: y_i never leaves client i, only x is averaged.

    Its problem is `min_x mean f_i(x, y_i*(x))` with `y_i*(x) = argmin g_i(x, ·)`; `result.y` has one row a
    client.

    Cost a step and client: one exchange, `d_x` scalars each way; I calls each of f_x, f_y, g_y, g_xy, Q I of
    g_yy.

    Reference: FedBiO, algorithm 3.
    """
    return FedBiO(upper_lr, lower_lr, adjoint_lr, lower="local", **options)


# ------------------------------------------- what FedBiO and FedBiOAcc share


def field_of(method: Any) -> Field:
    """The directions of a method; its adjoint is the truncated series with ℓ = 1/τ."""
    if method.lower == "global":
        return GlobalField()
    return LocalField(Neumann(method.terms + 1, 1 / method.adjoint_lr))


def ownership(method: Any) -> Ownership:
    """Which of (x, y, u), or of (x, y) where the lower level is local, are averaged."""
    x = method.upper == "shared"
    return Ownership((x, True, True) if method.lower == "global" else (x, False))


def rates_of(method: Any, n: int) -> tuple[Any, ...]:
    """A step size for each variable, among n clients."""
    upper = method.upper_lr if method.upper == "shared" else method.upper_lr / n
    rates = (upper, method.lower_lr)
    return (*rates, method.adjoint_lr) if method.lower == "global" else rates


def first_variables(method: Any, fed: Federation) -> FieldState:
    """x and y where the problem starts, u at zero; of the clients' own variables one copy each."""
    check_lengths(method, fed.n)
    if method.upper == "own" and fed.everyone.weights is not None:
        raise ValueError('upper="own" needs clients of equal weight: Clients(..., weights="uniform")')
    x, y = fed.problem.constraint(fed.problem.x0), fed.problem.y0
    shared, own = ownership(method).parted((x, y, zeros_like(y)) if method.lower == "global" else (x, y))
    return FieldState(shared, tuple(fed.keep(copies(value, fed.n)) for value in own))


def placed(cohort: Cohort, whose: Ownership, state: FieldState, label: str) -> tuple[At, ...]:
    """All variables at the clients of a cohort: the shared ones in one message, the own ones as kept."""
    sent = cohort.send(state.shared, label)
    shared = [sent[i] for i in range(len(state.shared))]
    return whose.joined(shared, [cohort.take(value) for value in state.own])


def kept(cohort: Cohort, before: tuple[Kept, ...], now: At) -> tuple[Kept, ...]:
    """What clients keep, with the new values of a cohort."""
    return tuple(cohort.put(value, now[i]) for i, value in enumerate(before))


def check_field_settings(method: Any) -> None:
    """Raise an error that explains unless the settings that these methods share are right."""
    check_amounts(method, "sync_every")
    check_count("terms", method.terms)
    if method.lower not in ("global", "local"):
        raise ValueError(f'lower is {method.lower!r}; it must be "global" or "local"')
    if method.upper not in ("shared", "own") or (method.upper, method.lower) == ("own", "local"):
        raise ValueError(
            f'upper is {method.upper!r} and lower {method.lower!r}; upper must be "shared" or "own", and one '
            "of the levels must be shared, or the clients have nothing in common"
        )
