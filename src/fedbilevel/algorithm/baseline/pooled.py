"""Bilevel methods for one machine: the federated ones on a federation of a single client."""

from __future__ import annotations

from typing import Any

from fedbilevel.algorithm.base import decides
from fedbilevel.algorithm.fedbio import FedBiO
from fedbilevel.algorithm.fedbioacc import FedBiOAcc
from fedbilevel.algorithm.fednest import FedNest
from fedbilevel.schedule import Rate


@decides("inner", "outer", "alternate", "series")
def StocBiO(upper_lr: Rate, lower_lr: Rate, **options: Any) -> FedNest:
    """stocBiO: D SGD steps on y, a Neumann series with Q terms, one step on x.

    LFedNest with the truncated series is this method where there is one client, which has all data
    (partition `Iid(1)`); D is `lower_steps` or `lower_epochs`, Q is `terms`. With several clients it is what
    each would do by itself, averaged.

    Cost a step: D calls of g_y, one each of f_x, f_y and g_xy, Q − 1 of g_yy.

    Reference: K. Ji, J. Yang, Y. Liang, Bilevel optimization: convergence analysis and enhanced design,
    ICML 2021.
    """
    return FedNest(upper_lr, lower_lr, inner="sgd", outer="local", series="sum", **options)


@decides("lower", "upper", "terms", "sync_every")
def SOBA(upper_lr: Rate, lower_lr: Rate, adjoint_lr: Rate, **options: Any) -> FedBiO:
    """SOBA: one step on x, y and the adjoint u at once, all directions at the old point.

        y ← y − γ ∇_y g(x, y);   x ← x − η (∇_x f − J u);   u ← u − τ (H u − ∇_y f)

    FedBiO that averages after every step is this method where there is one client, which has all data
    (partition `Iid(1)`); with several it is SOBA on their mean, with their batches together.

    Cost a step: one call each of f_x, f_y, g_y, g_xy and g_yy.

    Reference: M. Dagréou, P. Ablin, S. Vaiter, T. Moreau, A framework for bilevel optimization that enables
    stochastic and global variance reduction algorithms, NeurIPS 2022.
    """
    return FedBiO(upper_lr, lower_lr, adjoint_lr, sync_every=1, lower="global", upper="shared", **options)


@decides("lower", "upper", "c_adjoint", "sync_every")
def MRBO(upper_lr: Rate, lower_lr: Rate, adjoint_lr: Rate, **options: Any) -> FedBiOAcc:
    """MRBO: self-correcting momenta of the lower gradient and of the Neumann hypergradient.

    FedBiOAcc with a local lower level that averages after every step is this method where there is one
    client, which has all data (partition `Iid(1)`).

    Cost a step: two calls each of g_y, f_x, f_y and g_xy, 2Q of g_yy.

    Reference: J. Yang, K. Ji, Y. Liang, Provably faster algorithms for bilevel optimization, NeurIPS 2021.
    """
    return FedBiOAcc(upper_lr, lower_lr, adjoint_lr, sync_every=1, lower="local", **options)
