"""What the reports of an adjoint say of a run: whether its hypergradients can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedbilevel.adjoint.base import GROWTH


class AdjointWarning(UserWarning):
    """The adjoint system was not solved: the hypergradients of the run cannot be trusted."""


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
    found = (("growth", growth, growth > GROWTH), ("curvature", curvature, curvature <= 0))
    return {kind: float(worst) for kind, worst, bad in (*found, ("failed", share, share > 0)) if bad}
