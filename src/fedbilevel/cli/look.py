"""Commands that look things up: what there is, what it needs, and what to cite."""

from __future__ import annotations

import inspect
import pathlib
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from fedbilevel import algorithm
from fedbilevel.algorithm import Algorithm
from fedbilevel.cli.run import File
from fedbilevel.cli.say import show
from fedbilevel.data.source import Source
from fedbilevel.experiment.citation import bibtex
from fedbilevel.experiment.config import plans
from fedbilevel.experiment.registry import (
    ALGORITHMS,
    GROUPS,
    SCHEDULES,
    ConfigError,
    find,
    parameters,
)
from fedbilevel.experiment.traits import documented, traits
from fedbilevel.name import nearest

commands = typer.Typer()


@commands.command("list")
def list_names(
    group: Annotated[str | None, typer.Argument(help=f"One of: {', '.join(GROUPS)}, papers.")] = None,
) -> None:
    """What there is: algorithms, problems, models, data, partitions, links, decoders, engines and more."""
    everything = {**GROUPS, "papers": _papers()}
    if group is not None and group not in everything:
        raise ConfigError(
            f"there is no group {group!r}{nearest(group, everything) or '.'} "
            f"There are: {', '.join(everything)}"
        )
    for title in [group] if group else everything:
        table = Table(title=title, title_justify="left", show_header=False, box=None, title_style="bold")
        for name, thing in everything[title].items():
            table.add_row(name, Text(_summary(thing)))
        show(table)


@commands.command("show")
def show_name(
    name: Annotated[
        str, typer.Argument(help="A name that `list` shows, or module:name.", show_default=False)
    ],
) -> None:
    """All about one name: its settings with the papers' symbols, its cost, its needs, its reference."""
    named = {key: thing for group in GROUPS.values() for key, thing in group.items()}
    known = {key: getattr(algorithm, key) for key in algorithm.__all__} | named  # others refer to these, too
    if name not in known and ":" not in name:
        raise ConfigError(
            f"there is no {name!r}{nearest(name, known) or '.'} `fedbilevel list` shows all names."
        )
    thing = known[name] if name in known else find(name, {}, "name")
    if not (callable(thing) or isinstance(thing, Source)):
        raise ConfigError(f"{name} is no class or function, but {thing!r}")
    if isinstance(thing, Source):
        show(_of_source(thing))
        return
    text, fields = documented(thing)
    show(f"{name}\n\n{text}\n")
    show(_settings(thing, fields))
    if name in ALGORITHMS or (name not in known and isinstance(thing, type) and issubclass(thing, Algorithm)):
        show(f"\nneeds\n{traits(thing)}")


@commands.command()
def cite(
    file: File,
) -> None:
    """BibTeX of what an experiment uses."""
    configs = [plan.config for plan in plans(file)]
    named = (name for config in configs for name in (config.get("data", {}).get("name", ""), *_kinds(config)))
    show(bibtex(dict.fromkeys("optax" if name in SCHEDULES else name for name in named)))


def _kinds(value: Any) -> Iterator[str]:
    """All kinds that a configuration names."""
    if isinstance(value, dict):
        yield from (str(value[key]) for key in ("kind",) if key in value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        yield from _kinds(item)


def _of_source(source: Source) -> str:
    return (
        f"{source.name}\n\n{source.description}\n\nsize       {source.size}\nlicence    {source.licence}\n"
        f"reference  {source.reference}\nto get it  {source.how_to_get}"
    )


def _papers() -> dict[str, str]:
    """The experiment files that stand in the folder `papers` here, with their descriptions."""
    files = sorted(pathlib.Path("papers").rglob("*.toml"))
    if not files:
        return {"(none here)": "the papers' files are in the folder papers of fedbilevel's repository"}
    return {str(file): _first_comment(file) for file in files}


def _first_comment(file: pathlib.Path) -> str:
    return file.read_text().partition("\n")[0].lstrip("# ")


def _summary(thing: Any) -> str:
    if isinstance(thing, str):
        return thing
    text = thing.description if hasattr(thing, "description") else inspect.getdoc(thing) or ""
    return str(text).partition("\n")[0]


def _settings(factory: Any, fields: dict[str, str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("setting", "default", "meaning"):
        table.add_column(title, overflow="fold")
    for name, parameter in parameters(factory).items():
        if name == "key":  # the runner's business
            continue
        needed = parameter.default is inspect.Parameter.empty
        default = "needed" if needed else repr(parameter.default)
        table.add_row(name, Text(default), Text(fields.get(name, "")))  # "[i, j]" is no markup
    return table
