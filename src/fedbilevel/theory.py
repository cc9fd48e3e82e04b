"""What the theorems of PDBO promise: how far the estimates of HGP and VR-HGP are from the hypergradient.

(VR-)HGP estimates `B̄(I − Ā)⁻¹c + c^λ` from random Â and B̂ with the means Ā and B̄:

    v ← α(v + B̂u) + (1 − α)B̂w,    u ← Âu,    w ← β(Âw + c) + (1 − β)(w + u)        v = 0, w = u = c at first

and (α, β) = (1, 0) is HGP. Notation of the paper: n nodes; `c = c^y = ∂_y F̄`; `p̄_ij` the mean weight that
node i sends to j; `δ̄_{i→j}` how often the edge is there; b samples in a minibatch; `κ = Σ_ij p̄_ji/δ̄_{i→j}`.

The theorems need (assumption 8) that the derivatives of φ_i and ψ_i in y_i are at most `η_A/2κ`, those in λ_i
at most `η_B/2κ`. Then all ‖Â‖ ≤ η_A < 1 and ‖B̂‖ ≤ η_B. Stochastic gradient push does not fulfil this: as
`κ ≥ n`, the derivative of `φ = identity` (equation 4b) is too large, and so is that of the push-sum weight
(4a and 4b). There these numbers compare choices of (α, β); they are no guarantee.

Reference: N. Terashita, S. Hara, Personalized Decentralized Bilevel Optimization over Random Directed
Networks, arXiv:2210.02129, 2022.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = Any
"""A float, or an array of floats where an argument was one."""


def vr_hgp_factor(alpha: npt.ArrayLike, beta: npt.ArrayLike, eta: npt.ArrayLike) -> Numbers:
    """`μ_{α,β}(η)`, to which the error of VR-HGP is proportional after many rounds. It is μ, not its square.

        μ_{α,β}² = 8 (1−α)/(1+α) [1 + (1+αr)/(1−αr) · β²η²/(1−r²)],    r = 1 − β + βη        α < 1, β > 0
        μ_{1,β}² = 8 (η² + (1−η)²)/(1−η²)                                                    HGP

    With `α = 1` the estimate never reads w: it is HGP for every β, although the first line tends to 0. With
    `β = 0` and `α < 1` w keeps the error of its first rounds for ever, although the first line has a limit:
    there is no theorem, and the factor is infinite. It is also infinite at `η = 1`.

    The factor is exact for small noise: if Â and B̂ are numbers with means η and η_B and a small relative
    deviation s, the error's root mean square tends to `s |c| η_B/(1−η) · μ/√8`.

    Args:
        alpha: α in [0, 1], how much v remembers; broadcast with the others.
        beta: β in [0, 1], how much of w starts afresh from c.
        eta: η_A in [0, 1], the contraction of A.

    Reference: theorem 1 (α, β in (0, 1); its proof also holds at α = 0 and β = 1), theorem 10, figure 1.

    >>> [round(float(vr_hgp_factor(alpha, beta, 0.5)), 3) for alpha, beta in [(1, 0), (0.9, 0.1)]]
    [2.309, 0.748]
    """
    alpha, beta, eta = _unit("alpha", alpha), _unit("beta", beta), _unit("eta", eta)
    r = 1 - beta + beta * eta
    # What the masks below throw away may divide by zero.
    with np.errstate(divide="ignore", invalid="ignore"):
        hgp = (eta**2 + (1 - eta) ** 2) / (1 - eta**2)
        fresh = beta * eta**2 / ((1 - eta) * (1 + r))  # β²η²/(1−r²), as 1 − r = β(1 − η)
        reduced = (1 - alpha) / (1 + alpha) * (1 + (1 + alpha * r) / (1 - alpha * r) * fresh)
    no_theorem = (beta == 0) | (eta == 1)
    return np.sqrt(8 * np.where(alpha == 1, hgp, np.where(no_theorem, np.inf, reduced)))


def hgp_error_bound(
    alpha: npt.ArrayLike,
    beta: npt.ArrayLike,
    *,
    eta_a: float,
    eta_b: float,
    c_norm: float,
    weights: npt.ArrayLike,
    frequencies: npt.ArrayLike,
    batch_size: float,
    d_y: int,
    d_lambda: int,
    epsilon: float,
    rounds: int | None = None,
) -> Numbers:
    """How far VR-HGP's estimate is from the hypergradient, with probability `1 − ε` at least.

        μ τ √[(Σ_ij p̄_ji²/δ̄_{i→j}² + 4n/b) log(n(d_y + d_λ)/ε)] + rest,    τ = η_B ‖c^y‖ / (κ(1 − η_A))

    Without `rounds`, μ is `vr_hgp_factor` and the rest, `exp(−O(M))`, is left out, as M is large. The theorem
    does not say what the rest is. With `rounds` this is what its proof comes to before it is simplified: the
    norms of lemma 6 summed as they are, and `‖B̄ Σ_{i≥M} Āⁱ c‖ ≤ η_B ‖c‖ η_A^M/(1 − η_A)`. That is a bound
    after M rounds for every (α, β) in the closed square.

    Args:
        alpha: α in [0, 1].
        beta: β in [0, 1].
        eta_a: η_A in [0, 1), see assumption 8 above.
        eta_b: η_B, the same for B.
        c_norm: ‖c^y‖, of all nodes together.
        weights: p̄, (n, n): row i is what node i sends, and sums to one.
        frequencies: δ̄, (n, n): entry (i, j) is how often the edge from i to j is there.
        batch_size: b; `inf`: the derivatives have no noise of sampling.
        d_y: size of one node's y (parameters and push-sum weight).
        d_lambda: size of one node's λ.
        epsilon: ε in (0, 1].
        rounds: M, updates of v; None: infinitely many.

    Reference: theorems 1, 8 and 10, lemmas 5 to 7. (Theorem 8's proof lost the log of Azuma's inequality.)

    >>> network = dict(weights=np.full((3, 3), 1 / 3), frequencies=0.6 + 0.4 * np.eye(3), batch_size=np.inf)
    >>> rest = dict(eta_a=0.5, eta_b=1.0, c_norm=1.0, d_y=3, d_lambda=1, epsilon=0.1)
    >>> [round(float(hgp_error_bound(0.9, 0.1, rounds=m, **network, **rest)), 2) for m in (10, 100, None)]
    [2.62, 1.12, 1.12]
    """
    alpha, beta = _unit("alpha", alpha), _unit("beta", beta)
    scale = _resolvent(eta_a) * _not_negative("eta_b", eta_b) * _not_negative("c_norm", c_norm)
    ratios = _debiased(weights, frequencies)
    noise = np.sum(ratios**2) + 4 * len(ratios) / _at_least_one("batch_size", batch_size)
    size = len(ratios) * (_at_least_one("d_y", d_y) + _at_least_one("d_lambda", d_lambda))
    spread = scale / np.sum(ratios) * np.sqrt(noise * np.log(size / _probability(epsilon)))
    if rounds is None:
        return vr_hgp_factor(alpha, beta, eta_a) * spread
    factor = _factor_after(alpha, beta, eta_a, int(_at_least_one("rounds", rounds)))
    return factor * spread + scale * eta_a**rounds


def stationary_bias_bound(
    *, eta_a: float, eta_b: float, c_norm: float, l_y: float, l_lambda: float, distances: npt.ArrayLike
) -> float:
    """What to add to `hgp_error_bound` where the nodes are at `y_i^(T)` and not at the fixed point `y_i*`.

        η_B ‖c^y‖ / (1 − η_A) · (L_λ + L_y/(1 − η_A)) · G,        G = max(n, 2) Σ_i ‖y_i* − y_i^(T)‖

    It bounds `‖B̃(I − Ã)⁻¹c − B̄(I − Ā)⁻¹c‖`, so it holds for every (α, β). Where c and `c^λ` themselves are
    evaluated at y^(T), their own change comes on top; the theorem does not count it either.

    **Erratum.** Theorem 11 prints `L_y` where `L_y/(1 − η_A)` stands here. With `r = 1 − β + βη_A` the sum in
    its proof is `(1−α)β/(α−r) · Σ_k (α^k − r^k) → (1−α)β/((1−α)(1−r)) = 1/(1 − η_A)`, not 1. It also has n
    for `max(n, 2)`: a lone node's A moves by up to `2L_y‖y* − y^(T)‖`, as both φ and ψ change. With one node,
    A = 0.89 at y*, A = 0.9 at y^(T) and L_y‖y* − y^(T)‖ = 0.01 the estimate moves by 0.91 η_B|c|, while the
    printed bound is 0.1 η_B|c|. With more nodes assumption 8 makes A so small (‖Ā‖ ≤ η_A(1 + √n)/2n) that it
    does not show; where η_A is just the contraction of A, it does.

    Args:
        eta_a: η_A in [0, 1).
        eta_b: η_B.
        c_norm: ‖c^y‖, of all nodes together.
        l_y: L_y, Lipschitz constant in y_i of the derivatives of φ_i and of ψ_i in y_i.
        l_lambda: L_λ; `η_B L_λ` is that of their derivatives in λ_i.
        distances: ‖y_i* − y_i^(T)‖ of every node, (n,).

    Reference: theorem 11 and assumption 10, corrected.

    >>> known = dict(eta_a=0.5, eta_b=1.0, c_norm=1.0, l_y=2.0, l_lambda=1.0)
    >>> float(round(stationary_bias_bound(distances=[0.01, 0.02, 0.0], **known), 3))
    0.9
    """
    apart = np.atleast_1d(_not_negative("distances", distances))
    inverse = _resolvent(eta_a)
    moved = _not_negative("l_lambda", l_lambda) + inverse * _not_negative("l_y", l_y)
    scale = inverse * _not_negative("eta_b", eta_b) * _not_negative("c_norm", c_norm)
    return float(scale * moved * max(len(apart), 2) * np.sum(apart))


def _factor_after(alpha: Numbers, beta: Numbers, eta: float, rounds: int) -> Numbers:
    """μ after M rounds. The noise of round i reaches v through these norms, k rounds later (k = M − 1 − i):

    * that of B̂: `‖R₃‖ ≤ α^{k+1} ηⁱ + (1−α) α^k S`, with `S = Σ_{j≤i} ηʲ ≥ ‖R₁‖`;
    * that of Â: `‖L₄‖ηⁱ + ‖L₅‖S`, where L₄ (through u) and L₅ (through w) grow as VR-HGP's own v does.
    """
    r = 1 - beta + beta * eta
    through_u = through_w = summed = total = np.zeros(np.broadcast_shapes(np.shape(alpha), np.shape(beta)))
    for k in range(rounds):
        i = rounds - 1 - k
        partial = (1 - eta ** (i + 1)) / (1 - eta)
        from_b = alpha ** (k + 1) * eta**i + (1 - alpha) * alpha**k * partial
        from_a = eta * (through_u * eta**i + through_w * partial)
        total = total + from_b**2 + from_a**2
        summed = r * summed + eta**k
        through_u = alpha * (through_u + eta**k) + (1 - alpha) * (1 - beta) * summed
        through_w = alpha * through_w + (1 - alpha) * beta * r**k
    return (1 - eta) * np.sqrt(8 * total)


def _debiased(weights: npt.ArrayLike, frequencies: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """`p̄_ij/δ̄_{j→i}`: by what node i multiplies what it hears from j; 0 where they share no edge."""
    sent, heard = _unit("weights", weights), _unit("frequencies", frequencies).T
    if sent.ndim != 2 or sent.shape != (len(sent), len(sent)) or heard.shape != sent.shape:
        raise ValueError(f"weights {sent.shape} and frequencies {heard.shape} must be (n, n), for n nodes")
    if not np.allclose(sent.sum(1), 1):
        raise ValueError(f"the rows of weights sum to {sent.sum(1)}; what a node sends must sum to one")
    for i, j in np.argwhere((sent > 0) & (heard == 0))[:1]:
        raise ValueError(
            f"node {i} sends to {j} but never hears from it; HGP needs an edge back (assumption 6). Add one"
        )
    return np.divide(sent, heard, out=np.zeros_like(sent), where=sent > 0)


def _resolvent(eta_a: float) -> float:
    """`1/(1 − η_A)`, which bounds `‖(I − A)⁻¹‖`."""
    if not 0 <= eta_a < 1:
        raise ValueError(f"eta_a is {eta_a}; it must lie in [0, 1): the theorems need a contraction")
    return 1 / (1 - eta_a)


def _probability(epsilon: float) -> float:
    if not 0 < epsilon <= 1:
        raise ValueError(f"epsilon is {epsilon}; it is the probability to fail, and must lie in (0, 1]")
    return epsilon


def _unit(name: str, value: npt.ArrayLike) -> npt.NDArray[np.float64]:
    array = np.asarray(value, np.float64)
    if not np.all((array >= 0) & (array <= 1)):
        raise ValueError(f"{name} is {array}; it must lie in [0, 1]")
    return array


def _not_negative(name: str, value: npt.ArrayLike) -> npt.NDArray[np.float64]:
    array = np.asarray(value, np.float64)
    if not np.all((array >= 0) & np.isfinite(array)):
        raise ValueError(f"{name} is {array}; it must be a finite number, and not negative")
    return array


def _at_least_one(name: str, value: float) -> float:
    if not value >= 1:
        raise ValueError(f"{name} is {value}; it must be at least one")
    return value
