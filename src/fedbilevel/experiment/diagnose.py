"""What to look at when a run diverges: curvature, heterogeneity, and whether hypergradients are right."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax.random as jr
import numpy as np

from fedbilevel.adjoint.lanczos import Spectrum, Tridiagonal, spectrum
from fedbilevel.algorithm.base import Algorithm, Variables
from fedbilevel.algorithm.probe import (
    CurvatureProbe,
    EstimatorProbe,
    HypergradientProbe,
    OwnCurvatureProbe,
    SpreadProbe,
)
from fedbilevel.data.clients import Clients
from fedbilevel.engine.base import Engine
from fedbilevel.experiment.engines import opened
from fedbilevel.fed.ledger import Ledger
from fedbilevel.problem.base import Problem
from fedbilevel.tree import PyTree, all_finite

_MARGIN = 1.1
"""ℓ is set so much above the measured curvature, because it moves while y does."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found at a point.

    Attributes:
        lambda_max, lambda_min: the extreme eigenvalues of `mean ∇²_yy g_i`.
        spectrum: the same with the error bounds of the measurement.
        spread: relative spread over clients of `g_y, f_y, f_x, g_yy v, g_xy v` (0: all alike).
        smoothness: suggested ℓ.
        damping: suggested damping; 0 if H is positive definite.
        lower_lr: suggested step size for y, `1/ℓ`, over the local steps of the given algorithm.
        upper_lr: suggested step size for x, one over the measured curvature of h; None if not measured.
        terms: suggested number of terms of the Neumann series for the tolerance.
        cg_terms: suggested number of CG iterations for the tolerance.
        residual: `‖H u − ∇_y f‖/‖∇_y f‖` of the accurate solve; None for minimax, which needs none.
        hypergradient_norm: norm of the accurate hypergradient.
        estimator_error, estimator_bias: of the given algorithm's hypergradient against the accurate
            one: root mean square of its draws, and their mean; relative; None if none was given.
        ledger: what the measurement cost.
        no_means: which of f ("upper") and g ("lower") give another value where every sample comes twice.
    """

    lambda_max: float
    lambda_min: float
    spectrum: Spectrum
    spread: dict[str, float]
    smoothness: float
    damping: float
    lower_lr: float
    upper_lr: float | None
    terms: int
    cg_terms: int
    residual: float | None
    hypergradient_norm: float
    estimator_error: float | None
    estimator_bias: float | None
    ledger: Ledger
    no_means: tuple[str, ...] = ()

    @property
    def condition(self) -> float:
        """κ of the damped H."""
        low = self.lambda_min + self.damping
        return (self.lambda_max + self.damping) / low if low > 0 else math.inf

    def __str__(self) -> str:
        lines = [
            f"curvature of g in y: {self.lambda_min:.4g} to {self.lambda_max:.4g}, "
            f"condition number {self.condition:.4g}" + (" (damped)" if self.damping else ""),
            "spread over clients: " + ", ".join(f"{name} {value:.3g}" for name, value in self.spread.items()),
            f"suggested: smoothness={self.smoothness:.4g}, lower_lr={self.lower_lr:.4g}, terms={self.terms} "
            f'(or {self.cg_terms} with series="cg")',
        ]
        if self.upper_lr is not None:
            lines[-1] += f", upper_lr={self.upper_lr:.4g}"
        if self.damping:
            lines[-1] += f", damping={self.damping:.4g}"
            lines.append("g is not strongly convex in y here: without damping the adjoint has no meaning")
        lines.append(f"accurate hypergradient: norm {self.hypergradient_norm:.4g}")
        if self.residual is not None:
            lines[-1] += f", adjoint residual {self.residual:.2g}"
        if self.estimator_error is not None and math.isnan(self.estimator_error):
            lines.append("the given method's hypergradient: not compared, the accurate one is zero here")
        elif self.estimator_error is not None:
            lines.append(
                f"the given method's hypergradient: error {self.estimator_error:.2g}, "
                f"bias {self.estimator_bias:.2g}"
            )
        lines += [
            f"the {level} objective is no mean over samples: where all come twice it is another. If it is a "
            "sum, divide by their number (on padded batches it is a mean anyhow); else see `on_weighted` "
            "in the documentation of `Problem`"
            for level in self.no_means
        ]
        return "\n".join(lines)


def diagnose(
    problem: Problem,
    clients: Clients,
    x: PyTree,
    y: PyTree,
    *,
    algorithm: Algorithm[Any] | None = None,
    tolerance: float = 1e-2,
    iterations: int = 50,
    engine: str | Engine = "simulator",
    seed: int = 0,
) -> Diagnosis:
    """Measure a problem at `(x, y)` and suggest settings.

    Every measurement uses all of the clients' data, but for the algorithm's own hypergradient, which is
    drawn as a run would draw it: from minibatches and cohorts.

    Args:
        problem, clients: what is solved, on which data.
        x, y: where: usually the start, or where a run has gone wrong.
        algorithm: if it has a `hypergradient` (FedNest and its variants do), its error is measured.
        tolerance: relative accuracy that the suggested numbers of terms should reach.
        iterations: of the Lanczos process and of conjugate gradients.
        engine: "simulator", "process", "mesh", or an engine object.
        seed: of the random directions.
    """
    if problem.structure == "single_level":
        raise ValueError("a single-level problem has no lower level to diagnose")
    point = problem.at(x, y)
    if not bool(all_finite((point.x0, point.y0))):
        raise ValueError("x or y holds a NaN or an infinity: diagnose where the run was still finite")
    point.check(clients)
    with opened(engine) as where:
        ask = _Asker(where, point, seed)
        ends = _ends(ask(CurvatureProbe(iterations), clients.whole()))
        _positive(_safe_bound(ends))
        spread = ask(SpreadProbe(), clients.whole())
        damping = 0.0 if ends.low > 0 else -ends.low + ends.low_error + 0.01 * abs(ends.high)
        deep = _hypergradient(ask, clients, iterations, damping, algorithm)
    found = _diagnosis(ends, spread, damping, deep, tolerance, ask.ledger)
    return dataclasses.replace(
        found,
        lower_lr=found.lower_lr / (1 if algorithm is None else algorithm.local_lower_steps),
        no_means=point.no_means(clients),
    )


def _hypergradient(
    ask: _Asker, clients: Clients, iterations: int, damping: float, algorithm: Any
) -> dict[str, Any]:
    """An accurate hypergradient on all data, and a method's estimates of it on its own batches."""
    deep = ask(HypergradientProbe(iterations, damping), clients.whole())
    if not hasattr(algorithm, "hypergradient"):
        return deep
    if algorithm.needs_smoothness and ask.problem.structure == "bilevel":
        value, cost = measured_smoothness(ask.engine, ask.problem, clients, 0, algorithm)
        algorithm, ask.ledger = with_smoothness(algorithm, value), ask.ledger + cost
    return deep | ask(EstimatorProbe(algorithm, deep["hypergradient"]), clients)


def _diagnosis(
    ends: Spectrum,
    spread: dict[str, Any],
    damping: float,
    deep: dict[str, Any],
    tolerance: float,
    ledger: Ledger,
) -> Diagnosis:
    bend = float(deep.get("upper_curvature", 0))
    terms, cg_terms = _terms(ends, damping, tolerance)
    return Diagnosis(
        lambda_max=ends.high,
        lambda_min=ends.low,
        spectrum=ends,
        spread={name: float(value) for name, value in spread.items()},
        smoothness=_safe_bound(ends),
        damping=damping,
        lower_lr=1 / (_safe_bound(ends) + damping),
        upper_lr=1 / bend if bend > 0 else None,
        terms=terms,
        cg_terms=cg_terms,
        residual=_number(deep, "adjoint_residual"),
        hypergradient_norm=float(np.linalg.norm(deep["hypergradient"])),
        estimator_error=_number(deep, "estimator_error"),
        estimator_bias=_number(deep, "estimator_bias"),
        ledger=ledger,
    )


def measured_smoothness(
    engine: Engine, problem: Problem, clients: Clients, seed: int, algorithm: Any
) -> tuple[float, Ledger]:
    """ℓ as measured where the problem starts, and what that cost.

    It bounds the mean Hessian, or every client's own where the method inverts those.
    """
    ask = _Asker(engine, problem, seed)
    if not algorithm.inverts_own_hessians:
        return _positive(_safe_bound(_ends(ask(CurvatureProbe(), clients.whole())))), ask.ledger
    found = ask(OwnCurvatureProbe(), clients.whole())
    matrices = zip(found["diagonal"], found["off"], found["answered"], strict=True)
    bounds = [_safe_bound(spectrum(Tridiagonal(d, o))) for d, o, answered in matrices if answered]
    return _positive(max(bounds)), ask.ledger


def with_smoothness(algorithm: Any, value: float) -> Any:
    """The algorithm with its ℓ known."""
    return eqx.tree_at(lambda a: a.smoothness, algorithm, value)


class _Asker:
    """Runs one-step algorithms at the point where a problem starts, and adds up what they cost."""

    def __init__(self, engine: Engine, problem: Problem, seed: int) -> None:
        self.engine, self.problem, self.key = engine, problem, jr.key(seed)
        self.ledger = Ledger()

    def __call__(self, probe: Algorithm[Variables], clients: Clients) -> dict[str, Any]:
        with self.engine.connect(self.problem, clients, probe) as session:
            state, _ = session.init(self.key)
            block = session.advance(state, self.key, 0, 1, 1)
        self.ledger = self.ledger + Ledger.from_counts(block.counts)
        return {name: np.asarray(values)[0] for name, values in block.info.items()}


def _ends(info: dict[str, Any]) -> Spectrum:
    return spectrum(Tridiagonal(info["diagonal"], info["off"]))


def _safe_bound(ends: Spectrum) -> float:
    return _MARGIN * max(ends.high + ends.high_error, abs(ends.low))


def _positive(curvature: float) -> float:
    """The bound of a curvature, if there is any."""
    if curvature == 0:
        raise ValueError(
            "g has no curvature in y here: it is linear in y and has no minimum, or y stands where it is "
            "flat. Begin elsewhere (y0), or give `smoothness` as a number."
        )
    return curvature


def _terms(ends: Spectrum, damping: float, tolerance: float) -> tuple[int, int]:
    """Terms after which the series, and CG, have the relative error `tolerance`."""
    low, high = ends.low + damping, _safe_bound(ends) + damping
    series = math.log(tolerance) / math.log1p(-low / high)
    cg = math.sqrt(high / low) / 2 * math.log(2 / tolerance)
    return math.ceil(series), math.ceil(cg)


def _number(values: dict[str, Any], name: str) -> float | None:
    return float(values[name]) if name in values else None
