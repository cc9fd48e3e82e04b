"""What is measured between two blocks of steps: metrics, on the server and at the clients."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
import numpy.typing as npt

from fedbilevel.algorithm.base import Variables
from fedbilevel.algorithm.measure import MEASURES, UNSEEN, ClientProbe, PointProbe, measured
from fedbilevel.engine.base import Session, Stepper
from fedbilevel.experiment.best import Row, higher_is_better
from fedbilevel.fed.ledger import Ledger
from fedbilevel.fed.place import Kept, map_kept
from fedbilevel.name import nearest
from fedbilevel.problem.base import Problem
from fedbilevel.tree import PyTree

ClientValues = dict[str, npt.NDArray[Any]]


class Evaluator:
    """Turns a point into a row of metrics.

    Args:
        problem: its `metrics` are evaluated on the server, its `client_metrics` at every client.
        measure: names of built-in measures, evaluated on all clients' data (`MEASURES` lists them).
    """

    def __init__(self, problem: Problem, measure: Sequence[str] = ()) -> None:
        self.problem = problem
        _check_measures(problem, measure)
        _check_names(problem, measure)
        self._point: list[Stepper] = [PointProbe(tuple(measure))] if measure else []
        self._clients: list[Stepper] = [ClientProbe()] if problem.client_metrics else []

    @property
    def probes(self) -> list[Stepper]:
        """What a session must be able to ask."""
        return [*self._point, *self._clients]

    def __call__(self, session: Session, point: Variables, key: jax.Array) -> tuple[Row, ClientValues]:
        """The metrics at `(x, y)`, and the clients' own values of `client_metrics`.

        What clients keep is one row a client for the metrics of the server.
        """
        x, y = map_kept(session.federation.stacked, point)
        row = {name: float(value) for name, value in _metrics(self.problem, x, y).items()}
        for probe in self._point:
            _check_shared(point)
            row |= {name: float(value) for name, value in session.ask(probe, point, key).items()}
        values: ClientValues = {}
        for probe in self._clients:
            answers = {name: np.asarray(value) for name, value in session.ask(probe, point, key).items()}
            answered = answers.pop("answered")
            values = {name: np.where(answered, value[:, 0], np.nan) for name, value in answers.items()}
            row |= summary(*({name: value[answered, i] for name, value in answers.items()} for i in (0, 1)))
        return row, values


SUMMARIES = ("mean", "worst", "p10", "weighted")
"""What the history has of a client metric, as the ends of the names of its columns."""


def summary(values: Mapping[str, npt.NDArray[Any]], samples: Mapping[str, npt.NDArray[Any]]) -> Row:
    """What the history has of the clients' values; NaN if a client's value is, or if there is none.

    * `mean`: every client counts alike.
    * `worst`, `p10`: the worst client's, and the 10 % percentile, which the worst tenth of the clients does
      not surpass: the lowest tenth of an accuracy, the highest of a loss.
    * `weighted`: every sample counts alike, so that a client's weight is the number of its samples.

    Args:
        values: name -> one value a client.
        samples: name -> the number of samples that each of these is the mean of.
    """
    row: Row = {}
    for name, column in values.items():
        high = higher_is_better(name)
        column, sizes = (column, samples[name]) if len(column) else (np.array([np.nan]), np.ones(1))
        worst = np.min(column) if high else np.max(column)
        with np.errstate(invalid="ignore"):  # what lies between infinities is a NaN, and nothing to warn of
            tenth = np.percentile(column, 10 if high else 90)
            numbers = (np.mean(column), worst, tenth, np.average(column, weights=sizes))
        row |= {f"{name}_{kind}": float(v) for kind, v in zip(SUMMARIES, numbers, strict=True)}
    return row


@eqx.filter_jit
def _metrics(problem: Problem, x: PyTree, y: PyTree) -> dict[str, jax.Array]:
    metrics = problem.metrics.items()
    return {name: measured(problem, name, functools.partial(metric, x, y), y) for name, metric in metrics}


def _check_shared(point: Variables) -> None:
    if any(isinstance(value, Kept) for value in point):
        raise ValueError(
            "`measure` is for problems whose x and y are shared by all clients; here clients have their own. "
            "Use `client_metrics`, which see every client's own."
        )


def _check_names(problem: Problem, measure: Sequence[str]) -> None:
    """Every column of a history has one meaning."""
    taken = [*Ledger(seconds=0.0).columns(), "step", "seconds", *measure]
    taken += [
        f"{prefix}{name}_{kind}"
        for prefix in UNSEEN.values()
        for name in problem.client_metrics
        for kind in SUMMARIES
    ]
    twice = sorted({name for name in taken if taken.count(name) > 1} | set(taken) & set(problem.metrics))
    if twice:
        raise ValueError(f"the metrics {twice} have the names of other columns of the history; rename them")


def _check_measures(problem: Problem, measure: Sequence[str]) -> None:
    if isinstance(measure, str):
        raise TypeError(f"`measure` is {measure!r}; it must be a sequence of names: measure=({measure!r},)")
    for name in measure:
        if name not in MEASURES:
            listed = ", ".join(MEASURES)
            raise ValueError(f"there is no measure {name!r}; there are {listed}{nearest(name, MEASURES)}")
        if problem.structure not in MEASURES[name]:
            possible = ", ".join(MEASURES[name])
            raise ValueError(
                f"{name} cannot be measured on a {problem.structure} problem, only on: {possible}"
            )
