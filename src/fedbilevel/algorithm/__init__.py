"""Methods, one file each."""

from fedbilevel.algorithm.aggitd import AggITD
from fedbilevel.algorithm.base import Algorithm, CannotRunError, TwoVariables, Variables
from fedbilevel.algorithm.baseline.clustered import ClusteredFL
from fedbilevel.algorithm.baseline.commfedbio import CommFedBiO
from fedbilevel.algorithm.baseline.compressed import CompressedFedAvg, FetchSGD
from fedbilevel.algorithm.baseline.distillation import DSFL, Distillation, FedDF, FedET
from fedbilevel.algorithm.baseline.fedavg import FedAvg, FedAvgS
from fedbilevel.algorithm.baseline.fedavg_plus import FedAvgPlus
from fedbilevel.algorithm.baseline.fedem import FedEM
from fedbilevel.algorithm.baseline.fedprox import FedProx
from fedbilevel.algorithm.baseline.heterogeneous import (
    FedDST,
    FederatedDropout,
    FedRolex,
    Flash,
    HeteroFL,
    Heterogeneous,
    Homogeneous,
    ZeroFL,
)
from fedbilevel.algorithm.baseline.local import Local
from fedbilevel.algorithm.baseline.pfedme import PFedMe
from fedbilevel.algorithm.baseline.pooled import MRBO, SOBA, StocBiO
from fedbilevel.algorithm.baseline.qffl import QFFL
from fedbilevel.algorithm.dsoba import DSOBA
from fedbilevel.algorithm.f2sa import F2SA
from fedbilevel.algorithm.fedbio import FedBiO, FedBiOLocal
from fedbilevel.algorithm.fedbioacc import FedBiOAcc, FedBiOAccLocal
from fedbilevel.algorithm.fedgda import FedGDAGT
from fedbilevel.algorithm.fedmsa import FedMSA
from fedbilevel.algorithm.fednest import FedNest
from fedbilevel.algorithm.fednest_family import FedMBO, FedNestSGD, LFedNest, LFedNestNonAlt, LFedNestSVRG
from fedbilevel.algorithm.fedsep import FedSep
from fedbilevel.algorithm.iterated import ITD
from fedbilevel.algorithm.madsbo import MADSBO
from fedbilevel.algorithm.pdbo import PDBO
from fedbilevel.algorithm.sgp import SGP
from fedbilevel.algorithm.simfbo import ShroFBO, SimFBO

__all__ = [
    "DSFL",
    "DSOBA",
    "F2SA",
    "ITD",
    "MADSBO",
    "MRBO",
    "PDBO",
    "QFFL",
    "SGP",
    "SOBA",
    "AggITD",
    "Algorithm",
    "CannotRunError",
    "ClusteredFL",
    "CommFedBiO",
    "CompressedFedAvg",
    "Distillation",
    "FedAvg",
    "FedAvgPlus",
    "FedAvgS",
    "FedBiO",
    "FedBiOAcc",
    "FedBiOAccLocal",
    "FedBiOLocal",
    "FedDF",
    "FedDST",
    "FedEM",
    "FedET",
    "FedGDAGT",
    "FedMBO",
    "FedMSA",
    "FedNest",
    "FedNestSGD",
    "FedProx",
    "FedRolex",
    "FedSep",
    "FederatedDropout",
    "FetchSGD",
    "Flash",
    "HeteroFL",
    "Heterogeneous",
    "Homogeneous",
    "LFedNest",
    "LFedNestNonAlt",
    "LFedNestSVRG",
    "Local",
    "PFedMe",
    "ShroFBO",
    "SimFBO",
    "StocBiO",
    "TwoVariables",
    "Variables",
    "ZeroFL",
]
