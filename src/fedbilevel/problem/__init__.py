"""What is solved."""

from fedbilevel.problem.base import Problem, ProblemError, compositional, minimax, single_level
from fedbilevel.problem.cleaning import DataCleaning
from fedbilevel.problem.constraint import Box, Positive, Simplex
from fedbilevel.problem.convolution import ConvNet
from fedbilevel.problem.fairness import AgnosticClients, FairClients
from fedbilevel.problem.few_shot import FewShot
from fedbilevel.problem.loss_tuning import LossTuning, class_weights
from fedbilevel.problem.model import MLP, Linear, Model
from fedbilevel.problem.oracle import Client
from fedbilevel.problem.quadratic import Composition, Quadratic, Saddle
from fedbilevel.problem.representation import HyperRepresentation

__all__ = [
    "MLP",
    "AgnosticClients",
    "Box",
    "Client",
    "Composition",
    "ConvNet",
    "DataCleaning",
    "FairClients",
    "FewShot",
    "HyperRepresentation",
    "Linear",
    "LossTuning",
    "Model",
    "Positive",
    "Problem",
    "ProblemError",
    "Quadratic",
    "Saddle",
    "Simplex",
    "class_weights",
    "compositional",
    "minimax",
    "single_level",
]
