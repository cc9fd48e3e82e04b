"""Citations: every name that has a source gets it, once, in valid BibTeX."""

import inspect
import pathlib
import re
from collections.abc import Iterable

import pytest

from fedbilevel.experiment.citation import CITED, bibtex
from fedbilevel.experiment.registry import GROUPS, SCHEDULES

ALWAYS = ["fedbilevel", "bradbury2018jax", "kidger2021equinox"]
BIB = pathlib.Path(__file__).parents[2] / "src" / "fedbilevel" / "experiment" / "references.bib"


def keys(names: Iterable[str]) -> list[str]:
    return re.findall(r"^@\w+\{([^,]+),$", bibtex(names), re.MULTILINE)


def test_the_software_is_always_cited() -> None:
    assert keys([]) == ALWAYS


def test_names_without_an_entry_are_not_cited() -> None:
    assert keys(["Quadratic", "simulator", "", "fednest", "emnist"]) == ALWAYS


CASES = {
    "FedNest": ["tarzanagh2022fednest"],
    "LFedNestNonAlt": ["tarzanagh2022fednest"],
    "FedBiO": ["li2023communication"],
    "FedBiOAccLocal": ["li2023communication"],
    "StocBiO": ["ji2021bilevel"],
    "MRBO": ["yang2021provably"],
    "CommFedBiO": ["li2022communication"],
    "QFFL": ["li2020fair"],
    "DataCleaning": ["li2023communication", "franceschi2017forward"],
    "FairClients": ["li2023communication", "li2020fair"],
    "AgnosticClients": ["mohri2019agnostic"],
    "FedAvg": ["mcmahan2017communication"],
    "FedAvgS": ["hou2021efficient", "deng2021local"],
    "SimFBO": ["yang2023simfbo"],
    "FedMSA": ["tarzanagh2023federated"],
    "HyperRepresentation": ["tarzanagh2022fednest", "franceschi2018bilevel"],
    "LossTuning": ["tarzanagh2022fednest", "kini2021label", "li2021autobalance"],
    "mnist-mini": ["lecun1998gradient"],
    "emnist-letters": ["cohen2017emnist"],
    "emnist-byclass": ["cohen2017emnist"],
    "cifar100": ["krizhevsky2009learning"],
    "Dirichlet": ["marfoq2021federated"],
    "Pachinko": ["reddi2021adaptive"],
}


@pytest.mark.parametrize("name", CASES)
def test_a_name_is_cited(name: str) -> None:
    assert keys([name]) == ALWAYS + CASES[name]


def test_whatever_names_a_reference_is_cited() -> None:
    registered = {name: thing for group in GROUPS.values() for name, thing in group.items()}
    named = {name for name, thing in registered.items() if "Reference" in (inspect.getdoc(thing) or "")}
    assert len(named) > 40
    assert named - CITED.keys() <= SCHEDULES.keys(), "schedules are optax's own"


def test_entries_occur_once_and_in_an_order_of_their_own() -> None:
    names = ["mnist", "Shards", "FedNest", "FedAvg", "LFedNest", "mnist-mini"]
    assert keys(names) == keys(reversed(names)) == keys([*names, *names])
    assert sorted(keys(names)[3:]) == [
        "lecun1998gradient",
        "mcmahan2017communication",
        "tarzanagh2022fednest",
    ]


def test_the_table_and_the_entries_agree() -> None:
    """Neither a key without an entry nor an entry that nothing can cite."""
    written = re.findall(r"^@\w+\{([^,]+),", BIB.read_text("utf-8"), re.MULTILINE)
    assert len(set(written)) == len(written)
    assert set(written) == {*ALWAYS, *(key for used in CITED.values() for key in used)}


def test_every_entry_is_well_formed() -> None:
    entries = bibtex(name.replace("*", "letters") for name in CITED).split("\n\n")
    assert len(entries) == len({*ALWAYS, *(key for used in CITED.values() for key in used)})
    needed = {
        "article": {"title", "author", "journal", "year"},
        "inproceedings": {"title", "author", "booktitle", "year"},
        "techreport": {"title", "author", "institution", "year"},
        "misc": {"title", "author"},
    }
    for entry in entries:
        kind = entry[1 : entry.index("{")]
        fields = re.findall(r"^  (\w+) += \{.+\},?$", entry, re.MULTILINE)
        assert needed[kind] <= set(fields)
        assert len(fields) == len(set(fields)) == entry.strip().count("\n") - 1
        assert entry.count("{") == entry.count("}")
        assert entry.isascii()  # older BibTeX reads nothing else


def test_this_library_is_cited_as_it_asks_to_be() -> None:
    asked = (BIB.parents[3] / "CITATION.cff").read_text("utf-8")
    entry = bibtex([]).split("\n\n")[0].replace("{", "").replace("}", "")
    for field in ("title", "version"):
        value = re.search(rf'^{field}: "?(.*?)"?$', asked, re.MULTILINE)
        assert value
        assert value[1] in entry
