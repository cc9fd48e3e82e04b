"""The command that runs an experiment at the sites of an NVFlare federation."""

from __future__ import annotations

import pathlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer

from fedbilevel.cli.run import (
    Again,
    Change,
    File,
    Only,
    Out,
    Preset,
    Quiet,
    Steps,
    changes_of,
    execute,
    finish,
    usual_folder,
)
from fedbilevel.cli.say import remark
from fedbilevel.engine.nvflare.engine import NVFlare
from fedbilevel.engine.nvflare.job import JobLostError
from fedbilevel.experiment.build import Built
from fedbilevel.experiment.config import Plan, plans
from fedbilevel.experiment.runner import Outcome

commands = typer.Typer()


@commands.command()
def federate(
    file: File,
    env: Annotated[
        str,
        typer.Option(
            help="Where the sites are: sim (processes of this machine), poc (provisioned ones on it, with "
            "certificates), or the folder of an administrator's startup kit."
        ),
    ] = "sim",
    data: Annotated[
        Literal["file", "sites"] | None,
        typer.Option(
            help="Whose data: each site gets its share of the file's, or has its own; default: file for sim "
            "and poc, sites for a startup kit."
        ),
    ] = None,
    site: Annotated[
        list[str] | None,
        typer.Option(
            help="The name of a site, in the order of the clients; default: all that are connected."
        ),
    ] = None,
    out: Out = None,
    change: Change = None,
    preset: Preset = None,
    only: Only = None,
    seed: Annotated[int | None, typer.Option(help="One seed, in the place of the file's.")] = None,
    steps: Steps = None,
    min_clients: Annotated[int, typer.Option(help="Fewer answers in an exchange end the run.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a site's answer.")] = 600.0,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds after which an exchange goes on without who is late.")
    ] = None,
    retries: Annotated[int, typer.Option(help="Repetitions of a message before a site is given up.")] = 2,
    resubmit: Annotated[int, typer.Option(help="New jobs in the place of one that was lost.")] = 10,
    again: Again = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment file at the sites of an NVFlare federation.

    If the job is lost a new one goes on from the last checkpoints. At the end it says who was left out.
    """
    own = (data or ("file" if env in ("sim", "poc") else "sites")) == "sites"
    env = env if env in ("sim", "poc") else str(pathlib.Path(env).resolve())
    where = {"engine.kind": "nvflare", "engine.env": env, "engine.own_data": own, "engine.sites": site or []}
    todo = plans(
        file,
        preset=preset,
        changes=changes_of(change, steps, None) | where,  # so that `resume` finds the sites, too
        seeds=None if seed is None else [seed],
        only=only or (),
    )
    options: dict[str, Any] = {"min_clients": min_clients, "timeout": timeout, "retries": retries}
    engine = NVFlare(env, sites=site or (), own_data=own, rejoin=True, deadline=deadline, **options)
    folder = out or usual_folder(file, "-".join(filter(None, [preset, "federate"])))
    outcomes = _persist(todo, folder, engine, resubmit=resubmit, again=again, quiet=quiet)
    _summary(outcomes, engine)
    finish(outcomes)


def _persist(
    todo: Sequence[Plan], out: pathlib.Path, engine: NVFlare, *, resubmit: int, again: bool, quiet: bool
) -> Sequence[Outcome]:
    """Run all plans; a lost job is submitted again, and what is done or begun is not done again."""

    def placed(built: Built) -> Built:
        return built._replace(engine=engine)  # one job for all of them

    with engine:
        for left in range(resubmit, -1, -1):
            try:
                return execute(todo, out, together=False, again=again, quiet=quiet, adapt=placed)
            except JobLostError as error:
                if not left:
                    raise
                remark(f"{error} A new job goes on from the last checkpoints.")
                again = False
    raise AssertionError("the loop returns or raises")


def _summary(outcomes: Sequence[Outcome], engine: NVFlare) -> None:
    """What travelled, and who was left out why."""
    results = [outcome.result for outcome in outcomes if outcome.fresh and outcome.result is not None]
    payload = sum(result.ledger.bytes for result in results)
    down, up = engine.wire
    remark(f"On the wire: {down:,} bytes down and {up:,} up; payload by the ledgers: {payload:,}")
    reasons = Counter(_reason(line) for result in results for line in result.failures)
    for reason, times in reasons.most_common():
        remark(f"Left out {times}×: {reason}")


def _reason(line: str) -> str:
    """A report without what it was asked for: the same trouble is the same line."""
    return re.sub(r" \(asked for [^()]*\)$", "", line)
