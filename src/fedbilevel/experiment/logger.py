"""Loggers: a run's rows, sent to the tools that people watch their experiments with.

All of them write to local files and need no account or network. Each needs a package of its own, which is
imported only when the logger is made.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from fedbilevel.name import nearest

_PROJECT = "fedbilevel"
_FILE_STORE = "MLFLOW_ALLOW_FILE_STORE"


class Logger(Protocol):
    """Takes the rows of a history, one an evaluation."""

    def log(self, row: Mapping[str, float]) -> None:
        """Take one row; its "step" is the horizontal axis, all else are curves."""

    def close(self) -> None:
        """Write what is still in memory. Nothing may be logged afterwards."""


class TensorBoard:
    """Event files for `tensorboard --logdir <folder>`.

    Args:
        folder: where to write them.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        package = _package("tensorboardX", "tensorboard")
        self._writer = package.SummaryWriter(os.fspath(folder))

    def log(self, row: Mapping[str, float]) -> None:
        step, curves = _split(row)
        for name, value in curves.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A run of MLflow.

    Args:
        tracking: a folder (`mlflow ui --backend-store-uri <folder>` shows it) or the address of a server
            or database, such as `http://...` or `sqlite:///...`.
        experiment: the name of MLflow's experiment; made if there is none.
        run: the name of MLflow's run.
    """

    def __init__(self, tracking: str | os.PathLike[str], experiment: str, run: str) -> None:
        package = _package("mlflow", "mlflow")
        self._metric = package.entities.Metric
        where = os.fspath(tracking)
        with contextlib.nullcontext() if "://" in where else _file_store():
            self._client = package.MlflowClient(where)
        found = self._client.get_experiment_by_name(experiment)
        group = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self._run = self._client.create_run(group, run_name=run).info.run_id

    def log(self, row: Mapping[str, float]) -> None:
        step, curves = _split(row)
        now = time.time_ns() // 1_000_000
        metrics = [self._metric(name, float(value), now, step) for name, value in curves.items()]
        self._client.log_batch(self._run, metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class WeightsAndBiases:
    """A run of Weights & Biases, kept on this machine; `wandb sync <folder>/wandb/<run>` uploads it.

    Args:
        folder: where to write; made if it does not exist.
        project: the project of the run.
        run: the name of the run; default: wandb invents one.
    """

    def __init__(self, folder: str | os.PathLike[str], project: str, run: str | None = None) -> None:
        package = _package("wandb", "wandb")
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        # Rows and nothing else: no report of the machine, its packages, the source code or the terminal.
        settings = package.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        self._run = package.init(
            project=project,
            name=run,
            dir=os.fspath(folder),
            mode="offline",
            settings=settings,
            reinit="create_new",
        )

    def log(self, row: Mapping[str, float]) -> None:
        step, curves = _split(row)
        self._run.log(dict(curves), step=step)

    def close(self) -> None:
        self._run.finish()


LOGGERS: Mapping[str, Callable[[pathlib.Path, str], Logger]] = {
    "tensorboard": lambda folder, title: TensorBoard(folder / "tensorboard"),
    "mlflow": lambda folder, title: MLflow(folder / "mlruns", _PROJECT, title),
    "wandb": lambda folder, title: WeightsAndBiases(folder, _PROJECT, title),
}
"""Loggers by name: each makes one from the folder and the title of a run."""


def open_loggers(names: Iterable[str], folder: str | os.PathLike[str], title: str) -> list[Logger]:
    """Open loggers by name, each once; if one of them fails, those before it are closed.

    Args:
        names: of `LOGGERS`.
        folder: of the run: the loggers write into it.
        title: how the run is called there.
    """
    makers = [_maker(name) for name in dict.fromkeys(names)]
    with contextlib.ExitStack() as opened:
        loggers = []
        for make in makers:
            loggers.append(make(pathlib.Path(folder), title))
            opened.callback(loggers[-1].close)
        opened.pop_all()
    return loggers


def check_loggers(names: Iterable[str]) -> None:
    """Raise an error that explains if a logger of that name does not exist."""
    for name in names:
        _maker(name)


def _maker(name: str) -> Callable[[pathlib.Path, str], Logger]:
    if name not in LOGGERS:
        listed = ", ".join(LOGGERS)
        raise ValueError(f"there is no logger {name!r}; the loggers are {listed}{nearest(name, LOGGERS)}")
    return LOGGERS[name]


def _package(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the logger {extra!r} needs the package {error.name}, which is not installed: "
            f"pip install 'fedbilevel[{extra}]'"
        ) from error


def _split(row: Mapping[str, float]) -> tuple[int, dict[str, float]]:
    """The step of a row, and its other numbers."""
    return int(row["step"]), {name: value for name, value in row.items() if name != "step"}


@contextlib.contextmanager
def _file_store() -> Iterator[None]:
    """Let MLflow open a folder, unless the user has said whether it may.

    Newer versions refuse to unless this variable is set: they prefer a database, which the light
    `mlflow-skinny` cannot open. They look once, when the folder is opened.
    """
    given = os.environ.get(_FILE_STORE)
    os.environ.setdefault(_FILE_STORE, "true")
    try:
        yield
    finally:
        if given is None:
            del os.environ[_FILE_STORE]
