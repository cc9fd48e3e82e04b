"""What the theorems prescribe: a method for every ε."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import fedbilevel as fb
from fedbilevel.algorithm.base import Algorithm


class Setting(NamedTuple):
    """A method with all that depends on ε decided.

    Attributes:
        algorithm: the method.
        batch: b, samples in a minibatch of the upper level.
        lower_batch: of the lower level.
        first_batch: of the first momenta.
    """

    algorithm: Algorithm[Any]
    batch: int
    lower_batch: int
    first_batch: int = 0


@dataclasses.dataclass(frozen=True)
class Claim:
    """What the paper says of a method.

    Attributes:
        name: of the method.
        lower: whose lower level is, "global" or "local".
        setting: from `r = ε₁/ε`, how much smaller ε is than on the first rung, to the method for that ε.
        rounds, samples: the paper's exponents of ε, of communication and of derivatives.
        theorem: its number; None: the paper does not claim this.
    """

    name: str
    lower: str
    setting: Callable[[float], Setting]
    rounds: float
    samples: float
    theorem: int | None

    def exponent(self, cost: str) -> float:
        """The paper's, of one of `COSTS`."""
        return self.rounds if cost == "rounds" else self.samples


def fedbio(r: float, adjoint_power: float = -0.5) -> Setting:
    """Theorem 1: b ~ 1/ε, I constant, γ and η ~ T^(-1/3) ~ ε^(1/2); τ likewise, or constant with power 0."""
    rates = (0.2 * r**-0.5, 0.2 * r**-0.5, 0.2 * r**adjoint_power)
    batch = math.ceil(4 * r)
    return Setting(fb.FedBiO(*rates, sync_every=4), batch, batch)


def unchanged(r: float) -> Setting:
    """No theorem: b ~ 1/ε as for FedBiO, but the step sizes stay what they are."""
    return fedbio(r)._replace(algorithm=fedbio(1.0).algorithm)


def fedbio_local(r: float) -> Setting:
    """Theorem 3: b ~ 1/ε and M times that below, I constant, η ~ ε^(1/2), γ constant, Q ~ log(1/ε)."""
    batch = math.ceil(4 * r)
    method = fb.FedBiOLocal(0.2 * r**-0.5, 0.2, ADJOINT, sync_every=4, terms=terms(r))
    return Setting(method, batch, CLIENTS * batch)


def fedbioacc(r: float) -> Setting:
    """Theorem 2 with b ~ ε^(-1/2): I constant; see `momenta`."""
    batch = math.ceil(4 * r**0.5)
    rule = momenta(batch, batch, 4)
    return Setting(fb.FedBiOAcc(0.3, 0.3, 0.3, **rule), batch, batch, rule["first_batch"])


def fedbioacc_small(r: float) -> Setting:
    """Theorem 2 with b constant: I ~ ε^(-1/3)."""
    rule = momenta(4, 4, round(4 * r ** (1 / 3)))
    return Setting(fb.FedBiOAcc(0.3, 0.3, 0.3, **rule), 4, 4, rule["first_batch"])


def fedbioacc_local(r: float, more: int | None = None) -> Setting:
    """Theorem 4 with b ~ ε^(-1/2): I constant, Q ~ log(1/ε); batches below are M (or `more`) times b."""
    batch = math.ceil(4 * r**0.5)
    lower_batch = (CLIENTS if more is None else more) * batch
    rule = momenta(batch, lower_batch, 4)
    method = fb.FedBiOAccLocal(0.3, 0.3, ADJOINT, terms=terms(r), **rule)
    return Setting(method, batch, lower_batch, rule["first_batch"])


CLIENTS = 8
"""M."""

ADJOINT = 0.2
"""τ of the Neumann series, below `1/λ_max(H)` of most samples."""


def terms(r: float) -> int:
    """Q with `(1 − τμ)^Q ~ ε^(1/2)`, μ = 1."""
    return 5 + round(math.log(r) / (2 * ADJOINT))


def momenta(batch: int, lower_batch: int, period: int) -> dict[str, Any]:
    """Theorem 2: `δ ~ b^(2/3)`, `t₀ ~ b² I^(9/2)`, `c ~ 1/b`; `α_1 = 1` on the first rung.

    The first batch is I^(3/2) times as large as those after it.
    """
    grown, longer = batch / 4, period / 4
    decay = dict.fromkeys(("c_upper", "c_lower", "c_adjoint"), 1 / grown)
    rule = {"delta": 10 * grown ** (2 / 3), "t0": 1000.0 * grown**2 * longer**4.5}
    return {"sync_every": period, "first_batch": math.ceil(period**1.5 * lower_batch)} | rule | decay


CLAIMS = (
    Claim("FedBiO", "global", fedbio, -1.5, -2.5, 1),
    Claim("FedBiO, τ constant", "global", lambda r: fedbio(r, 0.0), -1.5, -2.5, 1),
    Claim("FedBiO, constant steps", "global", unchanged, -1.5, -2.5, None),
    Claim("FedBiOAcc, b grows", "global", fedbioacc, -1.0, -1.5, 2),
    Claim("FedBiOAcc, b constant", "global", fedbioacc_small, -7 / 6, -1.5, 2),
    Claim("FedBiO, local", "local", fedbio_local, -1.5, -2.5, 3),
    Claim("FedBiOAcc, local", "local", fedbioacc_local, -1.0, -1.5, 4),
    Claim("FedBiOAcc, local, b_y = b", "local", lambda r: fedbioacc_local(r, 1), -1.0, -1.5, None),
)
