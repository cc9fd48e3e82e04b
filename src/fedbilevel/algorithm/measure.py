"""Measures of a point `(x, y)` that are taken during a run, on all of the clients' data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from fedbilevel.adjoint.cg import ConjugateGradients
from fedbilevel.algorithm.base import Info, TwoVariables, Variables
from fedbilevel.algorithm.exchange import Point
from fedbilevel.algorithm.probe import HypergradientProbe, SquaredDistance
from fedbilevel.data.batches import weighted
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.place import Kept
from fedbilevel.fed.program import Program
from fedbilevel.local.gradients import Curvature, LowerGradient
from fedbilevel.number import whole
from fedbilevel.problem.base import Problem, Structure
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import PyTree, norm

MEASURES: Mapping[str, tuple[Structure, ...]] = {
    "hypergradient_norm": ("bilevel", "minimax", "compositional", "single_level"),
    "adjoint_residual": ("bilevel", "compositional"),
    "lower_distance": ("bilevel", "minimax", "compositional"),
    "client_drift": ("bilevel", "minimax", "compositional"),
}
"""What `PointProbe` can measure, and on problems of which structure."""


class PointProbe(TwoVariables):
    """Numbers that say how far `(x, y)` is from a solution, by accurate solves on all data.

    * `hypergradient_norm`: `‖∇_x f − J u‖` with `H u = ∇_y f` by conjugate gradients.
    * `adjoint_residual`: `‖H u − ∇_y f‖/‖∇_y f‖` of that solve.
    * `lower_distance`: `‖H⁻¹ ∇_y g‖`, the length of a Newton step on y: the distance to `y*(x)` where g is
      quadratic in y, and close to it near the solution.
    * `client_drift`: `sqrt(mean ‖∇_y g_i − ∇_y g‖²)`, how far local steps of size one take the clients apart.

    Args:
        names: which of them.
        iterations: of conjugate gradients in each solve.
    """

    names: tuple[str, ...] = eqx.field(static=True)
    iterations: int = eqx.field(static=True, converter=whole, default=50)

    def step(self, fed: Federation, state: Variables, key: jax.Array) -> tuple[Variables, Info]:
        found: Info = {}
        if {"hypergradient_norm", "adjoint_residual"} & set(self.names):
            h, found = HypergradientProbe(self.iterations).accurate(fed, state, key)
            found = found | {"hypergradient_norm": norm(h)}
        if {"lower_distance", "client_drift"} & set(self.names):
            found = found | self._lower(fed, state, key)
        return state, {name: found[name] for name in self.names}

    def _lower(self, fed: Federation, state: Variables, key: jax.Array) -> Info:
        point = Point(fed.publish(state.x, "x"), fed.publish(state.y, "y"))
        slope, point = point.ask(fed.everyone, LowerGradient(), "q", key)
        square, point = point.ask(fed.everyone, SquaredDistance(LowerGradient()), "spread", key, slope)
        drift = {"client_drift": jnp.sqrt(square)}
        if "lower_distance" not in self.names:
            return drift

        def product(index: Any, v: PyTree, point: Point) -> tuple[PyTree, Point]:
            return point.ask(fed.everyone, Curvature(), "u", key, v)

        newton = ConjugateGradients(self.iterations).solve(product, slope, point, key, fed.loop).u
        return drift | {"lower_distance": norm(newton)}


UNSEEN: Mapping[str, str] = {"test": "", "validation": "validation_"}
"""The data that only metrics see, and what the names of the metrics there begin with."""


def measured(problem: Problem, name: str, metric: Callable[[], Any], y: PyTree) -> jax.Array:
    """A metric's value, one number; an error that explains if it fails, and whether y may be the reason."""
    try:
        return jnp.asarray(metric()).reshape(())
    except (TypeError, ValueError, LookupError, jax.errors.JAXTypeError) as error:
        raise ValueError(
            f"the metric {name!r} must be a JAX function that returns one number; it failed with "
            f"{type(error).__name__}: {error}{_about_y(problem, y)}"
        ) from error


def _about_y(problem: Problem, y: PyTree) -> str:
    """Why a metric may fail that the problem's y0 would not: y is another thing."""
    if jax.tree.map(jnp.shape, y) == jax.tree.map(jnp.shape, problem.y0):
        return ""
    what = "has one row a client, or other shapes than y0" if jax.tree.leaves(y) else "is (): none is kept"
    return (
        f"\nThe method's y {what}. If x is the model, as with FedSep's Submodel, take the problem "
        "ServerModel, whose metrics look at x; otherwise `client_metrics`, which see every client's own y."
    )


class OwnMetrics(Program):
    """`(x, y) ↦ {name: (metric, samples)}` of the problem's `client_metrics` on a client's own data.

    On its test data and, as `validation_<name>`, on its validation data if there are any. A metric comes with
    the number of samples that it is the mean of: only the client knows it.
    """

    def __call__(self, me: Client, *values: Any) -> PyTree:
        found = {}
        for level, prefix in UNSEEN.items():
            if not me.largest(level)[1]:  # nobody has such data
                continue
            batch = me.batch(level, me.key)
            for name, metric in me.problem.client_metrics.items():
                own = functools.partial(weighted(metric), *values, batch)
                value = measured(me.problem, name, own, values[1])
                found[prefix + name] = jnp.stack([value, jnp.asarray(batch.count, value.dtype)])
        return found


class ClientProbe(TwoVariables):
    """Every client's own metrics and the numbers of their samples, `(clients, 2)` each, and who `answered`.

    Variables that clients keep for themselves are evaluated as they are: each client's own.
    """

    def step(self, fed: Federation, state: Variables, key: jax.Array) -> tuple[Variables, Info]:
        everyone = fed.everyone
        there = [everyone.take(v) if isinstance(v, Kept) else everyone.send(v, "xy") for v in state]
        metrics, answered = everyone.gather(everyone.run(OwnMetrics(), *there, key=key), "metrics")
        return state, metrics | {"answered": answered}
