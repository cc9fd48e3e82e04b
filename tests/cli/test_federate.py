"""`federate` and `site`: jobs that get lost, kits that are made ready, mistakes that are explained."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

import fedbilevel as fb
from experiment.tiny import SADDLE, changed, write
from fedbilevel.cli import federate
from fedbilevel.engine.agreement import Agreement, AgreementError
from fedbilevel.engine.configuration import agreed_parts
from fedbilevel.engine.nvflare.job import ALLOWED, JobLostError
from fedbilevel.experiment.build import build
from fedbilevel.experiment.config import plans
from fedbilevel.experiment.evaluate import Evaluator
from fedbilevel.portable import pack

pytestmark = pytest.mark.usefixtures("no_figures")


class Flaky(fb.Simulator):
    """Stands for NVFlare: its job is lost at the given steps, once each; a failure is reported."""

    losses: ClassVar[list[int]] = []
    wire = (1234, 567)

    def __init__(self, env: str, **_: Any) -> None:
        super().__init__()

    @contextlib.contextmanager
    def connect(self, *arguments: Any, **settings: Any) -> Iterator[Any]:
        with super().connect(*arguments, **settings) as session:
            advance = session.advance

            def losing(state: Any, key: Any, first: int, *rest: int) -> Any:
                if first in self.losses:
                    self.losses.remove(first)
                    raise JobLostError("job 1 cannot be reached any more.")
                return advance(state, key, first, *rest)

            session.advance = losing  # type: ignore[method-assign]
            yield session


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> type[Flaky]:
    monkeypatch.setattr(federate, "NVFlare", Flaky)
    monkeypatch.setattr(Flaky, "losses", [])
    return Flaky


def test_a_lost_job_is_submitted_again_and_nothing_is_lost(
    fedbilevel: Any, tmp_path: pathlib.Path, flaky: type[Flaky]
) -> None:
    file = write(tmp_path, SADDLE)
    assert fedbilevel("run", file, "-o", "whole", "-q").code == 0
    flaky.losses[:] = [2, 4]
    said = fedbilevel("federate", file, "-o", "cut", "-q")
    assert said.code == 0, said.err
    assert said.err.count("A new job goes on from the last checkpoints.") == 2
    whole, cut = (fb.load(next(tmp_path.glob(f"{name}/**/result.npz"))) for name in ("whole", "cut"))
    np.testing.assert_array_equal(whole.x, cut.x)
    assert list(whole.history) == list(cut.history)
    assert whole.ledger == cut.ledger
    assert "On the wire: 1,234 bytes down and 567 up; payload by the ledgers: " in said.err


def test_too_many_lost_jobs_are_an_error(fedbilevel: Any, tmp_path: pathlib.Path, flaky: type[Flaky]) -> None:
    flaky.losses[:] = [2, 4]
    said = fedbilevel("federate", write(tmp_path, SADDLE), "-o", "cut", "-q", "--resubmit", 1)
    assert said.code == 2
    assert "cannot be reached any more" in said.err


def test_a_folder_that_is_no_kit(fedbilevel: Any, tmp_path: pathlib.Path) -> None:
    said = fedbilevel("federate", write(tmp_path, SADDLE), "--env", tmp_path)
    assert said.code == 2
    assert "is no administrator's startup kit" in said.err
    said = fedbilevel("site", tmp_path)
    assert said.code == 2
    assert "is no startup kit of a site or server" in said.err


@pytest.fixture
def kit(tmp_path: pathlib.Path) -> pathlib.Path:
    """What `site` looks at of a site's startup kit."""
    kit = tmp_path / "site-1"
    (kit / "startup").mkdir(parents=True)
    (kit / "local").mkdir()
    (kit / "startup" / "fed_client.json").write_text("{}")
    (kit / "local" / "resources.json.default").write_text('{"class_allow_list": ["nvflare.x"], "kept": 1}')
    return kit


def test_a_site_names_its_data_and_agrees(fedbilevel: Any, tmp_path: pathlib.Path, kit: pathlib.Path) -> None:
    np.savez(tmp_path / "lower.npz", inputs=np.zeros((7, 3), np.float32))
    file = write(tmp_path, SADDLE)
    said = fedbilevel("site", kit, file, "--data", tmp_path)
    assert said.code == 0, said.err
    assert "lower: 7 samples of {'inputs': 'float32[3]'}" in said.out
    policy = json.loads((kit / "local" / "resources.json").read_text())
    assert policy == {"class_allow_list": ["nvflare.x", *ALLOWED], "kept": 1}
    settings = json.loads((kit / "local" / "fedbilevel.json").read_text())
    assert settings["data"] == str(tmp_path)
    agreement = Agreement.load(settings["agreed"])
    agreement.check(*configuration(file))
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(AgreementError, match=r"algorithm\.upper_lr is 0\.06 at the server and 0\.05 here"):
        agreement.check(*configuration(write(other, changed(SADDLE, ("upper_lr = 0.05", "upper_lr = 0.06")))))


def configuration(file: Any) -> Any:
    """What a driver sends for a file."""
    (plan,) = plans(file)
    problem, clients, algorithm, *_ = build(plan)
    algorithm = algorithm.among(clients.n).on(problem)
    return pack(agreed_parts(problem, algorithm, Evaluator(problem, ()).probes))


def test_a_server_s_kit_is_only_allowed_our_classes(fedbilevel: Any, kit: pathlib.Path) -> None:
    (kit / "startup" / "fed_client.json").rename(kit / "startup" / "fed_server.json")
    said = fedbilevel("site", kit)
    assert said.code == 0, said.err
    assert not (kit / "local" / "fedbilevel.json").exists()


def test_data_that_are_not_there(fedbilevel: Any, kit: pathlib.Path) -> None:
    said = fedbilevel("site", kit, "--data", "nowhere")
    assert said.code == 2
    assert "neither a folder nor module:function" in said.err
