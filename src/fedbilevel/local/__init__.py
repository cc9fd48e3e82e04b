"""Local programs: what clients compute between exchanges."""

from fedbilevel.local.descent import Both, Descent, HyperDescent
from fedbilevel.local.gradients import Assemble, Curvature, LowerGradient, OwnHypergradient, UpperGradient
from fedbilevel.local.optimizer import SGD, Adam, Optimizer, PerBlock
from fedbilevel.local.work import Amount, Work

__all__ = [
    "SGD",
    "Adam",
    "Amount",
    "Assemble",
    "Both",
    "Curvature",
    "Descent",
    "HyperDescent",
    "LowerGradient",
    "Optimizer",
    "OwnHypergradient",
    "PerBlock",
    "UpperGradient",
    "Work",
]
