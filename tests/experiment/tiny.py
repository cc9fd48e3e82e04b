"""Experiment files that run in milliseconds, for tests of everything around a run."""

import json
import pathlib
from typing import Any

import jax
import numpy as np

from fedbilevel.experiment.config import Plan, plans

SADDLE = """
name = "tiny"
steps = 6
every = 2

[problem]
kind = "Saddle"
clients = 3
d = 2
centred = false

[algorithm]
kind = "FedAvgS"
upper_lr = 0.05
lower_lr = 0.1
cohort = 2
"""
"""Cohorts are drawn at random, so that a run that goes on with wrong random numbers is seen."""

IMAGES = """
steps = 2

[data]
name = "mnist-mini"
batch_size = 8
[data.long_tail]
most = 20
factor = 0.5
[data.partition]
kind = "Shards"
clients = 4
each = 2
[data.split]
validation = 0.2

[problem]
kind = "LossTuning"
[problem.model]
kind = "MLP"
sizes = [4, 10]

[algorithm]
kind = "FedNest"
upper_lr = 0.1
lower_lr = 0.1
"""


def changed(text: str, *changes: tuple[str, str]) -> str:
    """A text with parts replaced; each must occur."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def write(folder: pathlib.Path, text: str = SADDLE, name: str = "tiny.toml") -> pathlib.Path:
    file = folder / name
    file.write_text(text)
    return file


def plan(folder: pathlib.Path, text: str = SADDLE, **changes: Any) -> Plan:
    """The only run of a file; `algorithm__upper_lr=1` changes `algorithm.upper_lr`."""
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    (found,) = plans(write(folder, text), changes=dotted)
    return found


def same_bits(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(jax.tree.map(np.array_equal, a, b))


def same_run(a: Any, b: Any) -> bool:
    """Whether two results are equal to the last bit: variables, state, cost, history, best point."""
    assert (a.steps, a.seed, a.diverged, a.ledger) == (b.steps, b.seed, b.diverged, b.ledger)
    assert list(a.history) == list(b.history)
    assert (a.notes, a.failures, a.smoothness) == (b.notes, b.failures, b.smoothness)
    points = [(r.x, r.y, r.state, r.best and (r.best.step, r.best.value, r.best.x, r.best.y)) for r in (a, b)]
    return same_bits(*points) and same_bits(a.history.per_client, b.history.per_client)


def rows(folder: pathlib.Path, name: str = "history.jsonl") -> list[dict[str, Any]]:
    """The rows of a run's folder without `seconds`, which are never the same twice."""
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def manifest(folder: pathlib.Path) -> dict[str, Any]:
    return dict(json.loads((folder / "manifest.json").read_text()))


def checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """The checkpoints of a run's folder, the oldest first."""
    return sorted(folder.glob("checkpoint-*.npz"))
