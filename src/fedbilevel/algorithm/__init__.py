"""Methods, one file each."""

from fedbilevel.algorithm.base import Algorithm
from fedbilevel.algorithm.baseline.fedavg import FedAvg, FedAvgS
from fedbilevel.algorithm.fednest import FedNest, FedNestSGD, LFedNest, LFedNestNonAlt, LFedNestSVRG

__all__ = [
    "Algorithm",
    "FedAvg",
    "FedAvgS",
    "FedNest",
    "FedNestSGD",
    "LFedNest",
    "LFedNestNonAlt",
    "LFedNestSVRG",
]
