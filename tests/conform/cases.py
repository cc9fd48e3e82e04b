"""Every algorithm, with a problem that it can solve: what the conformance tests run on every engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fedbilevel as fb
from conform.every_verb import EveryVerb
from problem import narrow

CLIENTS = 3
FALLING = optax.piecewise_constant_schedule(0.1, {1: 0.5})


class Case(NamedTuple):
    """A named experiment, made in the precision of the moment."""

    make: Callable[[], tuple[fb.Problem, fb.Clients]]
    algorithm: Callable[[], Any]


@functools.cache
def quadratic(x64: bool) -> fb.Quadratic:
    return fb.Quadratic.random(jax.random.key(0), CLIENTS, 3, 4)


def bilevel(**data: Any) -> tuple[fb.Problem, fb.Clients]:
    known = quadratic(jnp.result_type(float) == jnp.float64)
    return known.problem(), known.clients(**data)


def bilevel_batches() -> tuple[fb.Problem, fb.Clients]:
    """Clients of unequal size, minibatches, weights by size.

    Sizes of one power of two: on a wire, clients then share their compiled programs.
    """
    known = quadratic(jnp.result_type(float) == jnp.float64)
    full = known.clients(samples=8, noise=0.3)
    rows = [range(start * 8, start * 8 + size) for start, size in enumerate((8, 5, 7))]
    parts = [
        fb.Clients.indexed(s.flat, rows, batch_size=2, weights="size").lower for s in (full.lower, full.upper)
    ]
    return known.problem(), fb.Clients(*parts, weights="size")


def of_y_alone(x: jax.Array, y: jax.Array, samples: Any) -> jax.Array:
    """The quadratic's f without its terms in x."""
    gap = y - samples["c"]
    return jnp.mean(jnp.einsum("si,sij,sj->s", gap, samples["D"], gap)) / 2


def separated(
    make: Callable[[], tuple[fb.Problem, fb.Clients]],
) -> Callable[[], tuple[fb.Problem, fb.Clients]]:
    """The same with an f that does not read x."""

    def made() -> tuple[fb.Problem, fb.Clients]:
        known, clients = make()
        return fb.Problem(of_y_alone, known.lower, known.x0, known.y0), clients

    return made


def minimax() -> tuple[fb.Problem, fb.Clients]:
    known = fb.Saddle.random(jax.random.key(1), CLIENTS, 3, centred=False)
    return known.problem(), known.clients()


def compositional() -> tuple[fb.Problem, fb.Clients]:
    known = fb.Composition.random(jax.random.key(2), CLIENTS, 2, 3)
    return known.problem(), known.clients()


def distance(x: jax.Array, samples: jax.Array) -> jax.Array:
    return jnp.mean(jnp.sum((x - samples) ** 2 * jnp.arange(1.0, 4.0), axis=-1))


def single_level() -> tuple[fb.Problem, fb.Clients]:
    data = jax.random.normal(jax.random.key(3), (CLIENTS, 4, 3))
    return fb.single_level(distance, jnp.ones(3)), fb.Clients(data)


def mixture() -> tuple[fb.Problem, fb.Clients]:
    inputs = jax.random.normal(jax.random.key(4), (CLIENTS, 4, 2))
    labels = jnp.sum(inputs > 0, axis=-1)
    known = fb.Mixture(fb.Linear(3), inputs=(2,), classes=3, models=2, client_metrics={})
    return known, fb.Clients({"inputs": inputs, "labels": labels})


def sliced() -> tuple[fb.Problem, fb.Clients]:
    """A model of which clients hold parts."""
    return narrow.problem(), narrow.clients(CLIENTS, batch_size=2)


def public() -> jax.Array:
    """Samples that everybody has."""
    return jax.random.normal(jax.random.key(5), (4, narrow.INPUTS))


RATES: dict[str, Any] = {"upper_lr": 0.1, "lower_lr": 0.2}
SERIES: dict[str, Any] = RATES | {"terms": 4, "smoothness": 4.0}
THREE: dict[str, Any] = RATES | {"adjoint_lr": 0.15}
PARTS: dict[str, Any] = {"ratios": (1.0, 0.5, 0.25), "cohort": 2}

CASES = {
    "FedNest": Case(bilevel, lambda: fb.FedNest(**SERIES, lower_rounds=2, lower_steps=2, upper_steps=2)),
    "FedNest-sum": Case(bilevel, lambda: fb.FedNest(**SERIES, series="sum")),
    "FedNest-cg": Case(
        bilevel,
        lambda: fb.FedNest(**RATES, terms=4, series="cg", residual=True),
    ),
    "FedNest-cohorts": Case(
        bilevel_batches,
        lambda: fb.FedNest(**SERIES, cohort=2, lower_epochs=1, upper_steps=(1, 2, 3), scale_by_steps=True),
    ),
    "FedNestSGD": Case(bilevel, lambda: fb.FedNestSGD(**SERIES, lower_steps=2)),
    "LFedNest": Case(bilevel, lambda: fb.LFedNest(**SERIES, lower_steps=2, upper_steps=2)),
    "LFedNestSVRG": Case(bilevel, lambda: fb.LFedNestSVRG(**SERIES, lower_steps=2)),
    "LFedNestNonAlt": Case(
        bilevel,
        lambda: fb.LFedNestNonAlt(**SERIES, lower_steps=2, lower_rounds=2),
    ),
    "FedMBO": Case(bilevel, lambda: fb.FedMBO(**SERIES, lower_rounds=2, damping=0.1)),
    "FedMBO-cohorts": Case(bilevel_batches, lambda: fb.FedMBO(**SERIES, cohort=2, inner="sgd")),
    "AggITD": Case(
        bilevel,
        lambda: fb.AggITD(**THREE, lower_rounds=3, lower_steps=(1, 3, 2), upper_steps=2),
    ),
    "AggITD-cohorts": Case(
        bilevel_batches,
        lambda: fb.AggITD(**THREE, lower_rounds=3, cohort=2, inner="sgd"),
    ),
    "minimax": Case(minimax, lambda: fb.FedNest(**RATES, lower_steps=2)),
    "compositional": Case(compositional, lambda: fb.FedNest(**RATES, lower_steps=2)),
    "single-level": Case(single_level, lambda: fb.FedNest(**RATES, upper_steps=3)),
    "FedAvg": Case(single_level, lambda: fb.FedAvg(0.05, steps=3)),
    "FedAvgS": Case(minimax, lambda: fb.FedAvgS(**RATES, steps=3)),
    "FedBiO": Case(bilevel, lambda: fb.FedBiO(**THREE, sync_every=(1, 3, 2))),
    "FedBiOLocal": Case(bilevel_batches, lambda: fb.FedBiOLocal(**THREE, terms=2, cohort=2)),
    "FedBiOAcc": Case(bilevel_batches, lambda: fb.FedBiOAcc(**THREE, sync_every=2, first_batch=3)),
    "FedBiOAccLocal": Case(
        bilevel_batches,
        lambda: fb.FedBiOAccLocal(**THREE, sync_every=(1, 3, 2), cohort=2),
    ),
    "SimFBO": Case(
        bilevel_batches,
        lambda: fb.SimFBO(**THREE, local_lr=0.5, sync_every=(1, 3, 2), discount=0.8, radius=0.5, cohort=2),
    ),
    "ShroFBO": Case(bilevel, lambda: fb.ShroFBO(**THREE, sync_every=(1, 3, 2))),
    "FedMSA": Case(bilevel_batches, lambda: fb.FedMSA(**THREE, sync_every=(1, 3, 2), renew=0.4, cohort=2)),
    "FedGDAGT": Case(minimax, lambda: fb.FedGDAGT(0.02, 0.2, sync_every=3)),
    "F2SA": Case(bilevel_batches, lambda: fb.F2SA(0.01, 0.1, 5.0, sync_every=2)),
    "SOBA": Case(bilevel_batches, lambda: fb.SOBA(**THREE)),
    "MRBO": Case(bilevel, lambda: fb.MRBO(**THREE, terms=2)),
    "CommFedBiO": Case(
        bilevel_batches,
        lambda: fb.CommFedBiO(**THREE, topk=2, terms=2, cohort=2),
    ),
    "StocBiO": Case(bilevel, lambda: fb.StocBiO(**SERIES, lower_steps=2)),
    "SGP": Case(bilevel_batches, lambda: fb.SGP(fb.links.Stochastic(seed=1), 0.1, "before")),
    "PDBO": Case(
        bilevel_batches,
        lambda: fb.PDBO(fb.links.Stochastic(seed=1), 0.1, 2, fb.Adam(0.05), 2, consensus=True),
    ),
    "PDBO, falling step size": Case(
        bilevel,
        lambda: fb.PDBO(fb.links.Complete(), FALLING, 2, fb.SGD(0.05), 2, adjoint_lr="last"),
    ),
    "DSOBA": Case(
        bilevel_batches,
        lambda: fb.DSOBA(fb.links.Stochastic(directed=False, balanced=True, seed=1), **THREE, average=0.5),
    ),
    "DSOBA-tracking": Case(
        bilevel_batches,
        lambda: fb.DSOBA(fb.links.Ring(), **THREE, correction="tracking"),
    ),
    "DSOBA-diffusion": Case(
        bilevel,
        lambda: fb.DSOBA(fb.links.ErdosRenyi(0.7), **THREE, average=0.5, correction="diffusion"),
    ),
    "MADSBO": Case(
        bilevel_batches,
        lambda: fb.MADSBO(fb.links.Ring(), 0.1, 0.08, 0.08, lower_steps=2, terms=2, average=0.5),
    ),
    "QFFL": Case(bilevel, lambda: fb.QFFL(0.05, q=1.0, steps=2)),
    "Local": Case(bilevel_batches, lambda: fb.Local(0.1, epochs=1)),
    "FedProx": Case(bilevel, lambda: fb.FedProx(0.1, 0.5, steps=(1, 3, 2))),
    "FedAvgPlus": Case(
        bilevel_batches,
        lambda: fb.FedAvgPlus(0.1, tune_steps=2, tune_every=3, cohort=2),
    ),
    "PFedMe": Case(bilevel_batches, lambda: fb.PFedMe(0.05, 2.0, 2, 0.3, 1.1, cohort=2)),
    "ClusteredFL": Case(bilevel, lambda: fb.ClusteredFL(0.1, 0.1, 0.1)),
    "FedEM": Case(mixture, lambda: fb.FedEM(0.2, steps=2, cohort=2)),
    "FedEM-links": Case(
        mixture,
        lambda: fb.FedEM(0.2, links=fb.links.Given(jnp.roll(jnp.eye(CLIENTS), 1, 0))),
    ),
    "FedSep": Case(
        separated(bilevel),
        lambda: fb.FedSep(fb.SketchLasso(3, 0.01), fb.SGD(0.05), learn_steps=2),
    ),
    "FedSep-gradient": Case(
        separated(bilevel_batches),
        lambda: fb.FedSep(fb.GradientDecoder(0.2, 2, 2), fb.SGD(0.05), learn_steps=(1, 3, 2), cohort=2),
    ),
    "CompressedFedAvg": Case(
        bilevel_batches,
        lambda: fb.CompressedFedAvg(fb.SGD(0.05), codec="topk", size=2, cohort=2),
    ),
    "CompressedFedAvg-random": Case(
        bilevel,
        lambda: fb.CompressedFedAvg(fb.SGD(0.05), codec="random", size=2, feedback=False, server_lr=0.3),
    ),
    "CompressedFedAvg-quantized": Case(
        bilevel,
        lambda: fb.CompressedFedAvg(fb.SGD(0.05), codec="quantized", size=4),
    ),
    "FetchSGD": Case(
        bilevel,
        lambda: fb.FetchSGD(fb.SGD(0.05), 2, rows=3, columns=5, k=2, server_lr=0.1),
    ),
    "FedSep-submodel": Case(
        sliced,
        lambda: fb.FedSep(
            fb.Submodel((1.0, 0.5, 0.25), mask_steps=2), fb.SGD(0.1), learn_steps=(1, 2, 1), cohort=2
        ),
    ),
    "FedRolex": Case(sliced, lambda: fb.FedRolex(fb.SGD(0.1), learn_steps=2, **PARTS)),
    "DSFL": Case(
        sliced,
        lambda: fb.DSFL(fb.SGD(0.1), fb.SGD(0.1), public(), distil_steps=2, **PARTS),
    ),
    "every-verb": Case(bilevel, lambda: EveryVerb(0.1, cohort=2)),
}
