"""A client runs what it agreed to, and says what differs otherwise."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import pytest

import fedbilevel as fb
from conform.cases import CASES, distance
from fedbilevel.engine.agreement import Agreement, AgreementError, digest, fingerprint
from fedbilevel.engine.configuration import agreed_parts
from fedbilevel.engine.wire import WireError, decode, encode
from fedbilevel.engine.worker import Worker
from fedbilevel.portable import Json, PortableError, pack


def packed(algorithm: Any, x0: float = 1.0) -> tuple[Json, list[Any]]:
    structure, arrays = pack(agreed_parts(fb.single_level(distance, jnp.full(3, x0)), algorithm, ()))
    return json.loads(json.dumps(structure)), arrays  # as it comes from a wire


def agreement(*algorithms: Any) -> Agreement:
    return Agreement.load(json.loads(json.dumps([fingerprint(*packed(a)) for a in algorithms])))


def test_the_agreed_configuration_is_accepted() -> None:
    agreement(fb.FedAvg(0.1), fb.FedAvg(0.2)).check(*packed(fb.FedAvg(0.2)))


@pytest.mark.parametrize(
    ("asked", "difference"),
    [
        (packed(fb.FedAvg(0.2)), r"algorithm\.lr is 0\.2 at the server and 0\.1 here"),
        (packed(fb.FedAvg(0.1, steps=7)), r"algorithm\.\S*steps is 7 at the server and 1 here"),
        (packed(fb.FedProx(0.1, 0.5)), r"algorithm\.\(class\) is .*FedProx.* at the server and .*FedAvg"),
        (packed(fb.FedAvg(0.1), x0=2.0), r"problem\.x0 is .float32\[3\] \w+. at the server and"),
    ],
)
def test_what_differs_is_named(asked: tuple[Json, list[Any]], difference: str) -> None:
    with pytest.raises(AgreementError, match=difference):
        agreement(fb.FedAvg(0.1)).check(*asked)


def test_the_nearest_of_several_agreed_ones_is_compared() -> None:
    with pytest.raises(AgreementError, match=r"\): algorithm\.lr is 0\.3 at the server and 0\.1 here$"):
        agreement(fb.FedProx(0.3, 0.5), fb.FedAvg(0.1)).check(*packed(fb.FedAvg(0.3)))


def test_a_measured_smoothness_is_no_difference() -> None:
    algorithms = [fb.FedNest(0.1, 0.1, smoothness=value) for value in (2.0, 3.0)]
    agreement(algorithms[0]).check(*packed(algorithms[1]))


def test_a_site_that_agreed_to_nothing_runs_only_the_library_s_own() -> None:
    with pytest.raises(
        AgreementError, match=r"the server names conform\.cases:distance, which is not of this"
    ):
        Agreement().check(*packed(fb.FedAvg(0.1)))
    problem, _ = CASES["FedNest"].make()
    structure, arrays = pack(agreed_parts(problem, fb.FedNest(0.1, 0.1, smoothness=1.0), ()))
    Agreement().check(structure, arrays)


def test_a_worker_refuses_before_it_imports_or_makes_anything() -> None:
    worker = Worker(agreement=agreement(fb.FedAvg(0.1)))
    structure, arrays = packed(fb.FedAvg(0.1))
    dict(structure["dict"])["problem"]["object"][0] = "no_such_module:Problem"
    body, _ = decode(worker.answer(encode({"configure": structure}, arrays)))
    assert "AgreementError" in body["error"]
    assert "no_such_module:Problem" in body["error"]


def test_data_cannot_bring_a_foreign_class_along() -> None:
    structure, arrays = packed(fb.FedAvg(0.1))
    structure["dict"].append(["clients", {"object": ["os:Popen", {}]}])
    with pytest.raises(AgreementError, match="the server names os:Popen"):
        agreement(fb.FedAvg(0.1)).check(structure, arrays)


def test_a_value_imports_nothing_at_a_site_with_an_agreement() -> None:
    command = ["put", 0, {"object": ["module_that_nobody_imported:Thing", {}]}]
    with pytest.raises(PortableError, match="import that module first"):
        Worker(agreement=Agreement()).answer(encode({"commands": [command]}, []))


def test_only_commands_are_obeyed() -> None:
    with pytest.raises(WireError, match="'agree' is no command"):
        Worker().answer(encode({"commands": [["agree", {}]]}, []))


def test_equal_configurations_have_equal_digests() -> None:
    prints = [fingerprint(*packed(fb.FedAvg(lr))) for lr in (0.1, 0.1, 0.2)]
    assert digest(prints[0]) == digest(prints[1]) != digest(prints[2])
