"""Federated bilevel optimisation in JAX, with an exact account of what it costs.

A run is one call:

    result = fb.solve(problem, clients, fb.FedNest(upper_lr=0.1, lower_lr=0.1), steps=200)
    result.x, result.y, result.history, result.ledger
"""

from fedbilevel import adjoint, algorithm, data, engine, fed, local, problem, tree
from fedbilevel.algorithm import (
    MRBO,
    QFFL,
    CommFedBiO,
    FedAvg,
    FedAvgS,
    FedBiO,
    FedBiOAcc,
    FedBiOAccLocal,
    FedBiOLocal,
    FedNest,
    FedNestSGD,
    LFedNest,
    LFedNestNonAlt,
    LFedNestSVRG,
    StocBiO,
)
from fedbilevel.data import Clients
from fedbilevel.engine import Process, Simulator, simulate
from fedbilevel.experiment import Best, Diagnosis, Job, Result, diagnose, load, solve, sweep
from fedbilevel.fed import Ledger
from fedbilevel.problem import (
    MLP,
    AgnosticClients,
    Box,
    Composition,
    ConvNet,
    DataCleaning,
    FairClients,
    FewShot,
    HyperRepresentation,
    Linear,
    LossTuning,
    Positive,
    Problem,
    Quadratic,
    Saddle,
    Simplex,
    compositional,
    minimax,
    single_level,
)

__version__ = "0.1.0"

__all__ = [
    "MLP",
    "MRBO",
    "QFFL",
    "AgnosticClients",
    "Best",
    "Box",
    "Clients",
    "CommFedBiO",
    "Composition",
    "ConvNet",
    "DataCleaning",
    "Diagnosis",
    "FairClients",
    "FedAvg",
    "FedAvgS",
    "FedBiO",
    "FedBiOAcc",
    "FedBiOAccLocal",
    "FedBiOLocal",
    "FedNest",
    "FedNestSGD",
    "FewShot",
    "HyperRepresentation",
    "Job",
    "LFedNest",
    "LFedNestNonAlt",
    "LFedNestSVRG",
    "Ledger",
    "Linear",
    "LossTuning",
    "Positive",
    "Problem",
    "Process",
    "Quadratic",
    "Result",
    "Saddle",
    "Simplex",
    "Simulator",
    "StocBiO",
    "adjoint",
    "algorithm",
    "compositional",
    "data",
    "diagnose",
    "engine",
    "fed",
    "load",
    "local",
    "minimax",
    "problem",
    "simulate",
    "single_level",
    "solve",
    "sweep",
    "tree",
]
