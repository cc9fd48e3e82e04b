"""From the settings of a run to what `solve` takes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpy.typing as npt

from fedbilevel.algorithm.base import Algorithm
from fedbilevel.data.clients import Clients
from fedbilevel.data.dataset import Dataset
from fedbilevel.data.error import DataError
from fedbilevel.data.federate import federate, shared
from fedbilevel.data.public import set_aside
from fedbilevel.data.source import load
from fedbilevel.engine.base import Engine
from fedbilevel.engine.mesh.join import several
from fedbilevel.engine.mesh.load import indexed_clients
from fedbilevel.experiment.best import Best
from fedbilevel.experiment.config import TABLES, Plan
from fedbilevel.experiment.construct import Table, check_keys, construct, nested
from fedbilevel.experiment.evaluate import Evaluator
from fedbilevel.experiment.registry import NESTED, PROBLEMS, ConfigError, find, parameters
from fedbilevel.experiment.run import check
from fedbilevel.problem.base import Problem
from fedbilevel.problem.cleaning import block_length, training_truth
from fedbilevel.problem.loss_tuning import class_weights

_OURS = ("name", "dir", "read", "public")
"""Keys of `[data]` that `federate` does not see."""
_DATA = {*inspect.signature(federate).parameters, *_OURS} - {"dataset", "collect"}
_IMPLIED = {"split": "Split", "long_tail": "LongTail", "noise": "LabelNoise"}
"""Tables of `[data]` that can only be of one kind."""
_TABLES = (*_IMPLIED, "read")


class Data(NamedTuple):
    """What a `[data]` table makes.

    Attributes:
        dataset: without its training samples, if this is one of several processes.
        clients: of whom such a process has only its own ones' samples.
        public: the inputs of public samples, None without them.
        described: all clients, in such a process without inputs: what a problem must know of them.
    """

    dataset: Dataset
    clients: Clients
    public: npt.NDArray[Any] | None
    described: Clients


class Built(NamedTuple):
    """The objects of one run."""

    problem: Problem
    clients: Clients
    algorithm: Algorithm[Any]
    engine: Engine
    best: Best | None


def build(plan: Plan) -> Built:
    """The objects that a plan describes; errors name the file and the key."""
    try:
        problem, clients = _problem_and_clients(plan)
        algorithm, engine, best = _constructed(plan, lambda: _public(plan))
    except (ConfigError, DataError) as error:
        raise type(error)(f"{plan.place}: {error}") from error
    try:
        check(problem, clients, algorithm, plan.config["steps"], plan.config["every"])
        Evaluator(problem, plan.config.get("measure", ()))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{plan.place}: {error}") from error
    return Built(problem, clients, algorithm, engine, best)


def check_settings(plan: Plan) -> None:
    """Raise an error that explains if method, engine or best point cannot be made, whatever the data are."""
    public = plan.config.get("data", {}).get("public")
    samples = public if type(public) is int and public > 0 else 1
    try:
        _constructed(plan, lambda: np.zeros((samples, 1)))
    except ConfigError as error:
        raise ConfigError(f"{plan.place}: {error}") from error


def _constructed(plan: Plan, public: Callable[[], Any]) -> tuple[Algorithm[Any], Engine, Best | None]:
    given = {"algorithm": {"public": public}}
    algorithm, engine = (
        construct(plan.config[key], TABLES[key], key, given.get(key)) for key in ("algorithm", "engine")
    )
    if "best" not in plan.config:
        return algorithm, engine, None
    return algorithm, engine, construct({"kind": "Best"} | plan.config["best"], NESTED, "best")


def data_table(plan: Plan) -> Table:
    """The `[data]` of a plan; `seed = "run"` there is the seed of the run."""
    table = plan.config.get("data", {})
    return table | {"seed": plan.seed} if table.get("seed") == "run" else table


def data_of(table: Table) -> Data:
    """The data set that a `[data]` table names, the clients it makes of it, and the public samples."""
    return _data(json.dumps(table, sort_keys=True), _precision())


def _precision() -> str:
    """In which arrays are made now: what is kept for one precision must not serve the other."""
    return str(jnp.result_type(float))


@functools.lru_cache(maxsize=32)  # the variants of a file mostly share their data
def _data(text: str, precision: str) -> Data:
    table = json.loads(text)
    check_keys(table, _DATA, "data")
    for key in ("name", "partition"):
        if key not in table:
            raise ConfigError(f"data.{key} is missing")
    for key in _TABLES:
        if not isinstance(table.get(key, {}), dict):
            raise ConfigError(f"data.{key} is {table[key]!r}; it must be a table, see `fedbilevel.data`")
    table |= {key: {"kind": kind} | table[key] for key, kind in _IMPLIED.items() if key in table}
    arguments = {key: nested(value, f"data.{key}") for key, value in table.items() if key not in _OURS}
    dataset, public = load(table["name"], table.get("dir"), table.get("read")), None
    if "public" in table:
        dataset, public = set_aside(dataset, table["public"], table.get("seed", 0))
    clients = federate(dataset, **arguments, collect=indexed_clients if several() else None)
    if not several():
        return Data(dataset, clients, public, clients)
    return Data(_untrained(dataset), clients, public, federate(dataset, **arguments, collect=_described))


def _described(columns: Mapping[str, npt.NDArray[Any]], *levels: Any, **rest: Any) -> Clients:
    """Clients without the inputs, which take all of the memory."""
    return shared({name: column for name, column in columns.items() if name != "inputs"}, *levels, **rest)


def _untrained(dataset: Dataset) -> Dataset:
    """A data set of which only the test samples, and what a sample looks like, are left."""
    # A part of an array would keep the whole of it in memory.
    none = {name: np.empty((0, *column.shape[1:]), column.dtype) for name, column in dataset.train.items()}
    return dataclasses.replace(dataset, train=none)


def _public(plan: Plan) -> npt.NDArray[Any]:
    """The public samples of a plan whose method needs some."""
    found = data_of(data_table(plan)).public
    if found is None:
        raise ConfigError(
            f"{plan.config['algorithm']['kind']} learns from public samples: data.public must say how many "
            "of the training samples are public, and no client's"
        )
    return found


def _problem_and_clients(plan: Plan) -> tuple[Problem, Clients]:
    """A problem on given data, or one that brings its own: it has `problem()` and `clients()`."""
    table, data, seed = plan.config["problem"], data_table(plan), plan.seed
    known = set(parameters(find(table["kind"], PROBLEMS, "problem")))
    if "key" in known and "name" in data:
        raise ConfigError(
            f"data.name is {data['name']!r}, but {table['kind']} brings its own data: remove it"
        )
    if "name" in data or {"inputs", "classes"} & known:
        dataset, clients, _, described = data_of(data)
        test = None if data.get("with_test") else dataset.test  # what clients train on, nobody is tested on
        return construct(table, PROBLEMS, "problem", _surroundings(dataset, described, seed, test)), clients
    text = json.dumps([table, data, seed if "seed" in known else None], sort_keys=True)
    return _own_data(text, _precision())


@functools.lru_cache(maxsize=32)
def _own_data(text: str, precision: str) -> tuple[Problem, Clients]:
    """A problem that brings its data. The data's seed draws it, so that all seeds solve the same problem."""
    table, data, seed = json.loads(text)
    known = construct(
        table, PROBLEMS, "problem", {"key": lambda: jr.key(data.get("seed", 0)), "seed": lambda: seed}
    )
    if isinstance(known, tuple):
        return known
    if not hasattr(known, "clients"):
        raise ConfigError("data.name is missing: this problem brings no data of its own")
    rest = {key: nested(value, f"data.{key}") for key, value in data.items() if key != "seed"}
    check_keys(
        rest, {*inspect.signature(known.clients).parameters, "batch_size", "weights"} - {"options"}, "data"
    )
    return known.problem(), known.clients(**rest)


def _surroundings(
    dataset: Dataset, clients: Clients, seed: int, test: Any
) -> Mapping[str, Callable[[], Any]]:
    """Arguments of a problem that the data decide."""
    classes = len(dataset.classes)
    return {
        "inputs": lambda: dataset.train["inputs"].shape[1:],
        "classes": lambda: classes,
        "test": lambda: test,
        "balance": lambda: class_weights(clients, classes),
        "clients": lambda: clients.n,
        "samples": lambda: block_length(clients),
        "truth": lambda: training_truth(clients),
        "seed": lambda: seed,
    }
