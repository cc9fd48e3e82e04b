"""Tables to objects: kinds, arguments, defaults, and what is said of mistakes."""

import dataclasses
from typing import Any

import optax
import pytest

import fedbilevel as fb
from fedbilevel.data.partition import Iid, Shards
from fedbilevel.experiment.construct import check_keys, construct, nested, with_defaults
from fedbilevel.experiment.registry import ALGORITHMS, GROUPS, NESTED, ConfigError, find, parameters


@dataclasses.dataclass(frozen=True)
class Thing:
    """A factory of a test."""

    size: int
    name: str = "usual"
    parts: tuple[float, ...] = (1.0, 2.0)
    inner: Any = None
    flag: bool = False

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size is {self.size}; it must be at least 0")


THINGS = {"Thing": Thing}


def test_a_table_is_a_call() -> None:
    assert construct({"kind": "Thing", "size": 3, "parts": [5.0]}, THINGS, "thing") == Thing(3, parts=(5.0,))


def test_a_string_is_a_kind_without_arguments() -> None:
    assert construct("Iid", {"Iid": lambda clients=4: clients}, "thing") == 4
    assert isinstance(construct("simulator", GROUPS["engines"], "engine"), fb.Simulator)


def test_tables_inside_become_objects() -> None:
    table = {"kind": "Thing", "size": 1, "inner": {"deep": [{"kind": "Shards", "clients": 2, "each": 3}]}}
    assert construct(table, THINGS, "thing").inner == {"deep": (Shards(2, 3),)}
    assert nested({"kind": "Iid", "clients": 3}, "data.partition") == Iid(3)
    assert nested([1, "a", {"b": 2}], "x") == (1, "a", {"b": 2})


def test_a_schedule_is_a_step_size() -> None:
    decay = {"kind": "exponential_decay", "init_value": 0.5, "transition_steps": 2, "decay_rate": 0.1}
    table = {"kind": "FedAvgS", "upper_lr": decay, "lower_lr": 0.1}
    method = construct(table, ALGORITHMS, "algorithm")
    for step in (0, 3):
        assert method.at(step).upper_lr == pytest.approx(optax.exponential_decay(0.5, 2, 0.1)(step))


def test_a_step_size_may_be_a_word_that_the_method_knows() -> None:
    table = {"kind": "PDBO", "links": "Ring", "lower_lr": 0.1, "lower_steps": 2, "terms": 3}
    assert construct(table | {"adjoint_lr": "last"}, ALGORITHMS, "algorithm").adjoint_lr == "last"
    written = with_defaults(table, ALGORITHMS, "algorithm")
    assert construct(written, ALGORITHMS, "algorithm").adjoint_lr == "first"
    with pytest.raises(
        ConfigError, match=r"algorithm\.adjoint_lr\.kind: there is no adjoint_lr 'lst'.*'last'"
    ):
        construct(table | {"adjoint_lr": "lst"}, ALGORITHMS, "algorithm")


def test_the_surroundings_supply_what_the_table_does_not() -> None:
    given = {"size": lambda: 7, "name": lambda: "given", "unknown": lambda: pytest.fail("nobody asked")}
    assert construct("Thing", THINGS, "thing", given) == Thing(7, "given")
    assert construct({"kind": "Thing", "name": "own"}, THINGS, "thing", given) == Thing(7, "own")


def test_your_own_classes_are_named_by_their_modules() -> None:
    assert construct({"kind": "fractions:Fraction", "numerator": 1}, {}, "x") == 1
    for kind in ("nomodule:Thing", "fractions:Nothing"):
        with pytest.raises(ConfigError, match=rf"x\.kind: '{kind}' cannot be imported"):
            construct({"kind": kind}, {}, "x")


MISTAKES: dict[str, tuple[Any, str]] = {
    "kind": (
        {"kind": "Thng"},
        r"thing\.kind: there is no thing 'Thng'; did you mean 'Thing'\? There are: Thing",
    ),
    "kind of no string": ({"kind": 3}, r"thing\.kind: there is no thing 3\. There are: Thing"),
    "no kind": ({"size": 3}, "thing must be a table with a `kind`, one of Thing; it is {'size': 3}"),
    "no table": (3, "thing must be a table with a `kind`"),
    "key": (
        {"kind": "Thing", "sise": 3},
        r"there is no thing\.sise; did you mean 'size'\? thing has: .*size",
    ),
    "key like nothing": ({"kind": "Thing", "xyz": 3}, r"there is no thing\.xyz\. thing has: "),
    "missing": ({"kind": "Thing"}, r"thing\.size is missing: Thing needs it"),
    "value": ({"kind": "Thing", "size": -1}, "thing: size is -1; it must be at least 0"),
    "type": ({"kind": "Thing", "size": "a"}, r"thing.*size.*'a'|thing: .*'a'"),
    "whole number": ({"kind": "Thing", "size": True}, r"thing\.size is True; it must be of type int"),
    "truth": ({"kind": "Thing", "size": 1, "flag": "no"}, r"thing\.flag is 'no'; it must be of type bool"),
    "inside": (
        {"kind": "Thing", "size": 1, "inner": {"kind": "Iid", "client": 3}},
        r"no thing\.inner\.client; did you mean 'clients'",
    ),
    "kind inside": (
        {"kind": "Thing", "size": 1, "inner": [{"kind": "Iidd"}]},
        r"thing\.inner\[0\]\.kind: there is no .*'Iidd'; did you mean 'Iid'",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_name_the_place_and_the_nearest_name(case: str) -> None:
    table, message = MISTAKES[case]
    with pytest.raises(ConfigError, match=message):
        construct(table, THINGS, "thing")


def test_what_a_factory_raises_is_said_of_its_table() -> None:
    def broken() -> None:
        raise KeyError("surprise")

    with pytest.raises(ConfigError, match=r"^thing: .*surprise"):
        construct("broken", {"broken": broken}, "thing")


def test_defaults_are_written_out_where_toml_can() -> None:
    assert with_defaults({"kind": "Thing", "name": "own"}, THINGS, "thing") == {
        "kind": "Thing",
        "name": "own",
        "parts": [1.0, 2.0],
        "flag": False,
    }
    assert with_defaults("Thing", THINGS, "thing")["kind"] == "Thing"


def test_keys_are_checked_against_what_there_is() -> None:
    check_keys({"a": 1}, {"a", "b"}, "place")
    with pytest.raises(
        ConfigError, match=r"there is no alpha; did you mean 'alphas'.*An experiment file has: alphas"
    ):
        check_keys({"alpha": 1}, {"alphas"}, "")


@pytest.mark.parametrize("group", ["algorithms", "problems", "models", "partitions", "engines"])
def test_every_name_is_that_of_the_python_api(group: str) -> None:
    for name, factory in GROUPS[group].items():
        assert find(name, GROUPS[group], group) is factory
        assert all(p.kind is not p.VAR_KEYWORD for p in parameters(factory).values())


def test_names_inside_tables_are_unique() -> None:
    groups = [ALGORITHMS, GROUPS["problems"], NESTED, GROUPS["engines"]]
    names = [name for group in groups for name in group]
    assert len(names) == len(set(names))


def test_short_forms_offer_what_is_not_decided() -> None:
    assert {"cohort", "upper_lr", "terms"} <= set(parameters(fb.LFedNest))
    assert not {"inner", "outer"} & set(parameters(fb.LFedNest))
