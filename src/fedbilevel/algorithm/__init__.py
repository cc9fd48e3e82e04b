"""Methods, one file each."""

from fedbilevel.algorithm.base import Algorithm, CannotRunError
from fedbilevel.algorithm.baseline.clustered import ClusteredFL
from fedbilevel.algorithm.baseline.commfedbio import CommFedBiO
from fedbilevel.algorithm.baseline.fedavg import FedAvg, FedAvgS
from fedbilevel.algorithm.baseline.fedavg_plus import FedAvgPlus
from fedbilevel.algorithm.baseline.fedem import FedEM
from fedbilevel.algorithm.baseline.fedprox import FedProx
from fedbilevel.algorithm.baseline.local import Local
from fedbilevel.algorithm.baseline.pfedme import PFedMe
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
    "CannotRunError",
    "ClusteredFL",
    "CommFedBiO",
    "FedAvg",
    "FedAvgPlus",
    "FedAvgS",
    "FedBiO",
    "FedBiOAcc",
    "FedBiOAccLocal",
    "FedBiOLocal",
    "FedEM",
    "FedNest",
    "FedNestSGD",
    "FedProx",
    "LFedNest",
    "LFedNestNonAlt",
    "LFedNestSVRG",
    "Local",
    "PFedMe",
    "StocBiO",
]
