"""Commands that run experiments and compare what came out."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from fedbilevel.algorithm.base import CannotRunError
from fedbilevel.cli.say import is_terminal, remark, show
from fedbilevel.engine.mesh.join import join, leads, place_of
from fedbilevel.experiment.change import parsed
from fedbilevel.experiment.config import Plan, plans
from fedbilevel.experiment.estimate import duration, estimate
from fedbilevel.experiment.figure import draw_curves
from fedbilevel.experiment.reach import reach
from fedbilevel.experiment.recorded import RunError, choose_metric, find_runs
from fedbilevel.experiment.registry import ConfigError
from fedbilevel.experiment.report import compare
from fedbilevel.experiment.runner import Outcome, Task, naming, run_all

commands = typer.Typer()


def _with_modules_beside(file: pathlib.Path) -> pathlib.Path:
    """An experiment file, whose `kind = "module:name"` may be of a module in the same folder."""
    sys.path.append(str(file.resolve().parent))
    return file


File = Annotated[
    pathlib.Path,
    typer.Argument(help="An experiment file (TOML).", show_default=False, callback=_with_modules_beside),
]
Out = Annotated[
    pathlib.Path | None,
    typer.Option("--out", "-o", help="Folder for the results; default: runs/<name of the file>."),
]
Change = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", help="Change a setting, for example algorithm.upper_lr=0.01.", metavar="KEY=VALUE"
    ),
]
Preset = Annotated[str | None, typer.Option("--preset", "-P", help="Apply one of the file's presets.")]
Only = Annotated[
    list[str] | None, typer.Option("--only", help="Run this variant of the file only; repeatable.")
]
Steps = Annotated[int | None, typer.Option("--steps", "-n", help="Steps, in the place of the file's.")]
EngineName = Annotated[str | None, typer.Option("--engine", "-e", help="simulator, process, mesh, nvflare.")]
Again = Annotated[bool, typer.Option("--again", help="Begin anew where there is a run already.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]


@commands.command()
def run(
    file: File,
    out: Out = None,
    change: Change = None,
    preset: Preset = None,
    only: Only = None,
    seed: Annotated[int | None, typer.Option(help="One seed, in the place of the file's.")] = None,
    steps: Steps = None,
    engine: EngineName = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check it, do one step, estimate the whole; write nothing.")
    ] = False,
    again: Again = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment file: every variant, every seed.

    What is done already is not done again, and what was interrupted goes on.
    """
    todo = plans(
        file,
        preset=preset,
        changes=changes_of(change, steps, engine),
        seeds=None if seed is None else [seed],
        only=only or (),
    )
    if dry_run:
        _estimate(todo)
    else:
        finish(execute(todo, out or usual_folder(file, preset), together=False, again=again, quiet=quiet))


@commands.command()
def sweep(
    file: File,
    parameter: Annotated[
        list[str],
        typer.Option(
            "--parameter", "-p", help="Values to try: algorithm.upper_lr=0.001,0.01", metavar="KEY=A,B,..."
        ),
    ],
    seeds: Annotated[int | None, typer.Option(help="How many seeds, in the place of the file's.")] = None,
    out: Out = None,
    change: Change = None,
    preset: Preset = None,
    only: Only = None,
    steps: Steps = None,
    engine: EngineName = None,
    again: Again = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment for every combination of some settings.

    Runs that differ in numbers only (step sizes, seeds) are one vmapped program.
    """
    todo = plans(
        file,
        preset=preset,
        changes=changes_of(change, steps, engine),
        grid=dict(_values(text) for text in parameter),
        seeds=None if seeds is None else range(seeds),
        only=only or (),
    )
    folder = out or usual_folder(file, "-".join(filter(None, [preset, "sweep"])))
    finish(execute(todo, folder, together=True, again=again, quiet=quiet))


@commands.command()
def resume(
    folder: Annotated[
        pathlib.Path, typer.Argument(help="A run's folder, or one above several.", show_default=False)
    ],
    steps: Annotated[int | None, typer.Option("--steps", "-n", help="Go on until so many steps.")] = None,
    quiet: Quiet = False,
) -> None:
    """Go on with runs that were interrupted, from their last checkpoints, to the same bits.

    Runs of a sweep were one vmapped program; they go on one by one, and agree to rounding.
    """
    found = (
        [folder / "config.toml"] if (folder / "config.toml").exists() else sorted(folder.rglob("config.toml"))
    )
    if not found:
        raise RunError(f"there is no run in {folder}: no folder there has a config.toml")
    tasks = [
        (plan, file.parent) for file in found for plan in plans(file, changes=changes_of(None, steps, None))
    ]
    finish(_go_on(tasks, folder, together=False, again=False, quiet=quiet))


@commands.command("compare")
def compare_runs(
    folders: Annotated[
        list[pathlib.Path], typer.Argument(help="Folders of runs, or above runs.", show_default=False)
    ],
    metric: Annotated[str | None, typer.Option("--metric", "-m", help="A column of the histories.")] = None,
    out: Annotated[pathlib.Path | None, typer.Option("--out", "-o", help="Folder for the figures.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The table as JSON.")] = False,
    no_figures: Annotated[bool, typer.Option("--no-figures", help="Only the table.")] = False,
    level: Annotated[
        float | None, typer.Option("--reach", help="Show what it cost to reach this level of the metric.")
    ] = None,
) -> None:
    """Compare runs at equal rounds, equal bytes and equal oracle calls, and draw their curves."""
    if level is not None:
        if as_json or out is not None:
            raise ConfigError("--reach prints a table only; leave out --json and --out")
        levels = reach(find_runs(folders), level, metric)
        show(levels.table() if is_terminal() else str(levels))
        return
    _compare(folders, metric, None if no_figures else out or folders[0], as_json)


# --------------------------------------------------------------------- parts


def changes_of(change: Sequence[str] | None, steps: int | None, engine: str | None) -> dict[str, object]:
    """What the options change in a file."""
    given = dict(parsed(text) for text in change or ())
    return given | {key: value for key, value in (("steps", steps), ("engine", engine)) if value is not None}


def _values(text: str) -> tuple[str, list[object]]:
    """`key=a,b` as the key and its values; `key=[...]` is a TOML list."""
    key, value = parsed(text)
    if isinstance(value, str):
        return key, [parsed(f"value={part}")[1] for part in value.split(",")]
    return key, value if isinstance(value, list) else [value]


def usual_folder(file: pathlib.Path, addition: str | None) -> pathlib.Path:
    """Where results go if nobody says."""
    return pathlib.Path("runs") / "-".join(filter(None, [file.stem, addition]))


def _join(todo: Sequence[Plan]) -> None:
    """Join the other processes, if there are any: before the first number is computed."""
    others = sorted({plan.config["engine"]["kind"] for plan in todo} - {"mesh"})
    if not others:
        join()
    elif place_of(os.environ) is not None:
        raise ConfigError(
            f"several processes were started, but the engine is {others[0]!r}, and each would do all of the "
            "work: use --engine mesh, or start one"
        )


def _estimate(todo: Sequence[Plan]) -> None:
    _join(todo)
    variants = {plan.variant: plan for plan in reversed(todo)}
    whole = 0.0
    for variant, plan in reversed(variants.items()):
        name, seeds = variant or plan.config["name"], sum(other.variant == variant for other in todo)
        try:
            with naming(plan):
                found = estimate(plan)
        except CannotRunError as error:
            show(f"{name}: n/a, {error}")
            continue
        whole += seeds * found.seconds
        show(f"{name}, {seeds} seed{'s' * (seeds > 1)}, each: {found}")
    show(f"All {len(todo)} runs: about {duration(whole)}")


def execute(todo: Sequence[Plan], out: pathlib.Path, **how: Any) -> list[Outcome]:
    """Run plans in folders below `out` and compare them; the settings are those of `_go_on`."""
    if not todo:
        raise ConfigError("there is nothing to run")
    return _go_on([(plan, out / plan.folder) for plan in todo], out, **how)


def _go_on(
    tasks: Sequence[Task], out: pathlib.Path, *, again: bool, quiet: bool, **how: Any
) -> list[Outcome]:
    _join([plan for plan, _ in tasks])
    outcomes = []
    try:
        for outcome in run_all(tasks, again=again, progress=False if quiet else None, **how):
            outcomes.append(outcome)
            remark(_line(outcome, len(outcomes), len(tasks)))
    except KeyboardInterrupt:
        remark(f"Interrupted. {_how_to_go_on(tasks, out)} goes on from the last checkpoints.")
        raise typer.Exit(130) from None
    try:
        if leads():
            _compare([out], None, out, False)
    except RunError as error:  # the runs are done all the same
        remark(f"No comparison: {error}")
    return outcomes


def _how_to_go_on(tasks: Sequence[Task], out: pathlib.Path) -> str:
    """`resume` knows the runs that have begun; others, and modules beside it, the file alone."""
    waiting = sum(not folder.exists() for _, folder in tasks)
    if not waiting:
        own = any(plan.code for plan, _ in tasks)
        return "The same command again" if own else f"`fedbilevel resume {out}`"
    return f"{waiting} of {len(tasks)} runs have not begun: the same command again begins them, and"


def _line(outcome: Outcome, number: int, of: int) -> str:
    name = outcome.plan.variant or outcome.plan.config["name"]
    how = outcome.status if outcome.fresh else f"{outcome.status} before"
    what = outcome.reason if outcome.result is None else f"{outcome.result.steps} steps"
    return f"[{number}/{of}] {name}, seed {outcome.plan.seed}: {how}, {what}, {outcome.folder}"


def _compare(
    folders: Sequence[pathlib.Path], metric: str | None, figures: pathlib.Path | None, as_json: bool
) -> None:
    runs = find_runs(folders)
    metric = choose_metric(runs, metric)
    comparison = compare(runs, metric)
    text = comparison.to_json() if as_json else str(comparison)
    show(comparison.table() if is_terminal() and not as_json else text)
    if figures is not None:
        figures.mkdir(parents=True, exist_ok=True)
        drawn = draw_curves([run for run in runs if len(run.rows)], metric, figures)
        remark(f"Figures: {drawn[0]} and {len(drawn) - 1} more")


def finish(outcomes: Sequence[Outcome]) -> None:
    """The last word: exit code 1 if a run diverged."""
    broken = [outcome for outcome in outcomes if outcome.status == "diverged"]
    if broken:
        remark(f"{len(broken)} of {len(outcomes)} runs diverged. Smaller step sizes? `fb.diagnose` helps.")
        raise typer.Exit(1)
