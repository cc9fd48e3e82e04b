"""A method that cannot run over its links is no failure: the folder says why, and the table has n/a."""

import json
from typing import Any

import pytest

from experiment.recorded_rows import run
from experiment.tiny import manifest, plan, rows, write
from fedbilevel.experiment.config import plans
from fedbilevel.experiment.recorded import RunError, find_runs
from fedbilevel.experiment.registry import ConfigError
from fedbilevel.experiment.report import compare
from fedbilevel.experiment.runner import run_all

REASON = "FedProx needs a server, which only complete links give"
NETWORKS = """
name = "networks"
steps = 2

[problem]
kind = "Quadratic"
clients = 4
dx = 2
dy = 2

[algorithm]
kind = "FedProx"
lower_lr = 0.1
mu = 0.1

[variants.server]
[variants.ring]
algorithm.links = "Ring"
[variants.alone]
algorithm = { kind = "Local" }
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("networks")
    tasks = [(plan, folder / plan.folder) for plan in plans(write(folder, NETWORKS), seeds=[0, 1])]
    return folder, tasks, list(run_all(tasks))


def test_the_others_run_and_the_folder_says_why_it_did_not(finished: Any) -> None:
    folder, _, outcomes = finished
    assert [outcome.status for outcome in outcomes] == ["done"] * 2 + ["n/a"] * 2 + ["done"] * 2
    assert [(outcome.result is None, outcome.reason) for outcome in outcomes[1:3]] == [
        (False, ""),
        (True, REASON),
    ]
    facts = manifest(folder / "ring" / "seed-0")
    assert [facts[key] for key in ("status", "reason", "variant", "seed")] == ["n/a", REASON, "ring", 0]
    assert rows(folder / "ring" / "seed-0") == []
    assert not (folder / "ring" / "seed-0" / "result.npz").exists()


def test_the_table_has_n_a_in_its_row_and_the_reason_below(finished: Any) -> None:
    comparison = compare(find_runs(finished[0]))
    lines = str(comparison).splitlines()
    (row,) = [line.split() for line in lines if line.split()[:1] == ["ring"]]
    assert row == ["ring", "0", "0", *["n/a"] * 5]
    assert lines[-1] == f"ring: n/a, {REASON}"
    assert comparison.notes == (), "it is not a run that has not been evaluated yet"
    data = json.loads(comparison.to_json())
    assert data["cannot_run"] == {"ring": REASON}


def test_a_method_without_traffic_does_not_limit_the_others(finished: Any) -> None:
    comparison = compare(find_runs(finished[0]))
    ends = {r.variant: r.rows[-1] for r in find_runs(finished[0]) if len(r.rows)}
    assert ends["alone"]["rounds"] == 0
    assert comparison.equal["rounds"] == ends["server"]["rounds"] == 2
    for line in comparison.lines:
        if line.variant != "ring":
            assert line.scores["bytes"].mean == line.scores["end"].mean


def test_a_run_that_has_not_begun_does_limit_them() -> None:
    begun, free = run("A", 0, [0.1, 0.2], (5, 5, 5)), run("B", 0, [0.3, 0.4], (0, 0, 5))
    assert compare([begun, free]).equal == {"rounds": 5, "bytes": 5, "calls": 5}
    assert compare([begun, run("C", 0, [0.3], (5, 5, 5))]).equal["rounds"] == 0


def test_a_second_time_it_is_said_again_and_nothing_is_lost(finished: Any) -> None:
    folder, tasks, _ = finished
    before = manifest(folder / "ring" / "seed-0")
    again = list(run_all(tasks))
    assert [outcome.status for outcome in again] == ["done"] * 2 + ["n/a"] * 2 + ["done"] * 2
    assert [outcome.fresh for outcome in again] == [False] * 2 + [True] * 2 + [False] * 2
    assert manifest(folder / "ring" / "seed-0") == before


def test_once_it_can_run_it_does_so_in_the_same_folder(tmp_path: Any) -> None:
    base = NETWORKS.split("[variants.server]")[0]
    ring, server = (plan(tmp_path, base, algorithm__links=links) for links in ("Ring", "Complete"))
    (declined,) = run_all([(ring, tmp_path / "run")])
    (outcome,) = run_all([(server, tmp_path / "run")])
    assert [declined.status, outcome.status] == ["n/a", "done"]
    assert "reason" not in manifest(tmp_path / "run")


def test_it_does_not_take_the_folder_of_another_run(finished: Any, tmp_path: Any) -> None:
    folder = finished[0] / "server" / "seed-0"
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    base = NETWORKS.split("[variants.server]")[0]
    with pytest.raises(RunError, match="holds a run with other settings"):
        list(run_all([(plan(tmp_path, base, algorithm__links="Ring"), folder)]))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_runs_of_one_program_go_on_without_it(finished: Any, tmp_path: Any) -> None:
    tasks = [(plan, tmp_path / plan.folder) for plan, _ in finished[1]]
    together = {outcome.folder.parent.name: outcome.status for outcome in run_all(tasks, together=True)}
    assert together == {"server": "done", "ring": "n/a", "alone": "done"}


def test_wrong_links_are_still_a_mistake(tmp_path: Any) -> None:
    base = NETWORKS.split("[variants.server]")[0]
    wrong = {"kind": "Given", "matrix": [[1.0]]}
    with pytest.raises(ConfigError, match=r"tiny\.toml: the links are for 1 clients, but 4"):
        list(run_all([(plan(tmp_path, base, algorithm__links=wrong), tmp_path / "run")]))
    assert not (tmp_path / "run").exists()
