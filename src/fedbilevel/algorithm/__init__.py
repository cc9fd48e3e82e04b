"""Methods, one file each."""

from fedbilevel.algorithm.base import Algorithm
from fedbilevel.algorithm.baseline.commfedbio import CommFedBiO
from fedbilevel.algorithm.baseline.fedavg import FedAvg, FedAvgS
from fedbilevel.algorithm.baseline.pooled import MRBO, StocBiO
from fedbilevel.algorithm.baseline.qffl import QFFL
from fedbilevel.algorithm.fedbio import FedBiO, FedBiOLocal
from fedbilevel.algorithm.fedbioacc import FedBiOAcc, FedBiOAccLocal
from fedbilevel.algorithm.fednest import FedNest, FedNestSGD, LFedNest, LFedNestNonAlt, LFedNestSVRG
from fedbilevel.algorithm.iterated import ITD
from fedbilevel.algorithm.pdbo import PDBO
from fedbilevel.algorithm.sgp import SGP

__all__ = [
    "ITD",
    "MRBO",
    "PDBO",
    "QFFL",
    "SGP",
    "Algorithm",
    "CommFedBiO",
    "FedAvg",
    "FedAvgS",
    "FedBiO",
    "FedBiOAcc",
    "FedBiOAccLocal",
    "FedBiOLocal",
    "FedNest",
    "FedNestSGD",
    "LFedNest",
    "LFedNestNonAlt",
    "LFedNestSVRG",
    "StocBiO",
]
