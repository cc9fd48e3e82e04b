"""What it cost to reach a level."""

from __future__ import annotations

import pathlib

import numpy as np

from fedbilevel.experiment.reach import COLUMNS, reach
from fedbilevel.experiment.record import History
from fedbilevel.experiment.recorded import RecordedRun
from fedbilevel.fed.ledger import Ledger


def run(variant: str, seed: int, values: list[float], metric: str, clients: int = 4) -> RecordedRun:
    """Every evaluation costs 10 rounds, 1 MB each way, and 8 calls of each kind more."""
    rows = []
    for number, value in enumerate(values):
        cost = {name: 8 * number for name in Ledger().columns() if name.startswith("calls_")}
        cost |= {"rounds": 10 * number, "samples": 40 * number}
        cost |= {"bytes_down": 10**6 * number, "bytes_up": 10**6 * number}
        rows.append(Ledger().columns() | {"step": number, metric: value} | cost)
    return RecordedRun(pathlib.Path("."), "e", variant, seed, "done", History(tuple(rows)), clients)


def test_costs_are_those_of_the_first_evaluation_that_is_good_enough() -> None:
    runs = [run("A", 0, [0.1, 0.5, 0.9, 0.2], "accuracy"), run("A", 1, [0.1, 0.2, 0.3, 0.8], "accuracy")]
    (line,) = reach(runs, 0.5).lines
    assert (line.runs, line.reached) == (2, 2)
    means = {name: score.mean for name, score in line.costs.items()}
    assert means == {
        "rounds": 20,
        "MB": 4 / 4,
        "∇f": 2 * 16 / 4,
        "∇g": 2 * 16 / 4,
        "Jv": 4,
        "Hv": 4,
        "samples": 20,
    }
    assert np.isclose(line.costs["rounds"].std or 0, np.std([10, 30], ddof=1))


def test_less_of_an_error_is_better_and_who_does_not_get_there_is_said() -> None:
    runs = [run("good", 0, [1.0, 0.1], "error"), run("bad", 0, [1.0, 0.6], "error")]
    levels = reach(runs, 0.1)
    assert [line.reached for line in levels.lines] == [1, 0]
    good, bad = str(levels).splitlines()[-2:]
    assert good.split()[:2] == ["good", "1/1"]
    assert bad.split() == ["bad", "0/1", *["-"] * len(COLUMNS)]
    assert "error ≤ 0.1" in str(levels)


def test_a_client_that_is_alone_does_not_communicate() -> None:
    runs = [run("pooled", 0, [1.0, 0.1], "error", clients=1), run("federated", 0, [1.0, 0.1], "error")]
    pooled, federated = str(reach(runs, 0.1)).splitlines()[-2:]
    assert pooled.split()[:4] == ["pooled", "1/1", "-", "-"]
    assert pooled.split()[4] == "16"
    assert federated.split()[2] == "10"
