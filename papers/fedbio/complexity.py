"""FedBiO, table 1 and theorems 1 to 4: the exponents of its complexities, measured on a nonconvex problem.

For a ladder of ε every method runs with the batch size, period, number of terms and step sizes that its
theorem prescribes for that ε (constants are chosen once, for the first rung), until the mean of `‖∇h(x)‖²`
over its iterates is at most ε. Then `log cost = slope · log ε + constant` is fitted by least squares:

    python papers/fedbio/complexity.py              # five rungs, three seeds: six minutes of one core
    python papers/fedbio/complexity.py --rungs 3    # a shorter one

A theorem bounds the cost from above: a slope that is no steeper than the paper's agrees with it. As long as a
method gets there at all, its step sizes decide the slope; what is at stake is whether the noise and the bias
that the clients' drift leaves behind shrink along with ε. So the last column says how much of ε they are, and
one row, whose step sizes do not shrink, is there to fail.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from scipy import stats

import fedbilevel as fb
from fedbilevel.algorithm.base import Algorithm, Info
from fedbilevel.engine.base import Session
from fedbilevel.engine.simulator import Simulator
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.ledger import Ledger
from fedbilevel.problem.nonconvex import Nonconvex
from fedbilevel.tree import PyTree

FIRST = 0.1
"""ε of the first rung; each of the others halves it."""

KINDS: Mapping[str, tuple[str, ...]] = {
    "∇f": ("f_x", "f_y"),
    "∇g": ("g_y",),
    "Jv": ("g_xy",),
    "Hv": ("g_yy",),
}
"""Derivatives that a client takes, each of one sample, and the oracles that add up to them."""

COSTS = ("rounds", *KINDS)
CAPACITY = 128
"""Steps in a compiled block."""

PATIENCE = 2.0
"""A run gives up after so many times the steps that the first rung and the paper's exponent promise."""


# ---------------------------------------------------------------- what the theorems prescribe


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


# ------------------------------------------------------------------------------- one run


class Watched(Algorithm[Any]):
    """A method that reports `‖∇h(x)‖²` after every round."""

    method: Algorithm[Any]
    known: Nonconvex

    def init(self, fed: Federation, key: jax.Array) -> PyTree:
        return self.method.init(fed, key)

    def step(self, fed: Federation, state: PyTree, key: jax.Array) -> tuple[PyTree, Info]:
        state, _ = self.method.step(fed, state, key)
        return state, {"stationarity": self.known.stationarity(self.solution(state)[0])}

    def solution(self, state: PyTree) -> tuple[PyTree, PyTree]:
        return self.method.solution(state)


class Spent(NamedTuple):
    """What one run took until it was there.

    Attributes:
        costs: by the names of `COSTS`, a client's; empty if it did not get there.
        steps: how many steps of the method it made, of I local steps each.
        floor: the mean of `‖∇h(x)‖²` over the last quarter of the rounds, over ε.
    """

    costs: Mapping[str, float]
    steps: int
    floor: float


def spend(known: Nonconvex, setting: Setting, epsilon: float, seed: int, most: int) -> Spent:
    """Run until the mean of `‖∇h(x)‖²` over the iterates is at most ε, for at most so many steps."""
    clients = clients_of(known, setting)
    first = float(known.stationarity(known.problem().x0))
    with Simulator().connect(known.problem(), clients, Watched(setting.algorithm, known)) as session:
        begun, seen, ledger = _advance(session, first, epsilon, seed, most)
    floor = float(np.mean(seen[3 * len(seen) // 4 :])) / epsilon
    reached = np.mean(seen[:-1]) <= epsilon
    costs = _costs(begun, ledger, setting, known.n) if reached else {}
    return Spent(costs, len(seen) - 1, floor)


def clients_of(known: Nonconvex, setting: Setting) -> fb.Clients:
    """Noisy clients with more samples than any batch, which is then drawn with replacement."""
    samples = 2 * max(setting.lower_batch, setting.first_batch, 512)
    clients = known.clients(samples=samples, noise=0.5, batch_size=setting.batch)
    lower = dataclasses.replace(clients.lower, batch_size=setting.lower_batch)
    return eqx.tree_at(lambda c: c.lower, clients, lower)


def _advance(
    session: Session, first: float, epsilon: float, seed: int, most: int
) -> tuple[Ledger, list[float], Ledger]:
    """What the start and the rounds cost, and `‖∇h(x)‖²` at the start and after every round."""
    k_begin, key = jr.split(jr.key(seed))
    state, counts = session.init(k_begin)
    begun, ledger, seen = Ledger.from_counts(counts), Ledger(), [first]
    while len(seen) <= most:
        block = session.advance(state, key, len(seen) - 1, min(CAPACITY, most + 1 - len(seen)), CAPACITY)
        state, found = block.state, np.asarray(block.info["stationarity"])[: block.done].tolist()
        there = _first_time(seen, found, epsilon)
        seen += found[:there]
        ledger += Ledger.from_counts({entry: np.asarray(n)[:there] for entry, n in block.counts.items()})
        if there is not None or not block.finite:
            break
    return begun, seen, ledger


def _first_time(seen: Sequence[float], found: Sequence[float], epsilon: float) -> int | None:
    """After how many more rounds the mean over the points where a round began is at most ε."""
    means = np.cumsum([*seen, *found])[len(seen) - 1 : -1] / np.arange(len(seen), len(seen) + len(found))
    places = np.flatnonzero(means <= epsilon)
    return int(places[0]) + 1 if len(places) else None


def _costs(begun: Ledger, ledger: Ledger, setting: Setting, clients: int) -> dict[str, float]:
    """Exchanges, and derivatives of single samples that a client takes: calls times samples in a batch."""

    def derivatives(kind: str) -> float:
        batch = setting.batch if kind.startswith("f") else setting.lower_batch
        parts = ((begun, setting.first_batch), (ledger, batch))
        return sum(part.calls.get(kind, 0) * size for part, size in parts) / clients

    counted = {name: sum(map(derivatives, kinds)) for name, kinds in KINDS.items()}
    return {"rounds": float(ledger.rounds)} | counted


# --------------------------------------------------------------------------------- fits


class Fit(NamedTuple):
    """`cost ~ ε^slope`: the slope, and half the width of its 95 % confidence interval."""

    slope: float
    half: float

    def __str__(self) -> str:
        return f"{self.slope:.2f} ± {self.half:.2f}"


def fit(epsilons: Sequence[float], costs: Sequence[float]) -> Fit:
    """Least squares of log cost on log ε, one point a rung; the interval is Student's.

    Seeds of one rung are averaged before: what the line misses is mostly no noise, and the same for all.
    """
    if len(epsilons) < 3:
        raise ValueError(f"there are {len(epsilons)} rungs; a slope with an interval needs at least 3")
    line = stats.linregress(np.log(epsilons), np.log(costs))
    return Fit(float(line.slope), float(stats.t.ppf(0.975, len(epsilons) - 2) * line.stderr))


def verdict(found: Fit, paper: float) -> str:
    """Whether a slope agrees with an upper bound, to a tenth or to the width of its interval."""
    if found.slope < paper - max(found.half, 0.1):
        return "steeper"
    return "as steep" if found.slope <= paper + max(found.half, 0.1) else "less steep"


# -------------------------------------------------------------------------------- ladder


@dataclasses.dataclass(frozen=True)
class Rung:
    """All runs of one claim at one ε.

    Attributes:
        claim: which.
        epsilon: ε.
        runs: one a seed.
    """

    claim: Claim
    epsilon: float
    runs: tuple[Spent, ...]

    @property
    def reached(self) -> bool:
        """Whether all runs got there."""
        return all(run.costs for run in self.runs)

    @property
    def setting(self) -> Setting:
        """The method for this ε."""
        return self.claim.setting(FIRST / self.epsilon)

    def cost(self, name: str) -> float:
        """The geometric mean over seeds."""
        return float(np.exp(np.mean([math.log(run.costs[name]) for run in self.runs])))

    def bounded(self, name: str) -> float:
        """The part of a cost that the paper gives an exponent for: of Hv without the factor Q ~ log(1/ε)."""
        series = name == "Hv" and self.claim.lower == "local"
        return self.cost(name) / (getattr(self.setting.algorithm, "terms", 1) if series else 1)


def climb(claim: Claim, rungs: int, seeds: int) -> Iterator[Rung]:
    """A claim's rungs, from the largest ε to the smallest; ends at one that it does not reach."""
    known = Nonconvex.random(jr.key(3), clients=CLIENTS, dx=5, dy=5, lower=claim.lower)
    most = 500.0
    for number in range(rungs):
        r = 2.0**number
        rung = Rung(claim, FIRST / r, _runs(known, claim.setting(r), FIRST / r, seeds, math.ceil(most)))
        yield rung
        if not rung.reached:
            return
        most = (PATIENCE * max(run.steps for run in rung.runs) if number == 0 else most) * 2**-claim.rounds


def _runs(known: Nonconvex, setting: Setting, epsilon: float, seeds: int, most: int) -> tuple[Spent, ...]:
    """One run a seed, up to the first that does not get there."""
    runs: list[Spent] = []
    while len(runs) < seeds and all(run.costs for run in runs):
        runs.append(spend(known, setting, epsilon, len(runs), most))
    return tuple(runs)


def ladder_table(rungs: Sequence[Rung]) -> Table:
    """What every rung took."""
    table = Table(title="until the mean of ‖∇h(x)‖² is at most ε", box=box.SIMPLE)
    for title in ("method", "ε", "b", "b_y", "I", *COSTS, "floor/ε"):
        table.add_column(title, justify="left" if title == "method" else "right")
    for rung in rungs:
        setting = rung.setting
        costs = [f"{rung.cost(name):,.0f}" if rung.reached else "-" for name in COSTS]
        period: Any = getattr(setting.algorithm, "sync_every", "")
        sizes = [str(size) for size in (setting.batch, setting.lower_batch, period)]
        floor = np.mean([run.floor for run in rung.runs])
        table.add_row(rung.claim.name, f"{rung.epsilon:.4g}", *sizes, *costs, f"{floor:.2f}")
    return table


def slope_table(rungs: Sequence[Rung]) -> Table:
    """Fitted exponents of ε, and the paper's below."""
    table = Table(title="exponents of ε, fitted ± 95 % confidence", box=box.SIMPLE)
    for title in ("method", *COSTS, "verdict"):
        table.add_column(title, justify="left" if title in ("method", "verdict") else "right")
    for claim in dict.fromkeys(rung.claim for rung in rungs):
        own = [rung for rung in rungs if rung.claim is claim]
        table.add_row(claim.name, *_slopes(claim, own))
        if claim.theorem is not None:
            paper = (f"{claim.exponent(cost):.2f}" for cost in COSTS)
            table.add_row(f"  theorem {claim.theorem}", *paper, "")
    return table


def _slopes(claim: Claim, own: Sequence[Rung]) -> list[str]:
    """The fitted exponents of one claim, and what they say of it."""
    if not all(rung.reached for rung in own):
        return [*("-" for _ in COSTS), f"does not reach {own[-1].epsilon:.4g} in time"]
    found = [fit([rung.epsilon for rung in own], [rung.bounded(cost) for rung in own]) for cost in COSTS]
    verdicts = dict.fromkeys(verdict(*pair) for pair in zip(found, map(claim.exponent, COSTS), strict=True))
    return [*map(str, found), ", ".join(verdicts)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Climb all ladders and print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rungs", type=int, default=5, help="how many ε, each half of the one before")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    rungs = []
    for claim in CLAIMS:
        for rung in climb(claim, options.rungs, options.seeds):
            rungs.append(rung)
            said = f"{rung.cost('rounds'):,.0f} rounds" if rung.reached else "not reached"
            print(f"{claim.name}: ε = {rung.epsilon:.4g}, {said}", file=sys.stderr, flush=True)
    console = Console(width=130)
    console.print(ladder_table(rungs), slope_table(rungs))


if __name__ == "__main__":
    main()
