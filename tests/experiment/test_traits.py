"""What a method asks of a federation is found by watching it, and its docstring is taken apart."""

from typing import Any

import pytest

from conform.every_verb import EveryVerb
from fedbilevel import algorithm
from fedbilevel.experiment.registry import ALGORITHMS, GROUPS, parameters
from fedbilevel.experiment.traits import documented, traits


def test_a_method_with_a_global_hypergradient() -> None:
    found = traits(algorithm.FedNest)
    assert found.oracles == ("f_x", "f_y", "g_y", "g_yy", "g_xy")
    assert found.second_derivatives
    assert found.strongly_convex
    assert not found.keeps_state
    assert not found.reads_individuals


@pytest.mark.parametrize("name", ["FedAvg", "FedAvgS"])
def test_a_method_of_first_order_on_a_structure_of_its_own(name: str) -> None:
    found = traits(ALGORITHMS[name])
    assert found.oracles
    assert not {"g_yy", "g_xy"} & set(found.oracles)
    assert not any((found.second_derivatives, found.strongly_convex, found.keeps_state))


@pytest.mark.parametrize("name", ["LFedNest", "LFedNestSVRG"])
def test_who_inverts_own_hessians_reads_how_smooth_each_client_is(name: str) -> None:
    assert traits(ALGORITHMS[name]).reads_individuals


def test_state_at_clients_and_single_values_are_seen() -> None:
    found = traits(EveryVerb)
    assert found.keeps_state
    assert found.reads_individuals
    assert "state kept at clients           yes" in str(found)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_can_be_shown(name: str) -> None:
    found = traits(ALGORITHMS[name])
    text, fields = documented(ALGORITHMS[name])
    assert found.oracles
    assert text
    assert set(parameters(ALGORITHMS[name])) <= set(fields), "a setting without a meaning"


@pytest.mark.parametrize("group", [name for name in GROUPS if name not in ("data", "schedules")])
def test_every_setting_has_a_meaning(group: str) -> None:
    silent = {
        name: sorted(set(parameters(thing)) - set(documented(thing)[1]) - {"key"})
        for name, thing in GROUPS[group].items()
    }
    assert {name: settings for name, settings in silent.items() if settings} == {}


def example(a: int, b: int = 2, c: int = 3) -> None:
    """One line.

    More: text.

    Args:
        a: the first
            of them.
        b, c: the others: both.

    Reference: somebody.
    """


def test_a_docstring_is_taken_apart() -> None:
    text, fields = documented(example)
    assert text == "One line.\n\nMore: text.\n\nReference: somebody."
    assert fields == {"a": "the first of them.", "b": "the others: both.", "c": "the others: both."}


def test_a_short_form_of_a_method_says_what_the_method_says() -> None:
    full, short = documented(algorithm.FedNest)[1], documented(algorithm.LFedNest)[1]
    assert short["cohort"] == full["cohort"]
    assert "inner" not in parameters(algorithm.LFedNest), "it is decided"


def test_a_method_that_runs_on_nothing_is_an_error() -> None:
    def stubborn(**_: Any) -> Any:
        """Nothing suits it."""
        return EveryVerb(0.1, cohort=99)

    with pytest.raises(ValueError, match="could not be run on any"):
        traits(stubborn)
