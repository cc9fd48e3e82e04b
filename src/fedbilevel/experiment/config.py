"""Experiment files: one TOML file describes several runs, one for each variant and seed.

name = "FedNest, figure 2a"
steps = 500
seeds = [0, 1, 2]

[problem]                          # kind, and the arguments of the class of that name
[data]                             # name, partition, split, ... : the arguments of `federate`
[algorithm]
[engine]

[presets.small]                    # changes for `--preset small`; `only` names the variants that it has
[variants."LFedNest"]              # changes, one run folder for each variant
[grid]                             # "algorithm.upper_lr" = [0.01, 0.1]: every combination
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import json
import pathlib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tomli_w

from fedbilevel.experiment.change import merged, tree_of
from fedbilevel.experiment.construct import Table, check_keys, with_defaults
from fedbilevel.experiment.engines import ENGINES
from fedbilevel.experiment.own_code import fingerprints
from fedbilevel.experiment.registry import (
    ALGORITHMS,
    PROBLEMS,
    ConfigError,
    Factory,
    find,
    parameters,
)
from fedbilevel.experiment.run import usual_interval
from fedbilevel.name import nearest

TABLES: Mapping[str, Mapping[str, Factory]] = {
    "problem": PROBLEMS,
    "algorithm": ALGORITHMS,
    "engine": ENGINES,
}
_SETTINGS = (
    *("name", "description", "variant", "steps", "every", "seeds", "seed", "precision", "measure", "loggers"),
    *("data", "problem", "algorithm", "engine", "best", "checkpoint"),
)
_SCRIPT = ("presets", "variants", "grid")
_NOT_HASHED = ("name", "description", "variant", "loggers", "checkpoint", "steps", "every")
"""What does not change the numbers of a run (more steps only continue it)."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run: its settings with every variant, preset and option applied.

    Attributes:
        source: the file it came from.
        config: the tables, complete: `config.toml` of the run's folder.
        code: what the user's own modules contained when the plan was made, which is when they are imported.
    """

    source: str
    config: Table
    code: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def variant(self) -> str:
        """What distinguishes it from the other runs of its file, but for the seed."""
        return str(self.config["variant"])

    @property
    def place(self) -> str:
        """The file, and which of its runs, for errors."""
        return f"{self.source} ({self.variant})" if self.variant else self.source

    @property
    def seed(self) -> int:
        """Of the run."""
        return int(self.config["seed"])

    @property
    def folder(self) -> str:
        """Where it goes, below the folder of the whole experiment."""
        slug = re.sub(r"[^\w.=+-]+", "-", self.variant).strip("-.").lower()
        return f"{slug}/seed-{self.seed}" if slug else f"seed-{self.seed}"

    @property
    def hash(self) -> str:
        """Two runs with the same hash give the same numbers, as far as both go."""
        ignored = set(_NOT_HASHED) - ({"every"} if "patience" in self.config.get("best", {}) else set())
        relevant = {key: value for key, value in self.config.items() if key not in ignored}
        if self.code:
            relevant["modules"] = dict(self.code)
        return hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def toml(self) -> str:
        """The settings as a file that can be run itself."""
        return tomli_w.dumps(self.config)


def read(path: str | pathlib.Path) -> Table:
    """The tables of a file, not yet checked."""
    try:
        return tomllib.loads(pathlib.Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from None


def plans(
    path: str | pathlib.Path,
    *,
    preset: str | None = None,
    changes: Mapping[str, Any] | None = None,
    grid: Mapping[str, Sequence[Any]] | None = None,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] = (),
) -> list[Plan]:
    """All runs that a file describes, in order.

    Args:
        path: the file.
        preset: the name of one of its presets.
        changes: dotted key -> value, applied last (`--set`).
        grid: dotted key -> values, beside the file's own `[grid]`.
        seeds: in the place of the file's.
        only: names of variants; default: those in the preset's `only`, or all.
    """
    try:
        found = list(
            _plans(read(path), str(path), preset, dict(changes or {}), dict(grid or {}), seeds, only)
        )
        _check_folders(found)
        return found
    except ConfigError as error:
        prefix = (
            ""
            if str(error).startswith(f"{path}") or str(error).startswith("there is no file")
            else f"{path}: "
        )
        raise ConfigError(f"{prefix}{error}") from None


def _check_folders(found: Sequence[Plan]) -> None:
    folders: dict[str, Plan] = {}
    for plan in found:
        other = folders.setdefault(plan.folder, plan)
        if other is not plan:
            raise ConfigError(
                f"the variants {other.variant!r} and {plan.variant!r} have the same folder {plan.folder!r}; "
                "rename one, or name a seed only once"
            )


def _plans(
    config: Table,
    source: str,
    preset: str | None,
    changes: dict[str, Any],
    grid: dict[str, Sequence[Any]],
    seeds: Sequence[int] | None,
    only: Sequence[str],
) -> Iterator[Plan]:
    check_keys(config, (*_SETTINGS, *_SCRIPT), "")
    _check_changes(changes)
    script = {key: _tables(config.pop(key, {}), key) for key in _SCRIPT}
    chosen = copy.deepcopy(_pick(script["presets"], preset, "preset")) if preset else {}
    preset_variants, wanted = chosen.pop("variants", {}), _names(chosen.pop("only", []), preset)
    for name in preset_variants:
        _pick(script["variants"], name, "variant")
    grid = {**script["grid"], **chosen.pop("grid", {}), **grid}
    if both := sorted(grid.keys() & changes):
        raise ConfigError(f"{both[0]} is set, and varied by the grid; remove one of them")
    base = merged(config, chosen)
    for name, change in _variants(script["variants"], only or wanted):
        special = merged(merged(base, change), preset_variants.get(name, {}))
        for point in _points(grid):
            settings = merged(special, tree_of({**point, **changes}))
            settings["variant"] = ", ".join(
                filter(None, [name or settings.get("variant", ""), *_labels(point)])
            )
            for seed in seeds if seeds is not None else _seeds(settings):
                yield _plan(source, settings | {"seed": int(seed)})


def _plan(source: str, settings: Table) -> Plan:
    try:
        config = complete(settings)
        return Plan(source, config, fingerprints({key: config.get(key) for key in ("data", *TABLES)}))
    except ConfigError as error:
        variant = settings["variant"]
        raise ConfigError(f"{source} ({variant}): {error}" if variant else str(error)) from None


def _check_changes(changes: Mapping[str, Any]) -> None:
    for key in changes:
        if (table := key.partition(".")[0]) in _SCRIPT:
            raise ConfigError(
                f"{key} cannot be set from outside: [{table}] is a part of the file. `--preset`, `--only` "
                "and `fedbilevel sweep -p algorithm.upper_lr=0.01,0.1` choose runs and make more of them."
            )


def _names(value: Any, preset: str | None) -> list[str]:
    """The variants that a preset has: all if it names none."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"presets.{preset}.only is {value!r}; it must be a list of names of variants")
    return value


def _tables(value: Any, key: str) -> Table:
    """`[presets]`, `[variants]` or `[grid]`, as they must be."""
    inside = () if key == "grid" or not isinstance(value, dict) else value.values()
    if not isinstance(value, dict) or not all(isinstance(item, dict) for item in inside):
        raise ConfigError(f"{key} is {value!r}; it must be a table" + (" of tables" if key != "grid" else ""))
    return value


def complete(settings: Table) -> Table:
    """Settings with all defaults written out; raises errors for what is missing or unknown."""
    settings = {key: value for key, value in settings.items() if key != "seeds"}
    check_settings(settings)
    steps = settings["steps"]
    usual = {
        "name": "experiment",
        "precision": "float32",
        "every": usual_interval(steps),
        "engine": "simulator",
    }
    settings = usual | settings
    tables = {key: with_defaults(settings[key], group, key) for key, group in TABLES.items()}
    for key, table in tables.items():
        check_keys(table, {*parameters(find(table["kind"], TABLES[key], key)), "kind"}, key)
    return settings | tables


_TYPES: Mapping[str, tuple[type, str]] = {
    **dict.fromkeys(("name", "description", "variant", "precision"), (str, "a string")),
    **dict.fromkeys(("steps", "every", "seed"), (int, "a whole number")),
    **dict.fromkeys(("measure", "loggers"), (list, "a list of names")),
    **dict.fromkeys(("data", "best", "checkpoint"), (dict, "a table")),
}
_LIMITS = {"steps": (0, 2**62), "every": (1, 2**31), "seed": (0, 2**32 - 1)}


def check_settings(settings: Table) -> None:
    """Raise an error for keys that are unknown, missing, or of a wrong type."""
    check_keys(settings, _SETTINGS, "")
    for key in ("problem", "algorithm", "steps"):
        if key not in settings:
            raise ConfigError(f"{key} is missing")
    for key, (kind, said) in _TYPES.items():
        value = settings.get(key, kind())
        low, high = _LIMITS.get(key, (0, 0))
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"{key} is {value!r}; it must be {said}")
        if key in _LIMITS and key in settings and not low <= settings[key] <= high:
            raise ConfigError(f"{key} is {value}; it must lie between {low} and {high}")
    if settings.get("precision", "float32") not in ("float32", "float64"):
        raise ConfigError(f'precision is {settings["precision"]!r}; it must be "float32" or "float64"')
    check_keys(settings.get("checkpoint", {}), ("keep", "every"), "checkpoint")
    for key, value in settings.get("checkpoint", {}).items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"checkpoint.{key} is {value!r}; it must be a whole number of at least 1")


def _pick(table: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in table:
        known = ", ".join(table) or "none"
        raise ConfigError(f"there is no {what} {name!r}{nearest(name, table) or '.'} The file has: {known}")
    return table[name]


def _variants(variants: Mapping[str, Any], only: Sequence[str]) -> list[tuple[str, Table]]:
    if only:
        return [(name, _pick(variants, name, "variant")) for name in only]
    return list(variants.items()) or [("", {})]


def _points(grid: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for key, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise ConfigError(f'grid."{key}" must be a list of values; it is {values!r}')
    for combination in itertools.product(*grid.values()):
        yield dict(zip(grid, combination, strict=True))


def _labels(point: Mapping[str, Any]) -> list[str]:
    return [f"{key.rsplit('.', 1)[-1]}={value}" for key, value in point.items()]


def _seeds(settings: Mapping[str, Any]) -> list[int]:
    seeds = settings.get("seeds", [settings.get("seed", 0)])
    if type(seeds) is int and seeds >= 1:
        return list(range(seeds))
    if isinstance(seeds, list) and seeds and all(type(seed) is int for seed in seeds):
        return seeds
    raise ConfigError(f"seeds is {seeds!r}; it must be a list of whole numbers, or how many there are")
