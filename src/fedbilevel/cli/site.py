"""The command with which a site says what it has and what it agrees to."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import typer

from fedbilevel.algorithm.probe import CurvatureProbe, OwnCurvatureProbe
from fedbilevel.cli.run import Change, Only, Preset, changes_of
from fedbilevel.cli.say import remark, show
from fedbilevel.engine.agreement import digest, fingerprint
from fedbilevel.engine.configuration import agreed_parts
from fedbilevel.engine.nvflare.job import allow
from fedbilevel.engine.nvflare.settings import write_settings
from fedbilevel.engine.own_data import Levels, own_levels
from fedbilevel.experiment.build import build
from fedbilevel.experiment.config import Plan, plans
from fedbilevel.experiment.evaluate import Evaluator
from fedbilevel.experiment.registry import ConfigError
from fedbilevel.portable import Json, pack

commands = typer.Typer()


@commands.command()
def site(
    kit: Annotated[
        pathlib.Path,
        typer.Argument(help="The startup kit of the site, or of the server.", show_default=False),
    ],
    file: Annotated[
        pathlib.Path | None,
        typer.Argument(
            help="The experiment file that this site agrees to: its own copy.", show_default=False
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Its own data: module:function, or a folder with lower.npz, upper.npz, ..."),
    ] = None,
    change: Change = None,
    preset: Preset = None,
    only: Only = None,
    start: Annotated[bool, typer.Option("--start", help="Start it, too.")] = False,
) -> None:
    """Make a startup kit ready to take part: allow our two classes, name the data, agree to an experiment.

    It then runs the programs of that experiment and nothing else; without a file, any of this library.
    Nothing is sent anywhere: the settings are in the kit's own `local` folder.
    """
    if not any((kit / "startup" / f"fed_{role}.json").exists() for role in ("client", "server")):
        raise ConfigError(
            f"{kit} is no startup kit of a site or server: there is no startup/fed_client.json in it"
        )
    local = kit / "local"
    allow(local)
    if (kit / "startup" / "fed_client.json").exists():
        source = None if data is None else _absolute(data)
        if source is not None:
            _show_data(own_levels(source, kit.name))
        changes = changes_of(change, None, None)
        agreed = (
            None if file is None else _agreed(plans(file, preset=preset, changes=changes, only=only or ()))
        )
        write_settings(local, data=source, agreed=agreed)
    _begin(kit, start)


def _absolute(data: str) -> str:
    """A folder as seen from anywhere: NVFlare starts a site in a folder of its own."""
    return str(pathlib.Path(data).resolve()) if pathlib.Path(data).is_dir() else data


def _show_data(levels: Levels) -> None:
    """What the driver will get to know about the data."""
    for level, tree in levels.items():
        shapes = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape[1:])}", tree)
        show(f"{level}: {len(jax.tree.leaves(tree)[0])} samples of {shapes}")


def _agreed(todo: Sequence[Plan]) -> list[Json]:
    """The fingerprints of all configurations that the plans need, each once."""
    found: dict[str, Json] = {}
    for plan in todo:
        with jax.enable_x64(plan.config["precision"] == "float64"):
            for configuration in _configurations(plan):
                print_of = fingerprint(*pack(configuration))
                found.setdefault(digest(print_of), print_of)
    show(f"Agreed to {len(found)} configurations: {', '.join(found)}")
    return list(found.values())


def _configurations(plan: Plan) -> list[dict[str, Any]]:
    """What a driver will ask a site to set up for a plan: the run itself, and measurements before it."""
    problem, clients, algorithm, *_ = build(plan)
    algorithm = algorithm.among(clients.n).on(problem)
    probes = Evaluator(problem, plan.config.get("measure", ())).probes
    before = [CurvatureProbe(), OwnCurvatureProbe()] if algorithm.needs_smoothness else []
    return [agreed_parts(problem, algorithm, probes), *(agreed_parts(problem, probe, ()) for probe in before)]


def _begin(kit: pathlib.Path, start: bool) -> None:
    script = kit / "startup" / "start.sh"
    if start:
        subprocess.run(["bash", str(script)], check=True)
    else:
        remark(f"Ready. Start it with {script}, or with --start")
