"""Plans to folders: run, go on, and skip what is done."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax

from fedbilevel.algorithm.base import CannotRunError
from fedbilevel.engine.mesh.join import leads
from fedbilevel.experiment.build import Built, build, check_settings
from fedbilevel.experiment.claim import claimed
from fedbilevel.experiment.config import Plan
from fedbilevel.experiment.directory import NOT_APPLICABLE
from fedbilevel.experiment.logger import Logger, check_loggers, open_loggers
from fedbilevel.experiment.loop import Evaluation
from fedbilevel.experiment.record import Result
from fedbilevel.experiment.recorded import RunError
from fedbilevel.experiment.registry import ConfigError
from fedbilevel.experiment.room import make_room
from fedbilevel.experiment.shared import directory_of
from fedbilevel.experiment.suspicion import DivergenceWarning
from fedbilevel.experiment.sweep import Job, sweep

Task: TypeAlias = tuple[Plan, pathlib.Path]
Adapt: TypeAlias = Callable[[Built], Built]
_TOGETHER = ("precision", "engine", "steps", "every", "measure")
"""Settings that runs of one program must share."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        folder, plan: of the run.
        status: "done", "stopped" early, "diverged", or "n/a": the method cannot run over these links.
        result: None if the status is "n/a".
        fresh: whether it ran just now.
        reason: why it cannot run.
    """

    folder: pathlib.Path
    plan: Plan
    status: str
    result: Result | None
    fresh: bool
    reason: str = ""


def run_all(
    tasks: Sequence[Task],
    *,
    together: bool = False,
    again: bool = False,
    progress: bool | None = None,
    adapt: Adapt | None = None,
) -> Iterator[Outcome]:
    """Run every plan in its folder: from the start, from its last checkpoint, or not at all if it is done.

    A method that cannot run over its links is no mistake: its folder says so, and the others go on.

    Args:
        tasks: plans and folders.
        together: runs that differ in numbers only become one vmapped program (see `sweep`).
        again: begin anew where there is a run already.
        progress: as for `solve`.
        adapt: changes what a plan is built to, for example its engine.
    """
    _check_folders([folder.resolve() for _, folder in tasks])
    for plan, _ in tasks:  # a mistake in the last one shows before the first has run for hours
        check_settings(plan)
    groups: dict[Any, list[Task]] = {}
    for number, (plan, folder) in enumerate(tasks):
        settings = [str(plan.config.get(key)) for key in _TOGETHER] if together else [number]
        groups.setdefault(tuple(settings), []).append((plan, folder))
    for group in groups.values():
        make_room()
        with jax.enable_x64(group[0][0].config["precision"] == "float64"):
            outcomes = _run_group(group, again, progress, adapt)
        yield from outcomes


def _check_folders(folders: Sequence[pathlib.Path]) -> None:
    repeated = sorted({str(folder) for folder in folders if folders.count(folder) > 1})
    if repeated:
        raise RunError(f"two runs have the same folder, {repeated[0]}; each needs its own")
    for place in {place for folder in folders for place in (folder, *folder.parents)}:
        if place.exists() and not place.is_dir():
            raise RunError(f"{place} is a file: results need a folder; name another one")


def _run_group(
    group: Sequence[Task], again: bool, progress: bool | None, adapt: Adapt | None
) -> list[Outcome]:
    prepared = [
        _FolderRun(plan, folder, again, adapt) for plan, folder in group
    ]  # a mistake shows before any change
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(_opened(run)) for run in prepared]
        config, todo = group[0][0].config, [run for run in runs if run.is_due]
        for steps in sorted({run.steps_left for run in todo}):
            now = [run for run in todo if run.steps_left == steps]
            jobs, engine = [run.job() for run in now], now[0].built.engine
            settings = {"every": config["every"], "measure": config.get("measure", ()), "progress": progress}
            with naming(*(plan for plan, _ in group)), warnings.catch_warnings():
                warnings.simplefilter("ignore", DivergenceWarning)  # the folder's status says it
                results = sweep(jobs, steps, engine=engine, **settings)
            for run, result in zip(now, results, strict=True):
                run.finish(result)
        return [run.outcome(run in todo) for run in runs]


@contextlib.contextmanager
def naming(*plans: Plan) -> Iterator[None]:
    """What goes wrong inside is said with the name of the plans' file, and of the run if there is but one."""
    try:
        yield
    except (RunError, CannotRunError):  # these name their folder, and what cannot run: no mistake of the file
        raise
    except (ValueError, TypeError, ImportError) as error:
        place = plans[0].place if len(plans) == 1 else plans[0].source
        prefix = "" if str(error).startswith(plans[0].source) else f"{place}: "
        raise ConfigError(f"{prefix}{error}") from error


@contextlib.contextmanager
def _opened(run: _FolderRun) -> Iterator[_FolderRun]:
    """A run in its folder, which is nobody else's meanwhile; how it ends is noted there, however it ends."""
    if run.is_done:
        yield run
        return
    with claimed(run.directory.path):
        if run.reason:
            run.decline()
        else:
            run.open()
        try:
            yield run
        except BaseException as error:
            if run.is_due:
                run.directory.note(status="interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
            raise
        finally:
            run.close()


class _FolderRun:
    """One run between its opening and its outcome."""

    def __init__(self, plan: Plan, folder: pathlib.Path, again: bool, adapt: Adapt | None = None) -> None:
        checkpoint = plan.config.get("checkpoint", {})
        self.plan, self.again = plan, again
        self.directory = directory_of(folder, checkpoint.get("keep", 2), checkpoint.get("every", 1))
        self.is_done = not again and self.directory.is_done(plan)
        self.loggers: list[Logger] = []
        self.reason = ""
        if not self.is_done:
            built = build(plan)
            self.built: Built = self._prepared(built if adapt is None else adapt(built))
            with naming(plan):
                check_loggers(plan.config.get("loggers", ()))

    def _prepared(self, built: Built) -> Built:
        """With the algorithm for so many clients; or as it was, with the reason why there is none."""
        try:
            with naming(self.plan):
                return built._replace(algorithm=built.algorithm.among(built.clients.n))
        except CannotRunError as error:
            self.reason = str(error)
            return built

    def decline(self) -> None:
        """Say in the folder why there is no run."""
        with naming(self.plan):
            self.directory.begin(self.plan, again=self.again)
            self.directory.note(status=NOT_APPLICABLE, reason=self.reason, clients=self.built.clients.n)

    def open(self) -> None:
        """Make the folder ready; from here on it is this run's."""
        with naming(self.plan):
            self.start = self.directory.begin(self.plan, again=self.again)
            self.directory.note(clients=self.built.clients.n)
            names = self.plan.config.get("loggers", ()) if leads() else ()
            self.loggers = open_loggers(names, self.directory.path, self.plan.folder)

    @property
    def is_due(self) -> bool:
        """Whether there is anything to run."""
        return not (self.is_done or self.reason)

    @property
    def steps_left(self) -> int:
        return int(self.plan.config["steps"]) - (0 if self.start is None else self.start.steps)

    def job(self) -> Job:
        problem, clients, algorithm, _, best = self.built
        return Job(problem, clients, algorithm, self.plan.seed, best, self.start, self._see)

    def _see(self, seen: Evaluation) -> None:
        self.directory.record(seen)
        for logger in self.loggers:
            logger.log(seen.row)

    def finish(self, result: Result) -> None:
        early = result.steps < int(self.plan.config["steps"])
        self.directory.finish(result, "diverged" if result.diverged else "stopped" if early else "done")
        self.is_done = True

    def close(self) -> None:
        for logger in self.loggers:
            logger.close()

    def outcome(self, fresh: bool) -> Outcome:
        path, status = self.directory.path, str(self.directory.manifest()["status"])
        result = None if self.reason else self.directory.result()
        return Outcome(path, self.plan, status, result, fresh or bool(self.reason), self.reason)
