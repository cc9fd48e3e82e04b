"""What is suspicious about a run: reports of its adjoint, and data that no step size can help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.adjoint.base import GROWTH
from fedbilevel.data.batches import Samples
from fedbilevel.data.clients import Clients

PUSH_GROWTH = 2.0
"""What terms of hypergradient push may grow by over links that come and go, and the series still converge."""


class AdjointWarning(UserWarning):
    """The adjoint system was not solved: the hypergradients of the run cannot be trusted."""


class DivergenceWarning(UserWarning):
    """A run met a NaN or an overflow and ended there."""


class DataWarning(UserWarning):
    """A run diverged, and its samples hold a NaN or an infinity."""


_NOTES = {
    "growth": (
        "a term of the Neumann series grew (by {:.3g} at worst): ‖I − H/ℓ‖ > 1, so the series cannot "
        "converge. Raise `smoothness` above the largest eigenvalue of H, or add `damping` if H has negative "
        'eigenvalues; `fedbilevel.diagnose` measures both, `smoothness="auto"` the first.'
    ),
    "curvature": (
        "conjugate gradients met negative curvature ({:.3g} at worst): g is not strongly convex in y there. "
        "Add `damping` above the most negative eigenvalue; `fedbilevel.diagnose` measures it."
    ),
    "push": (
        "the terms of hypergradient push grew (the last was {:.3g} times the first at worst): their series "
        "does not converge, and more terms make it worse. Set `adjoint_lr`, by default the first of "
        "`lower_lr`, below one over the largest curvature of a node's minibatch (or two over it, with "
        'when="before"): try a fifth of it, or "last" if `lower_lr` falls. Where g has negative curvature '
        "that only slows the growth: give the adjoint `damping` above it, take fewer terms, or a larger "
        "penalty in g."
    ),
    "failed": (
        "the clients' own adjoints failed at up to {:.0%} of the clients: their Hessians have eigenvalues "
        'above `smoothness` (`smoothness="auto"` measures a bound) or below zero (add `damping`).'
    ),
}


def notes(trouble: Mapping[str, float]) -> tuple[str, ...]:
    """What to say of some kinds of trouble with their worst numbers, one line each."""
    return tuple(_NOTES[kind].format(worst) for kind, worst in trouble.items())


def suspicions(info: dict[str, Any]) -> dict[str, float]:
    """What the adjoint's reports say of some steps: a kind of trouble and its worst number."""
    growth = np.max(info.get("adjoint_growth", 0.0), initial=0.0)
    curvature = np.min(info.get("adjoint_curvature", 1.0), initial=1.0)
    share = np.max(info.get("adjoint_failed", 0.0), initial=0.0)
    push = np.max(info.get("push_growth", 0.0), initial=0.0)
    found = (
        ("growth", growth, growth > GROWTH),
        ("curvature", curvature, curvature <= 0),
        ("push", push, push > PUSH_GROWTH),
        ("failed", share, share > 0),
    )
    return {kind: float(worst) for kind, worst, bad in found if bad}


def divergence_note(steps: int) -> str:
    """What to say of a run that diverged."""
    return (
        f"the run diverged after {steps:,} steps: x and y are the last finite ones. Smaller step sizes are "
        "the usual remedy; `fedbilevel.diagnose(problem, clients, x, y, algorithm=algorithm)` suggests some."
    )


def data_notes(clients: Clients) -> tuple[str, ...]:
    """Of a run that diverged: whose samples hold a NaN or an infinity; nothing where all are finite."""
    who = sorted({client for level in (clients.lower, clients.upper) for client in _not_finite(level)})
    note = (
        f"the run diverged, and samples of clients {who} hold a NaN or an infinity: other step sizes will "
        "not help. Leave such samples out, or fill them in."
    )
    return (note,) if who else ()


def _not_finite(samples: Samples) -> list[int]:
    """The clients with a sample that is not finite."""
    leaves = [leaf for leaf in jax.tree.leaves(samples.flat) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if not leaves:
        return []
    finite = [np.isfinite(np.asarray(leaf)).reshape(len(leaf), -1).all(axis=1) for leaf in leaves]
    rows = ~np.all(finite, axis=0)
    rows = rows if samples.rows is None else rows[np.asarray(samples.rows)]
    pairs = zip(np.asarray(samples.start), np.asarray(samples.size), strict=True)
    return [client for client, (start, size) in enumerate(pairs) if rows[start : start + size].any()]
