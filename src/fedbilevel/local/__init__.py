"""Local programs: what clients compute between exchanges."""

from fedbilevel.local.count_sketch import CountSketch, SparseJL
from fedbilevel.local.decode import Decoded, Decoder, EachDecoder, GradientDecoder
from fedbilevel.local.descent import Both, Descent, HyperDescent
from fedbilevel.local.gradients import Assemble, Curvature, LowerGradient, OwnHypergradient, UpperGradient
from fedbilevel.local.optimizer import SGD, Adam, Optimizer, PerBlock
from fedbilevel.local.sketch import SRHT, Gaussian
from fedbilevel.local.sketch_decoder import LinearSketch, SketchLasso
from fedbilevel.local.submodel import Submodel
from fedbilevel.local.work import Amount, Work

__all__ = [
    "SGD",
    "SRHT",
    "Adam",
    "Amount",
    "Assemble",
    "Both",
    "CountSketch",
    "Curvature",
    "Decoded",
    "Decoder",
    "Descent",
    "EachDecoder",
    "Gaussian",
    "GradientDecoder",
    "HyperDescent",
    "LinearSketch",
    "LowerGradient",
    "Optimizer",
    "OwnHypergradient",
    "PerBlock",
    "SketchLasso",
    "SparseJL",
    "Submodel",
    "UpperGradient",
    "Work",
]
