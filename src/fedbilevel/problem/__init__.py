"""What is solved."""

from fedbilevel.problem.base import Problem, ProblemError, compositional, minimax, single_level
from fedbilevel.problem.constraint import Box, Positive, Simplex
from fedbilevel.problem.oracle import Client
from fedbilevel.problem.quadratic import Composition, Quadratic, Saddle

__all__ = [
    "Box",
    "Client",
    "Composition",
    "Positive",
    "Problem",
    "ProblemError",
    "Quadratic",
    "Saddle",
    "Simplex",
    "compositional",
    "minimax",
    "single_level",
]
