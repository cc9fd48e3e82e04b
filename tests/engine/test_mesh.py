"""The mesh: on two devices, in two processes, the same results and ledgers as in the simulator."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from conform.compare import close, run, simulated
from engine import mesh_child
from fedbilevel.cli.launch import _started
from fedbilevel.engine.mesh import join
from fedbilevel.engine.mesh.join import MeshError, leads, place_of, told, watching
from fedbilevel.engine.mesh.layout import Layout, device_mesh
from fedbilevel.engine.mesh.shard import first_rows
from fedbilevel.experiment import DivergenceWarning
from fedbilevel.experiment.build import build
from fedbilevel.experiment.runner import run_all

CHILD = pathlib.Path(__file__).parent / "mesh_child.py"
TESTS = CHILD.parent.parent

# Three clients on two devices: one place is nobody's.
ON_DEVICES = [
    *("FedNest-cohorts:float64:0", "FedBiO:float32:0", "FedBiOLocal:float64:0"),
    *("FedSep-gradient:float64:0", "PDBO:float64:0", "every-verb:float64:0.3"),
]
# What a device computes is the same there; between processes there are messages, in all ways that there are.
IN_PROCESSES = ["every-verb:float64:0.3"]


def environment(devices: int) -> dict[str, str]:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": path}


@pytest.fixture(scope="module")
def on_devices(tmp_path_factory: Any) -> pathlib.Path:
    """What one process with two devices left."""
    folder: pathlib.Path = tmp_path_factory.mktemp("devices")
    command = [sys.executable, str(CHILD), str(folder), *ON_DEVICES]
    subprocess.run(command, env=environment(2), check=True, timeout=900)
    return folder


@pytest.fixture(scope="module")
def in_processes(tmp_path_factory: Any) -> pathlib.Path:
    """What two processes with a device each left."""
    folder: pathlib.Path = tmp_path_factory.mktemp("processes")
    command = [sys.executable, str(CHILD), str(folder), *IN_PROCESSES]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", environment(1))
        with _started(command, [folder / "report0", folder / "report1"]) as children:
            codes = [child.wait(timeout=900) for child in children]
    assert codes == [0, 0], (folder / "report1").read_text()
    return folder


def check_equal(folder: pathlib.Path, text: str) -> None:
    name, precision, dropout = text.split(":")
    there, here = fb.load(folder / f"{text}.npz"), simulated(name, precision == "float64", float(dropout))
    close(there, here, 1e-10 if precision == "float64" else 1e-5)
    assert there.ledger == here.ledger
    assert [row.keys() for row in there.history] == [row.keys() for row in here.history]


@pytest.mark.parametrize("text", ON_DEVICES)
def test_two_devices_equal_the_simulator(text: str, on_devices: pathlib.Path) -> None:
    check_equal(on_devices, text)


@pytest.mark.parametrize("text", IN_PROCESSES)
def test_two_processes_equal_the_simulator(text: str, in_processes: pathlib.Path) -> None:
    check_equal(in_processes, text)


def test_each_process_loads_its_own_clients(in_processes: pathlib.Path) -> None:
    loaded = [json.loads((in_processes / f"loaded-{rank}.json").read_text()) for rank in (0, 1)]
    assert loaded == [[0, 1, 2], [3, 4]]
    data = [mesh_child.own_data(client)["lower"] for client in range(mesh_child.CLIENTS)]
    here = mesh_child.fitted(fb.Clients(data, batch_size=2, weights="size"), "simulator")
    there = fb.load(in_processes / "loaded.npz")
    close(there, here, 1e-5)
    assert there.ledger == here.ledger


def test_what_is_wrong_with_one_process_s_samples_stops_all(in_processes: pathlib.Path) -> None:
    """The other one would wait for ever."""
    first, second = ((in_processes / f"error-{rank}").read_text() for rank in (0, 1))
    assert first == "MeshError: this process stops because there was an error in process 1, which says why"
    assert second.startswith("ProblemError: the lower labels are 1..3")


def test_of_an_experiment_file_each_process_holds_its_own_clients_data(
    in_processes: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Of 10,000 training images of four equal clients each process has half, and of 2,000 test images all."""
    facts = [json.loads((in_processes / f"process-{rank}" / "facts.json").read_text()) for rank in (0, 1)]
    built, whole = mesh_child.held(lambda: build(mesh_child.images(tmp_path, "simulator")))
    training, tests = 10_000 * 784 * 4, 2_000 * 784 * 4
    assert whole > 2 * training, "the control: a process alone has them all, as they were read and as arrays"
    for there in facts:
        assert there["rows"] == [4_000, 1_000]
        assert there["clients"] == np.asarray(built.clients.lower.size).tolist() == [2_000] * 4
        assert there["bytes"] < training / 2 + 3 * tests


def test_an_experiment_file_gives_the_simulator_s_result(
    in_processes: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    there = fb.load(in_processes / "images" / "result.npz")
    (outcome,) = run_all([(mesh_child.images(tmp_path, "simulator"), tmp_path / "here")])
    assert outcome.result is not None
    close(there, outcome.result, 1e-5)
    assert there.ledger == outcome.result.ledger


def test_another_seed_would_be_seen(on_devices: pathlib.Path) -> None:
    there = fb.load(on_devices / "FedNest-cohorts:float64:0.npz")
    with jax.enable_x64(True):
        other = run("FedNest-cohorts", "simulator", seed=8)
    with pytest.raises(AssertionError):
        close(there, other, 1e-5)


@pytest.mark.parametrize("who", ["everyone", "cohort"])
def test_a_mean_is_one_all_reduce_and_no_sample_travels(who: str, on_devices: pathlib.Path) -> None:
    """In the compiled program: the mean of x, 7 + 1 numbers, and at the end of a block what was spent."""
    facts = json.loads((on_devices / "facts.json").read_text())
    (mean, first), (spent, second) = facts[who]
    assert (mean, first) == ("all-reduce", 8)
    assert spent == "all-reduce"
    assert second % 50 == 0, "one number for each step that a block has room for, and each kind of call"


def test_the_search_for_exchanges_finds_them(on_devices: pathlib.Path) -> None:
    """The control of the test above: `push` does show messages to other devices."""
    facts = json.loads((on_devices / "facts.json").read_text())
    assert any(kind.startswith("all-gather") for kind, _ in facts["push"])


def test_a_device_holds_its_own_clients_samples(on_devices: pathlib.Path) -> None:
    """Five clients with three samples each, on two devices with room for three clients."""
    assert json.loads((on_devices / "facts.json").read_text())["shares"] == [9, 9]


# ------------------------------------------------------------------- one device


def test_levels_and_clients_share_what_they_shared() -> None:
    data = {"a": np.arange(12.0).reshape(6, 2)}
    clients = fb.Clients.indexed(data, [[0, 1, 5], [5, 1]], [[2], [3]], weights="size")
    placed = Layout(device_mesh(1), 2).clients(clients)
    assert placed.lower.flat["a"].shape == (3, 2), "rows 1 and 5 are there once"
    assert placed.test.flat["a"] is placed.upper.flat["a"]
    for client in (0, 1):
        for level in ("lower", "upper"):
            mine, whole = (
                getattr(c.whole(), level).batch(client, jax.random.key(0)) for c in (placed, clients)
            )
            np.testing.assert_array_equal(mine.samples["a"], whole.samples["a"])


def test_what_is_kept_comes_back() -> None:
    layout = Layout(device_mesh(), 5)
    rows = {"a": jnp.arange(10.0).reshape(5, 2)}
    np.testing.assert_array_equal(layout.stacked(layout.keep(rows))["a"], rows["a"])


def test_first_rows_computes_no_more_than_asked() -> None:
    def one(number: jax.Array) -> jax.Array:
        return number + 1

    computed = jax.jit(lambda count: first_rows(one, count, 2)(jnp.arange(5)))
    assert computed(3).tolist() == [1, 2, 3, 4, 0], "in chunks of two"
    assert computed(0).tolist() == [0] * 5


def test_clients_that_are_loaded_one_by_one() -> None:
    def load(client: int) -> dict[str, Any]:
        draws = np.random.default_rng(client)
        return {"lower": draws.normal(size=(2 + client, 3)), "test": draws.normal(size=(2, 3))}

    trees = [load(client) for client in range(3)]
    parts = {level: [tree[level] for tree in trees] for level in ("lower", "test")}
    plain = fb.Clients(**parts, batch_size=2, weights="size")
    loaded = fb.Mesh.clients(3, load, batch_size=2, weights="size")
    assert jax.tree.structure(loaded) == jax.tree.structure(plain)
    jax.tree.map(np.testing.assert_array_equal, loaded, plain)


def test_a_process_without_clients_knows_what_samples_look_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are more processes than clients, or almost: one client is read, and is not its own."""
    monkeypatch.setattr(Layout, "of", lambda layout, device: np.arange(0))
    asked = []

    def load(client: int) -> dict[str, Any]:
        asked.append(client)
        return {"lower": np.ones((2, 3), np.float32)}

    clients = fb.Mesh.clients(3, load)
    assert asked == [0]
    assert clients.n == 3
    assert clients.lower.size.tolist() == [0, 0, 0], "how many the others have is what they say"
    assert clients.lower.flat.shape[1:] == (3,)


def test_what_a_loader_must_return() -> None:
    with pytest.raises(ValueError, match=r"must return a dict with 'lower'.*it returned \['data'\]"):
        fb.Mesh.clients(2, lambda client: {"data": np.ones(3)})


def test_divergence_ends_at_the_last_finite_state() -> None:
    known = fb.Saddle.random(jax.random.key(1), 3, 3, centred=False)
    with pytest.warns(DivergenceWarning):
        runs = [
            fb.solve(known.problem(), known.clients(), fb.FedAvgS(1e6, 1e6), 30, engine=engine)
            for engine in ("simulator", "mesh")
        ]
    assert all(run.diverged for run in runs)
    assert runs[0].steps == runs[1].steps
    assert np.isfinite(np.asarray(runs[1].x)).all()


# ----------------------------------------------------------------- environment


def test_where_a_process_belongs() -> None:
    ours = {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    expected = {"coordinator_address": "h:1", "num_processes": 2, "process_id": 1}
    assert place_of(ours) == expected
    assert place_of(ours | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}) is None
    assert place_of({}) is None
    assert place_of({"SLURM_STEP_NUM_TASKS": "4"}) == {}, "JAX reads the rest by itself"
    assert place_of({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}) is None, "an allocation is no step"
    assert place_of({"OMPI_COMM_WORLD_SIZE": "2"}) == {}
    with pytest.raises(MeshError, match="also needs JAX_PROCESS_ID"):
        place_of({key: value for key, value in ours.items() if key != "JAX_PROCESS_ID"})
    with pytest.raises(MeshError, match="JAX_PROCESS_ID is 'x'; it must be a whole number"):
        place_of(ours | {"JAX_PROCESS_ID": "x"})


def test_who_joins_too_late_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    jnp.ones(1).block_until_ready()
    for name, value in {"COORDINATOR_ADDRESS": "h:1", "NUM_PROCESSES": "2", "PROCESS_ID": "0"}.items():
        monkeypatch.setenv(f"JAX_{name}", value)
    with pytest.raises(MeshError, match=r"call `fb.Mesh.join\(\)` first"):
        fb.Mesh.join()


def test_alone_a_process_leads_and_hears_itself() -> None:
    assert leads()
    assert told(lambda: b"text") == b"text"
    with pytest.raises(ValueError, match="Gloo"), watching():
        raise ValueError("Gloo: this is no lost process, for there is none")


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 24, 100])
def test_long_texts_are_told_in_pieces(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """As the leading process and as another one, to which the leader's arrays come."""
    sent: list[Any] = []
    monkeypatch.setattr(join, "PIECE", 8)
    monkeypatch.setattr(join, "several", lambda: True)
    monkeypatch.setattr(join, "_from_leader", lambda array: sent.append(array.copy()) or array)
    text = bytes(range(length))
    assert told(lambda: text) == text
    assert max(array.size for array in sent) <= 16
    monkeypatch.setattr(join, "leads", lambda: False)
    monkeypatch.setattr(join, "_from_leader", lambda array: sent.pop(0))
    assert told(lambda: b"not asked") == text
    assert sent == []


def test_the_length_of_a_text_has_more_than_32_bits() -> None:
    """Numbers that go from process to process have 32: these are two of them."""
    assert np.asarray(divmod(2**40, join.PIECE), np.int32).tolist() == [2**14, 0]


def test_mistakes() -> None:
    with pytest.raises(MeshError, match="devices is 4, but there are 1"):
        device_mesh(4)
    with pytest.raises(ValueError, match="chunk is 0"):
        fb.Mesh(chunk=0)
    with pytest.raises(ValueError, match="dropout is 2"):
        fb.Mesh(dropout=2)
    known = fb.Saddle.random(jax.random.key(1), 3, 3)
    with pytest.raises(TypeError, match="only while a step runs"):
        _ = fb.Mesh().federation(known.problem(), known.clients()).everyone
