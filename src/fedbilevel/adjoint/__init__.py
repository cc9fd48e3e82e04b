"""Solvers of the adjoint system `H u = ∇_y f`, usable on the server and on a client alike."""

from fedbilevel.adjoint.base import Adjoint, Solved
from fedbilevel.adjoint.cg import ConjugateGradients
from fedbilevel.adjoint.hypergradient import own_hypergradient
from fedbilevel.adjoint.neumann import Neumann
from fedbilevel.adjoint.one_step import OneStep

__all__ = ["Adjoint", "ConjugateGradients", "Neumann", "OneStep", "Solved", "own_hypergradient"]
