"""Loggers: what they write is read back, in the formats of the tools themselves."""

import math
import os
import pathlib
import struct
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fedbilevel.experiment import logger
from fedbilevel.experiment.logger import LOGGERS, MLflow, TensorBoard, WeightsAndBiases, open_loggers

ROWS = [{"step": 0, "accuracy": 0.25, "rounds": 0}, {"step": 10, "accuracy": 0.5, "rounds": 2**33}]
CURVES = {"accuracy": [(0, 0.25), (10, 0.5)], "rounds": [(0, 0.0), (10, float(2**33))]}


@pytest.fixture(autouse=True)
def _silent(monkeypatch: Any) -> None:
    """The tools tell their makers nothing about these tests."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def log_all(opened: Any) -> None:
    for row in ROWS:
        opened.log(row)
    opened.close()


# ------------------------------------------------------------------- TensorBoard


def events(folder: pathlib.Path) -> Iterator[Any]:
    """The events of a file: length (8 bytes), checksum (4), event, checksum (4), and so on."""
    from tensorboardX.proto.event_pb2 import Event

    (file,) = folder.glob("events.out.tfevents.*")
    content = file.read_bytes()
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        yield Event.FromString(content[12 : 12 + length])
        content = content[16 + length :]


def test_tensorboard_files_hold_the_rows(tmp_path: Any) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    log_all(TensorBoard(tmp_path))
    seen: dict[str, list[Any]] = {}
    for event in events(tmp_path):
        for value in event.summary.value:
            seen.setdefault(value.tag, []).append((event.step, value.simple_value))
    assert seen == CURVES


# ------------------------------------------------------------------------ MLflow


def test_mlflow_holds_the_rows(tmp_path: Any, monkeypatch: Any) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    folder = tmp_path / "mlruns"
    log_all(MLflow(folder, "figure 1", "FedNest, seed 0"))
    assert "MLFLOW_ALLOW_FILE_STORE" not in os.environ
    second = MLflow(folder, "figure 1", "FedNest, seed 1")
    second.log({"step": 0, "error": math.nan})
    second.close()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(str(folder))
    experiment = client.get_experiment_by_name("figure 1")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert {name: run.info.status for name, run in runs.items()} == {
        "FedNest, seed 0": "FINISHED",
        "FedNest, seed 1": "FINISHED",
    }
    first = runs["FedNest, seed 0"].info.run_id
    seen = {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(first, name)]
        for name in runs["FedNest, seed 0"].data.metrics
    }
    assert seen == CURVES


def test_who_forbids_mlflow_folders_is_heard(monkeypatch: Any) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")
    with logger._file_store():
        assert os.environ["MLFLOW_ALLOW_FILE_STORE"] == "false"
    assert os.environ["MLFLOW_ALLOW_FILE_STORE"] == "false"


# -------------------------------------------------------------- Weights & Biases


def records(file: pathlib.Path) -> Iterator[Any]:
    """The records of a small offline file: after 7 bytes a checksum (4), length (2), kind (1) and record."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = file.read_bytes()[7:]
    while content:
        (length,) = struct.unpack("<H", content[4:6])
        yield Record.FromString(content[7 : 7 + length])
        content = content[7 + length :]


def test_wandb_keeps_the_rows_on_this_machine(tmp_path: Any) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    log_all(WeightsAndBiases(tmp_path / "new", "project", "a title"))
    (file,) = (tmp_path / "new" / "wandb").glob("offline-run-*/*.wandb")
    seen: dict[str, list[Any]] = {}
    titles = set()
    for record in records(file):
        if record.HasField("run"):
            titles.add((record.run.project, record.run.display_name))
        items = {item.key or item.nested_key[0]: float(item.value_json) for item in record.history.item}
        for name in CURVES.keys() & items.keys():
            seen.setdefault(name, []).append((record.history.step.num, items[name]))
    assert seen == CURVES
    assert titles == {("project", "a title")}


# ------------------------------------------------------------------------- names


class Kept:
    """A logger that remembers whether it was closed."""

    def __init__(self, folder: pathlib.Path, title: str) -> None:
        self.folder, self.title, self.closed = folder, title, False

    def log(self, row: Any) -> None: ...

    def close(self) -> None:
        self.closed = True


def test_loggers_open_by_name_each_once(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(logger, "LOGGERS", {"a": Kept, "b": Kept})
    opened: Any = open_loggers(["b", "a", "b"], str(tmp_path), "a title")
    assert [(one.folder, one.title, one.closed) for one in opened] == [(tmp_path, "a title", False)] * 2
    assert open_loggers([], tmp_path, "a title") == []


def test_what_was_opened_is_closed_if_the_next_fails(tmp_path: Any, monkeypatch: Any) -> None:
    made: list[Kept] = []

    def keep(folder: pathlib.Path, title: str) -> Kept:
        made.append(Kept(folder, title))
        return made[-1]

    def fail(folder: pathlib.Path, title: str) -> Kept:
        raise OSError("the disk is full")

    monkeypatch.setattr(logger, "LOGGERS", {"good": keep, "bad": fail})
    with pytest.raises(OSError, match="the disk is full"):
        open_loggers(["good", "bad"], tmp_path, "a title")
    assert [one.closed for one in made] == [True]


def test_an_unknown_name_is_refused_before_anything_is_opened(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"no logger 'tensorbord'; .*did you mean 'tensorboard'\?"):
        open_loggers(["tensorboard", "tensorbord"], tmp_path, "a title")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "tensorboardX"), ("mlflow", "mlflow"), ("wandb", "wandb")]
)
def test_a_missing_package_is_named_with_its_extra(
    name: str, module: str, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"needs the package {module}.*'fedbilevel\[{name}\]'"):
        open_loggers([name], tmp_path, "a title")


def test_all_named_loggers_write_into_the_folder_of_the_run(tmp_path: Any) -> None:
    for module in ("tensorboardX", "mlflow", "wandb"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    for opened in open_loggers(LOGGERS, tmp_path, "figure 1, seed 0"):
        log_all(opened)
    assert {path.name for path in tmp_path.iterdir()} == {"tensorboard", "mlruns", "wandb"}
