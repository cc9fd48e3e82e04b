"""Solvers of the adjoint system `H u = ∇_y f`: on the server, on a client, or between neighbours."""

from fedbilevel.adjoint.base import Adjoint, Solved
from fedbilevel.adjoint.cg import ConjugateGradients
from fedbilevel.adjoint.hypergradient import own_hypergradient
from fedbilevel.adjoint.neumann import Neumann
from fedbilevel.adjoint.push import HGP, VRHGP, Equilibrium, PushAdjoint, RecurrentBackpropagation

__all__ = [
    "HGP",
    "VRHGP",
    "Adjoint",
    "ConjugateGradients",
    "Equilibrium",
    "Neumann",
    "PushAdjoint",
    "RecurrentBackpropagation",
    "Solved",
    "own_hypergradient",
]
