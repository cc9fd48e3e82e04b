"""Data that stay with their owner: what is told about them, and what is made of it."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.data.error import DataError
from fedbilevel.engine.configuration import configuration
from fedbilevel.engine.own_data import assembled, own_levels, report, surveyed
from fedbilevel.engine.wire import decode, encode
from fedbilevel.engine.worker import Worker

SIZES = (3, 5)


def samples(size: int, width: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(size)
    return {"inputs": rng.normal(size=(size, width)).astype(np.float32), "labels": np.arange(size)}


def told(*levels: Any) -> list[Any]:
    """Reports as they come from a wire."""
    return [(f"client {i}", *decode(encode(*report(each)))) for i, each in enumerate(levels)]


def test_the_driver_knows_sizes_and_shapes_and_no_sample() -> None:
    own = [{"lower": samples(n), "upper": samples(n + 1)} for n in SIZES]
    clients, real = surveyed(told(*own), 2, "size"), fb.Clients([o["lower"] for o in own], weights="size")
    assert clients.lower.size.tolist() == list(SIZES)
    assert clients.upper.size.tolist() == [n + 1 for n in SIZES]
    np.testing.assert_allclose(clients.weights, real.weights)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((clients.lower.flat, clients.upper.flat)))
    assert clients.whole().own.batch_size is None, "it is still of the same kind"


def test_a_site_s_samples_are_those_of_its_client() -> None:
    """Batch by batch what a client of the whole federation draws."""
    own = [{"lower": samples(n)} for n in SIZES]
    clients = surveyed(told(*own), 2, "uniform")
    real = fb.Clients([o["lower"] for o in own], batch_size=2)
    for client, levels in enumerate(own):
        mine, theirs = assembled(levels, clients.own), real.only(client)
        for part in ("lower", "upper", "test"):
            a, b = (getattr(c, part).batch(0, jax.random.key(1)) for c in (mine, theirs))
            jax.tree.map(np.testing.assert_array_equal, a.samples, b.samples)


def test_sites_must_have_samples_alike() -> None:
    with pytest.raises(DataError, match=r"client 1 has samples like .*float32\[3\].*, and client 0 like"):
        surveyed(told({"lower": samples(3)}, {"lower": samples(3, width=3)}), None, "uniform")


def test_a_folder_of_arrays(tmp_path: pathlib.Path) -> None:
    np.savez(tmp_path / "lower.npz", **samples(4))
    np.savez(tmp_path / "test.npz", **samples(2))
    levels = own_levels(str(tmp_path))
    assert set(levels) == {"lower", "test"}
    np.testing.assert_array_equal(levels["lower"]["inputs"], samples(4)["inputs"])


def test_a_function_that_knows_its_site() -> None:
    found = own_levels("engine.sites_own:samples", "site-2")
    assert found["lower"].shape == (4, 3)


@pytest.mark.parametrize(
    ("source", "message"),
    [("nowhere", "neither a folder nor module:function"), (".", "no lower-level samples")],
)
def test_mistakes_are_explained(
    source: str, message: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        own_levels(source)


@pytest.mark.parametrize(
    ("classes", "error"), [(3, None), (2, "labels that are no class numbers: 2 classes are 0..1")]
)
def test_a_site_looks_at_its_labels_itself(tmp_path: pathlib.Path, classes: int, error: str | None) -> None:
    """The driver, who sees zeros, cannot."""
    np.savez(tmp_path / "lower.npz", **samples(3))
    worker = Worker(data=str(tmp_path))
    problem = fb.Classification(fb.Linear(classes), inputs=(2,), classes=classes)
    clients = surveyed(told({"lower": samples(3)}), None, "uniform")
    problem.check(clients)
    message = configuration(problem, clients, fb.FedAvg(0.1, level="lower"), ())
    answer, _ = decode(worker.answer(message(0)))
    assert (error in answer["error"]) if error else "programs" in answer
