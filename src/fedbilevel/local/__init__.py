"""Local programs: what clients compute between exchanges."""

from fedbilevel.local.descent import Both, Descent, HyperDescent
from fedbilevel.local.gradients import Assemble, Curvature, LowerGradient, OwnHypergradient, UpperGradient
from fedbilevel.local.work import Amount, Work

__all__ = [
    "Amount",
    "Assemble",
    "Both",
    "Curvature",
    "Descent",
    "HyperDescent",
    "LowerGradient",
    "OwnHypergradient",
    "UpperGradient",
    "Work",
]
