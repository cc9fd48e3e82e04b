"""Labels: those that are no class have no logit, and would count for nothing without a word."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.problem.base import ProblemError

LABELLED = {
    "Classification": fb.Classification,
    "ServerModel": fb.ServerModel,
    "HyperRepresentation": partial(fb.HyperRepresentation, fb.MLP((5,))),
    "LossTuning": fb.LossTuning,
    "DataCleaning": partial(fb.DataCleaning, samples=6),
    "FairClients": partial(fb.FairClients, clients=2),
    "AgnosticClients": partial(fb.AgnosticClients, clients=2),
    "ClassWeights": fb.ClassWeights,
    "Mixture": fb.Mixture,
}


@pytest.mark.parametrize("name", LABELLED)
def test_labels_that_are_no_class_are_refused(name: str) -> None:
    """With labels from 1 the last class has no logit: its samples would have loss zero, and no gradient."""
    problem = LABELLED[name](fb.Linear(3), inputs=(4,), classes=3)
    good, bad = ({"inputs": np.ones((3, 4), np.float32), "labels": np.arange(3) + first} for first in (0, 1))
    problem.check_labels(fb.Clients([good, good]))
    with pytest.raises(
        ProblemError, match=r"the lower labels are 1\.\.3; with 3 classes they must be whole numbers 0\.\.2"
    ):
        problem.check_labels(fb.Clients([bad, bad], [good, good]))
    with pytest.raises(ProblemError, match="the test labels are"):
        problem.check_labels(fb.Clients([good, good], test=[bad, good]))


def test_a_run_looks_at_labels() -> None:
    own = {"inputs": np.ones((3, 4), np.float32), "labels": np.arange(3) + 1}
    problem = fb.Classification(fb.Linear(3), inputs=(4,), classes=3)
    with pytest.raises(ProblemError, match="the lower labels are"):
        fb.solve(problem, fb.Clients([own]), fb.FedAvg(0.1, level="lower"), 1)


def columns(labels: Any) -> dict[str, Any]:
    return {"inputs": np.ones((len(labels), 4), np.float32), "labels": np.asarray(labels)}


LABELS: dict[str, tuple[Any, str]] = {
    "between two classes": (
        [0, 1.5, 2],
        r"are 0\.0\.\.2\.0; with 3 classes they must be whole numbers 0\.\.2",
    ),
    "just below the first": ([-0.9, 0, 1], "must be whole numbers"),
    "none": ([0, np.nan, 1], "are nan..nan"),
    "one-hot rows": (np.eye(3), r"have the shape \(3, 3\); they must be whole numbers"),
}


@pytest.mark.parametrize("name", LABELS)
def test_what_is_no_class_number(name: str) -> None:
    labels, message = LABELS[name]
    problem = fb.Classification(fb.Linear(3), inputs=(4,), classes=3)
    with pytest.raises(ProblemError, match=message):
        problem.check_labels(fb.Clients([columns(labels)]))


def test_only_the_rows_of_clients_count() -> None:
    """A table may hold classes that nobody has; what is wrong is said of the level that has it."""
    problem, table = fb.Classification(fb.Linear(3), inputs=(4,), classes=3), columns([0, 1, 2, 7, 0])
    problem.check_labels(fb.Clients.indexed(table, [[0, 1], [2]]))
    with pytest.raises(ProblemError, match=r"the test labels are 7\.\.7"):
        problem.check_labels(fb.Clients.indexed(table, [[0, 1], [2]], test=[[3], [3]]))


@pytest.mark.parametrize("wrong", [True, 0, -3])
def test_a_number_of_classes_is_one(wrong: Any) -> None:
    loss = fb.Classification(fb.Linear(3), inputs=(4,), classes=3).upper
    with pytest.raises(ProblemError, match="it must be a number of classes, or None"):
        fb.Problem(loss, loss, 0.0, 0.0, classes=wrong)
