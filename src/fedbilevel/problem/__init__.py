"""What is solved."""

from fedbilevel.problem.base import Problem, ProblemError, compositional, minimax, single_level
from fedbilevel.problem.classification import Classification
from fedbilevel.problem.cleaning import DataCleaning
from fedbilevel.problem.cnn4 import FourLayerCNN
from fedbilevel.problem.constraint import Box, Positive, Simplex
from fedbilevel.problem.convolution import ConvNet, TwoLayerCNN
from fedbilevel.problem.fairness import AgnosticClients, FairClients
from fedbilevel.problem.few_shot import FewShot
from fedbilevel.problem.loss_tuning import LossTuning, class_weights
from fedbilevel.problem.mobilenet import MobileNetV2
from fedbilevel.problem.model import MLP, Linear, Model
from fedbilevel.problem.nonconvex import Nonconvex
from fedbilevel.problem.oracle import Client
from fedbilevel.problem.personal import (
    ClassWeights,
    Interpolation,
    Mixture,
    PersonalLayers,
    WeightedMixture,
)
from fedbilevel.problem.quadratic import Quadratic
from fedbilevel.problem.recurrent import CharLSTM
from fedbilevel.problem.representation import HyperRepresentation
from fedbilevel.problem.resnet import ResNet, ResNet18
from fedbilevel.problem.server_model import ServerModel
from fedbilevel.problem.sliced_mlp import SlicedMLP
from fedbilevel.problem.structured import Composition, Saddle
from fedbilevel.problem.submodel import Kernels, Sliceable

__all__ = [
    "MLP",
    "AgnosticClients",
    "Box",
    "CharLSTM",
    "ClassWeights",
    "Classification",
    "Client",
    "Composition",
    "ConvNet",
    "DataCleaning",
    "FairClients",
    "FewShot",
    "FourLayerCNN",
    "HyperRepresentation",
    "Interpolation",
    "Kernels",
    "Linear",
    "LossTuning",
    "Mixture",
    "MobileNetV2",
    "Model",
    "Nonconvex",
    "PersonalLayers",
    "Positive",
    "Problem",
    "ProblemError",
    "Quadratic",
    "ResNet",
    "ResNet18",
    "Saddle",
    "ServerModel",
    "Simplex",
    "Sliceable",
    "SlicedMLP",
    "TwoLayerCNN",
    "WeightedMixture",
    "class_weights",
    "compositional",
    "minimax",
    "single_level",
]
