"""The demonstration: tune the loss of a long-tailed, non-iid federated classifier."""

from __future__ import annotations

import importlib.resources
import pathlib
import tempfile
from typing import Annotated

import typer

from fedbilevel.cli.say import is_terminal, remark, show
from fedbilevel.experiment.config import plans
from fedbilevel.experiment.figure import draw_curves
from fedbilevel.experiment.recorded import find_runs
from fedbilevel.experiment.report import Comparison, compare
from fedbilevel.experiment.runner import run_all

commands = typer.Typer()

METRIC = "balanced_accuracy"


@commands.command()
def demo(
    out: Annotated[
        pathlib.Path | None,
        typer.Option("--out", "-o", help="Folder for the results; default: a temporary one."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """The main job on embedded data, in about a minute: tune a training loss over clients' data.

    Twenty clients hold few classes each, and some classes are rare. The loss they train with is tuned so
    that all classes do well. Its direct gradient is zero: all that is learnt comes through the hypergradient.
    """
    folder = out or pathlib.Path(tempfile.mkdtemp(prefix="fedbilevel-demo-"))
    with importlib.resources.as_file(
        importlib.resources.files("fedbilevel.experiment") / "demo.toml"
    ) as file:
        todo = plans(file)
    for outcome in run_all(
        [(plan, folder / plan.folder) for plan in todo], progress=False if quiet else None
    ):
        remark(f"{outcome.plan.variant}: {outcome.status}")
    runs = find_runs(folder)
    comparison = compare(runs, METRIC)
    figures = draw_curves(runs, METRIC, folder)
    show(comparison.table() if is_terminal() else str(comparison))
    show(f"Written: {folder} (figure: {figures[0]})")
    show(finding(comparison))


def finding(comparison: Comparison) -> str:
    """In one sentence, what the demonstration found."""
    end = {line.variant: line.scores["end"].mean for line in comparison.lines}
    return (
        f"With the plain loss the classes reach a mean accuracy of {end['not tuned']:.1%}; tuned by FedNest, "
        f"which exchanges vectors to invert the mean Hessian, {end['FedNest']:.1%}; by LFedNest, where "
        f"every client inverts its own, {end['LFedNest']:.1%}."
    )
