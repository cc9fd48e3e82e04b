"""A ladder of ε, and the exponent that a cost has on it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.random as jr
import numpy as np
from scipy import stats
from spending import Spent, spend
from theorems import CLIENTS, Claim, Setting

from fedbilevel.problem.nonconvex import Nonconvex

FIRST = 0.1
"""ε of the first rung; each of the others halves it."""

PATIENCE = 2.0
"""A run gives up after so many times the steps that the first rung and the paper's exponent promise."""


class Fit(NamedTuple):
    """`cost ~ ε^slope`: the slope, and half the width of its 95 % confidence interval."""

    slope: float
    half: float

    def __str__(self) -> str:
        return f"{self.slope:.2f} ± {self.half:.2f}"


def fit(epsilons: Sequence[float], costs: Sequence[float]) -> Fit:
    """Least squares of log cost on log ε, one point a rung; the interval is Student's.

    Seeds of one rung are averaged before: what the line misses is mostly no noise, and the same for all.
    """
    if len(epsilons) < 3:
        raise ValueError(f"there are {len(epsilons)} rungs; a slope with an interval needs at least 3")
    line = stats.linregress(np.log(epsilons), np.log(costs))
    return Fit(float(line.slope), float(stats.t.ppf(0.975, len(epsilons) - 2) * line.stderr))


def verdict(found: Fit, paper: float) -> str:
    """Whether a slope agrees with an upper bound, to a tenth or to the width of its interval."""
    if found.slope < paper - max(found.half, 0.1):
        return "steeper"
    return "as steep" if found.slope <= paper + max(found.half, 0.1) else "less steep"


@dataclasses.dataclass(frozen=True)
class Rung:
    """All runs of one claim at one ε.

    Attributes:
        claim: which.
        epsilon: ε.
        runs: one a seed.
    """

    claim: Claim
    epsilon: float
    runs: tuple[Spent, ...]

    @property
    def reached(self) -> bool:
        """Whether all runs got there."""
        return all(run.costs for run in self.runs)

    @property
    def setting(self) -> Setting:
        """The method for this ε."""
        return self.claim.setting(FIRST / self.epsilon)

    def cost(self, name: str) -> float:
        """The geometric mean over seeds."""
        return float(np.exp(np.mean([math.log(run.costs[name]) for run in self.runs])))

    def bounded(self, name: str) -> float:
        """The part of a cost that the paper gives an exponent for: of Hv without the factor Q ~ log(1/ε)."""
        series = name == "Hv" and self.claim.lower == "local"
        return self.cost(name) / (getattr(self.setting.algorithm, "terms", 1) if series else 1)


def climb(claim: Claim, rungs: int, seeds: int) -> Iterator[Rung]:
    """A claim's rungs, from the largest ε to the smallest; ends at one that it does not reach."""
    known = Nonconvex.random(jr.key(3), clients=CLIENTS, dx=5, dy=5, lower=claim.lower)
    most = 500.0
    for number in range(rungs):
        r = 2.0**number
        rung = Rung(claim, FIRST / r, _runs(known, claim.setting(r), FIRST / r, seeds, math.ceil(most)))
        yield rung
        if not rung.reached:
            return
        most = (PATIENCE * max(run.steps for run in rung.runs) if number == 0 else most) * 2**-claim.rounds


def _runs(known: Nonconvex, setting: Setting, epsilon: float, seeds: int, most: int) -> tuple[Spent, ...]:
    """One run a seed, up to the first that does not get there."""
    runs: list[Spent] = []
    while len(runs) < seeds and all(run.costs for run in runs):
        runs.append(spend(known, setting, epsilon, len(runs), most))
    return tuple(runs)
