"""FedNest's relatives: the same method with some settings decided."""

from __future__ import annotations

from typing import Any

from fedbilevel.algorithm.base import decides
from fedbilevel.algorithm.fednest import FedNest
from fedbilevel.schedule import Rate


@decides("inner")
def FedNestSGD(upper_lr: Rate, lower_lr: Rate, **options: Any) -> FedNest:
    """FedNest with plain local SGD on y, which is biased by the clients' drift where they differ.

    Cost a step and client: `T + N' + 3` exchanges, `2d_x + (T + N' + 2)d_y` scalars down and
    `2d_x + (T + N' + 1)d_y` up.

    Reference: FedNest, section 4.1.
    """
    return FedNest(upper_lr, lower_lr, inner="sgd", **options)


@decides("series", "outer", "alternate", "residual")
def FedMBO(upper_lr: Rate, lower_lr: Rate, **options: Any) -> FedNest:
    """FedNest with |S| chains of single clients' Hessians in the place of one product of mean Hessians.

        h = mean_c (∇_x f_c − J_c u_c),   u_c = (N/ℓ) Π_{n≤N'_c} (I − H_{i_n}/ℓ) ∇_y f_{i_0}

    Each client c of the cohort S has a chain with its own N'_c, uniform in {0..N−1}, and its own random
    clients i_0, i_1, ..., one a factor. Where clients weigh the same, the mean of h is that of FedNest's.
    (With weights ℓ is multiplied by the largest weight over the mean one, and as many terms keep less of the
    indirect part.) The noise of N' is averaged over |S| draws, and falls with |S|, where FedNest's one draw
    serves all clients; but factors of single clients are noisier than means. ℓ must bound every client's own
    Hessian. With `inner="sgd"` and one local step a
    round on y is a step of minibatch descent, in one exchange.

    A client that does not answer leaves a factor out, which the chain gets later if other chains go on:
    where many clients are silent, the indirect part of h is too large.

    Cost a step and client, everyone in the cohort: FedNest's with M = max N'_c in the place of N', so
    `2T + M + 3` exchanges, `2d_x + (2T + M + 2)d_y` scalars down, `2d_x + (2T + M + 1)d_y` up, M calls of
    g_yy (chains that have ended travel with the others).

    Reference: M. Huang, D. Zhang, K. Ji, Achieving linear speedup in non-iid federated bilevel learning,
    ICML 2023.
    """
    return FedNest(upper_lr, lower_lr, series="chains", **options)


@decides("inner", "outer")
def LFedNest(upper_lr: Rate, lower_lr: Rate, **options: Any) -> FedNest:
    """FedNest with the clients' own hypergradients and no anchors.

    Its limit is a stationary point of the mean of the clients' own problems, which is another point
    than the solution when the clients differ.

    Cost a step and client: `T + 1` exchanges, `d_x + (T + 1)d_y` scalars down and `d_x + T d_y` up.

    Reference: FedNest, algorithms 5 and 6.
    """
    return FedNest(upper_lr, lower_lr, inner="sgd", outer="local", **options)


@decides("inner", "outer")
def LFedNestSVRG(upper_lr: Rate, lower_lr: Rate, **options: Any) -> FedNest:
    """LFedNest with anchored steps on y.

    Cost a step and client: `2T + 1` exchanges, `d_x + (2T + 1)d_y` scalars down and `d_x + 2T d_y` up.

    Reference: FedNest, appendix H.
    """
    return FedNest(upper_lr, lower_lr, inner="svrg", outer="local", **options)


@decides("inner", "outer", "alternate")
def LFedNestNonAlt(upper_lr: Rate, lower_lr: Rate, **options: Any) -> FedNest:
    """LFedNest that averages x and y at the end only: every client steps on its own y, then on its own x.

    Cost a step and client: 1 exchange, `d_x + d_y` scalars each way.

    Reference: FedNest, appendix H.1.
    """
    return FedNest(upper_lr, lower_lr, inner="sgd", outer="local", alternate=False, **options)
