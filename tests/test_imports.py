"""The arrows of the architecture: which part may import which, and a few rules for all of the source."""

import ast
import inspect
import pathlib
import re

import pytest

import fedbilevel

SOURCE = pathlib.Path(fedbilevel.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
PARTS = {"fed", "problem", "data", "local", "adjoint", "algorithm", "engine", "experiment"}

FORBIDDEN = {
    "tree": PARTS | {"draw", "portable"},
    "draw": PARTS | {"tree", "portable"},
    "portable": PARTS | {"tree", "draw"},
    "schedule": PARTS | {"tree", "draw", "portable"},
    "theory": PARTS | {"tree", "draw", "portable"},
    "number": PARTS | {"tree", "draw", "portable", "schedule", "name"},
    "name": PARTS | {"tree", "draw", "portable", "schedule", "number"},
    "selection": PARTS | {"tree", "draw", "portable", "schedule"},
    "fed": PARTS - {"fed"},
    "data": {"problem", "local", "adjoint", "algorithm", "engine", "experiment"},
    "problem": {"local", "adjoint", "algorithm", "engine", "experiment"},
    "adjoint": {"local", "algorithm", "engine", "experiment"},
    "local": {"algorithm", "engine", "experiment"},
    "algorithm": {"engine", "experiment"},
    "engine": {"algorithm", "experiment"},
}


def part_of(file: pathlib.Path) -> str:
    """The part of the architecture that a file belongs to; "" for the package itself."""
    return {"__init__": ""}.get(name := file.relative_to(SOURCE).parts[0].removesuffix(".py"), name)


def imports(file: pathlib.Path) -> set[str]:
    """Full names of all modules and objects that a file imports, wherever in the file it does."""
    package = ["fedbilevel", *file.relative_to(SOURCE).parent.parts]
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def parts_imported(file: pathlib.Path) -> set[str]:
    found = (re.match(r"fedbilevel\.(\w+)", name) for name in imports(file))
    return {match[1] for match in found if match}


def test_the_source_was_found() -> None:
    assert {part_of(file) for file in FILES} >= PARTS | {"tree", "draw", "portable", ""}
    assert parts_imported(SOURCE / "engine" / "base.py") >= {"data", "fed", "problem", "tree"}


@pytest.mark.parametrize("part", FORBIDDEN)
def test_arrows_point_one_way(part: str) -> None:
    wrong = {
        str(file.relative_to(SOURCE)): sorted(parts_imported(file) & FORBIDDEN[part])
        for file in FILES
        if part_of(file) == part and parts_imported(file) & FORBIDDEN[part]
    }
    assert wrong == {}


def test_only_the_face_imports_experiments() -> None:
    users = {part_of(file) for file in FILES if "experiment" in parts_imported(file)}
    assert users <= {"experiment", "", "cli"}


def test_the_architecture_knows_every_part() -> None:
    """A new part must say what it may import."""
    known = set(FORBIDDEN) | {"experiment", "cli", "__main__", ""}
    assert {part_of(file) for file in FILES} <= known


def test_nothing_can_unpickle() -> None:
    unsafe = {"pickle", "cPickle", "_pickle", "marshal", "dill", "cloudpickle", "shelve", "joblib"}
    users = {
        str(file.relative_to(SOURCE)): sorted(
            unsafe & {part for name in imports(file) for part in name.split(".")}
        )
        for file in FILES
    }
    assert {file: names for file, names in users.items() if names} == {}
    allowed = [file for file in FILES if re.search(r"allow_pickle\s*=\s*True", file.read_text())]
    assert allowed == []


def test_no_file_is_too_long() -> None:
    lengths = {str(file.relative_to(SOURCE)): len(file.read_text().splitlines()) for file in FILES}
    assert {file: length for file, length in lengths.items() if length > 400} == {}


@pytest.mark.parametrize("name", fedbilevel.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    thing = getattr(fedbilevel, name)
    text = vars(thing).get("__doc__") if isinstance(thing, type) else inspect.getdoc(thing)
    assert text
    assert text.strip()
    assert not text.startswith(f"{name}("), "made by dataclass, not written"
