"""One run between its evaluations: what has been reached, recorded and spent."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.random as jr
import numpy as np
import numpy.typing as npt

from fedbilevel.algorithm.base import Algorithm, Variables
from fedbilevel.data.clients import Clients
from fedbilevel.engine.base import Block, Session
from fedbilevel.experiment.best import Best, BestPoint, Row
from fedbilevel.experiment.evaluate import ClientValues, Evaluator
from fedbilevel.experiment.record import History, Result
from fedbilevel.experiment.suspicion import (
    AdjointWarning,
    DataWarning,
    DivergenceWarning,
    data_notes,
    divergence_note,
    notes,
    suspicions,
)
from fedbilevel.fed.ledger import Ledger
from fedbilevel.fed.place import Kept, map_kept
from fedbilevel.tree import PyTree


class Evaluation(NamedTuple):
    """What a callback sees.

    Attributes:
        row: the new row of the history.
        x, y: the variables.
        clients: the clients' own values of `client_metrics`.
        result: makes a `Result` of the run so far, for instance to save it.
    """

    row: Row
    x: PyTree
    y: PyTree
    clients: ClientValues
    result: Callable[[], Result]


Callback = Callable[[Evaluation], Any]


class Run:
    """A run of one algorithm from one seed, fed with blocks of steps.

    Args:
        algorithm, session: what runs, and where.
        evaluate: makes a row of a point.
        seed: of the run.
        spent: what was spent before it began.
        start: an earlier result to go on from.
        smoothness: ℓ as measured at the start, to be remembered.
        best: which point is kept as the best.
        callback: sees every evaluation; something true ends the run.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        session: Session,
        evaluate: Evaluator,
        seed: int,
        spent: Ledger,
        start: Result | None = None,
        smoothness: float | None = None,
        best: Best | None = None,
        callback: Callback | None = None,
    ) -> None:
        self.algorithm, self.session, self.evaluate, self.seed = algorithm, session, evaluate, seed
        self.ledger, self.earlier, self.smoothness = spent, start, smoothness
        self.wanted, self.callback = best, callback
        self.begin_key, self.key = jr.split(jr.key(seed))
        self.step, self.diverged, self.stopped = 0, False, False
        self.rows: list[Row] = []
        self.per_client: list[ClientValues] = []
        self.trouble: dict[str, float] = {}
        self.best: BestPoint | None = None
        self.state: PyTree = None

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to do."""
        return self.diverged or self.stopped

    def begin(self) -> None:
        """Make the first state and evaluate it, or take up the earlier result's."""
        if self.earlier is None:
            self.state, counts = self.session.init(self.begin_key)
            self.ledger = self.ledger + Ledger.from_counts(counts)
            self._evaluate({})
            return
        start = self.earlier
        self.state = map_kept(lambda kept: self.session.federation.keep(kept.value), start.state)
        self.step, self.rows, self.best = start.steps, list(start.history), start.best
        self.per_client = [dict(values) for values in start.history.per_client]
        self.trouble = dict(start.trouble)
        self.stopped = self.wanted is not None and self.wanted.is_out_of_patience(self.rows)

    def take(self, block: Block) -> None:
        """Go on by what a block of steps gave, and evaluate."""
        self.state, self.diverged = block.state, not block.finite
        self.step += block.done
        self.ledger = self.ledger + Ledger.from_counts(block.counts)
        info = self._reports(block.info, slice(block.done), block.state)
        self._check_report(info)
        self._suspect(info)
        if block.broken is not None:  # what it reports is no part of the history, but may tell why
            self._suspect(self._reports(block.info, slice(block.done, block.done + 1), block.broken))
        self._evaluate({name: float(values[-1]) for name, values in info.items() if len(values)})

    def _reports(self, info: Mapping[str, Any], steps: slice, state: PyTree) -> dict[str, npt.NDArray[Any]]:
        """What some steps of a block report, and what is found in the state after them."""
        found = self.algorithm.findings(state, self.session.federation.stacked)
        reported = {name: np.asarray(values)[steps] for name, values in info.items()}
        return reported | {name: np.array([value]) for name, value in found.items()}

    def _suspect(self, info: dict[str, npt.NDArray[Any]]) -> None:
        for kind, worst in suspicions(info).items():
            pick = min if kind == "curvature" else max
            self.trouble[kind] = pick(self.trouble.get(kind, worst), worst)

    def _check_report(self, info: Mapping[str, npt.NDArray[Any]]) -> None:
        own = type(self.algorithm).__name__
        for name, values in info.items():
            if values.ndim != 1:
                shape = values.shape[1:]
                raise ValueError(f"{own} reports {name!r} of shape {shape}: it must be a number")
            if name in {"step", "failures", *self.ledger.columns()}:
                raise ValueError(f"{own} reports {name!r}, which every history has already: rename it")

    def _evaluate(self, info: Row) -> None:
        x, y = self.solution()
        metrics, clients = self.evaluate(self.session, self._point(), self.begin_key)
        if both := sorted(info.keys() & metrics):
            raise ValueError(f"the method reports {both} itself; leave them out of `measure` and metrics")
        failures: Row = {"failures": float(len(self.session.failures))} if self.session.failures else {}
        self.rows.append({"step": self.step} | metrics | info | self.ledger.columns() | failures)
        self.per_client.append(clients)
        if self.wanted is not None:
            self._remember_best(self.wanted, x, y)
        if self.callback is not None:
            seen = Evaluation(self.rows[-1], x, y, clients, self.result)
            self.stopped = bool(self.callback(seen)) or self.stopped

    def _remember_best(self, wanted: Best, x: PyTree, y: PyTree) -> None:
        if wanted.place(self.rows) == len(self.rows) - 1:
            self.best = BestPoint(self.step, self.rows[-1][wanted.metric], x, y)
        self.stopped = wanted.is_out_of_patience(self.rows)

    def solution(self) -> tuple[PyTree, PyTree]:
        """x and y as they are now; what clients keep as one row a client."""
        x, y = self._point()
        return map_kept(self.session.federation.stacked, x), map_kept(self.session.federation.stacked, y)

    def _point(self) -> Variables:
        """x and y as they are now, where they are."""
        found: Any = self.algorithm.solution(self.state)  # of a method of the user's own, perhaps
        if not isinstance(found, tuple) or len(found) != 2:
            name, seen = type(self.algorithm).__name__, type(found).__name__
            raise TypeError(f"{name}.solution must return (x, y); it returned one {seen}")
        return Variables(*found)

    def warn(self, clients: Clients) -> None:
        """Say what was suspicious, to who called `solve`."""
        for note in notes(self.trouble):
            warnings.warn(note, AdjointWarning, stacklevel=3)
        if self.diverged:
            warnings.warn(divergence_note(self.step), DivergenceWarning, stacklevel=3)
            for note in data_notes(clients):
                warnings.warn(note, DataWarning, stacklevel=3)

    def result(self) -> Result:
        """What there is so far."""
        before = () if self.earlier is None else self.earlier.failures
        x, y = self.solution()
        state = map_kept(lambda kept: Kept(self.session.federation.stacked(kept)), self.state)
        return Result(
            x,
            y,
            History(tuple(self.rows), tuple(self.per_client)),
            self.ledger,
            self.diverged,
            self.step,
            self.seed,
            state,
            (*before, *self.session.failures),
            self.trouble,
            self.smoothness,
            self.best,
        )
