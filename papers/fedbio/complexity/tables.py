"""What a ladder took, and its exponents next to the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from ladder import Rung, fit, verdict
from rich import box
from rich.table import Table
from spending import COSTS
from theorems import Claim


def ladder_table(rungs: Sequence[Rung]) -> Table:
    """What every rung took."""
    table = Table(title="until the mean of ‖∇h(x)‖² is at most ε", box=box.SIMPLE)
    for title in ("method", "ε", "b", "b_y", "I", *COSTS, "floor/ε"):
        table.add_column(title, justify="left" if title == "method" else "right")
    for rung in rungs:
        setting = rung.setting
        costs = [f"{rung.cost(name):,.0f}" if rung.reached else "-" for name in COSTS]
        period: Any = getattr(setting.algorithm, "sync_every", "")
        sizes = [str(size) for size in (setting.batch, setting.lower_batch, period)]
        floor = np.mean([run.floor for run in rung.runs])
        table.add_row(rung.claim.name, f"{rung.epsilon:.4g}", *sizes, *costs, f"{floor:.2f}")
    return table


def slope_table(rungs: Sequence[Rung]) -> Table:
    """Fitted exponents of ε, and the paper's below."""
    table = Table(title="exponents of ε, fitted ± 95 % confidence", box=box.SIMPLE)
    for title in ("method", *COSTS, "verdict"):
        table.add_column(title, justify="left" if title in ("method", "verdict") else "right")
    for claim in dict.fromkeys(rung.claim for rung in rungs):
        own = [rung for rung in rungs if rung.claim is claim]
        table.add_row(claim.name, *_slopes(claim, own))
        if claim.theorem is not None:
            paper = (f"{claim.exponent(cost):.2f}" for cost in COSTS)
            table.add_row(f"  theorem {claim.theorem}", *paper, "")
    return table


def _slopes(claim: Claim, own: Sequence[Rung]) -> list[str]:
    """The fitted exponents of one claim, and what they say of it."""
    if not all(rung.reached for rung in own):
        return [*("-" for _ in COSTS), f"does not reach {own[-1].epsilon:.4g} in time"]
    found = [fit([rung.epsilon for rung in own], [rung.bounded(cost) for rung in own]) for cost in COSTS]
    verdicts = dict.fromkeys(verdict(*pair) for pair in zip(found, map(claim.exponent, COSTS), strict=True))
    return [*map(str, found), ", ".join(verdicts)]
