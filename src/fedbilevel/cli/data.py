"""Commands about data: what there is, how to get it, and how clients would share it."""

from __future__ import annotations

import json
import pathlib
from typing import Annotated

import typer
from rich.table import Table

from fedbilevel.cli.say import remark, show
from fedbilevel.data.describe import describe
from fedbilevel.data.source import SOURCES, get
from fedbilevel.experiment.build import data_of, data_table
from fedbilevel.experiment.change import merged, parsed, tree_of
from fedbilevel.experiment.config import plans
from fedbilevel.experiment.registry import ConfigError

commands = typer.Typer(help="Data sets: list, get, describe.", no_args_is_help=True)

Dir = Annotated[
    pathlib.Path | None, typer.Option("--dir", help="Folder of data; default: a cache of the user's.")
]


@commands.command("list")
def list_sources() -> None:
    """The data sets that can be loaded by name."""
    table = Table(box=None, pad_edge=False)
    for title in ("name", "what it is", "licence"):
        table.add_column(title, overflow="fold")
    for name, source in SOURCES.items():
        table.add_row(name, source.description, source.licence)
    show(table)


@commands.command("get")
def get_source(name: str, dir: Dir = None) -> None:
    """Download a data set, checked, into the folder of data."""
    remark(f"{name} is in {get(name, dir)}")


@commands.command("describe")
def describe_data(
    source: Annotated[
        str, typer.Argument(help="An experiment file, or the name of a data set.", show_default=False)
    ],
    change: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="For example partition.clients=5."),
    ] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", "-P", help="Apply one of the file's presets.")
    ] = None,
    picture: Annotated[
        pathlib.Path | None, typer.Option(help="Draw clients and classes into this PNG file.")
    ] = None,
    dir: Dir = None,
) -> None:
    """How many samples of which class every client has, at each level, and how much clients differ."""
    changes = dict(parsed(text) for text in change or ())
    if dir is not None:
        changes["dir"] = str(dir)
    tables = _tables(source, changes, preset)
    for number, (title, table) in enumerate(tables, start=1):
        dataset, clients, *_ = data_of(table)
        statistics = describe(clients, dataset.classes)
        show(f"{title}\n{statistics}")
        if picture is not None:
            own = picture if len(tables) == 1 else picture.with_stem(f"{picture.stem}-{number}")
            statistics.draw(own)
            remark(f"Picture of {title}: {own}")


def _tables(
    source: str, changes: dict[str, object], preset: str | None
) -> list[tuple[str, dict[str, object]]]:
    """The `[data]` tables that a source has, each once, and what they belong to."""
    if not source.endswith(".toml"):
        usual = {"name": source, "partition": {"kind": "Iid", "clients": 10}}
        return [(source, merged(usual, tree_of(changes)))]
    found: dict[str, tuple[str, dict[str, object]]] = {}
    dotted = {f"data.{key}": value for key, value in changes.items()}
    for plan in plans(source, preset=preset, changes=dotted):
        if "data" not in plan.config:
            raise ConfigError(f"{source} has no [data]: its problem makes its own")
        table = data_table(plan)
        found.setdefault(json.dumps(table | {"seed": 0}), (plan.variant or source, table))
    return list(found.values())
