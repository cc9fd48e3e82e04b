"""Figures: what is drawn is what the runs say, and the same runs give the same files."""

import itertools
import pathlib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
import pytest

from fedbilevel.experiment import figure
from fedbilevel.experiment.figure import draw_curves
from fedbilevel.experiment.record import History
from fedbilevel.experiment.recorded import RecordedRun, RunError
from fedbilevel.fed.ledger import Ledger


def run(
    variant: str, seed: int, values: Any, amounts: Any, metric: str = "error", status: str = "done"
) -> RecordedRun:
    """A run whose evaluations cost `amounts` rounds, as many megabytes and a hundred times as many calls."""
    empty = dict.fromkeys(Ledger().columns(), 0)
    rows = [
        {"step": i, metric: value, **empty}
        | {"rounds": spent, "bytes_up": 1_000_000 * spent, "calls_g_y": 100 * spent}
        for i, (value, spent) in enumerate(zip(values, amounts, strict=True))
    ]
    return RecordedRun(pathlib.Path(variant), "figure 1", variant, seed, status, History(tuple(rows)))


TWO = [run("A", 0, [1.0, 0.5, 0.3], [0, 4, 8]), run("A", 1, [1.0, 0.7, 0.1], [0, 4, 8])]


@pytest.fixture
def drawn(monkeypatch: Any, tmp_path: Any) -> Callable[..., Any]:
    """The figures of some runs, kept in place of being written (which takes most of the time)."""
    figures: list[Any] = []
    monkeypatch.setattr(figure, "_save", lambda made, path: figures.append(made) or [])

    def draw(runs: list[RecordedRun], metric: str | None = None) -> Any:
        draw_curves(runs, metric, tmp_path)
        return figures

    return draw


@pytest.fixture(scope="module")
def files(tmp_path_factory: Any) -> list[pathlib.Path]:
    return draw_curves(TWO, None, tmp_path_factory.mktemp("figures") / "new" / "folder", stem="fig.2")


def test_all_files_are_written_and_can_be_read(files: list[pathlib.Path]) -> None:
    stems = ("fig.2", "fig.2-rounds", "fig.2-bytes", "fig.2-calls")
    assert [file.name for file in files] == [f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")]
    for file in files:
        content = file.read_bytes()
        if file.suffix == ".png":
            assert content.startswith(b"\x89PNG")
        else:
            assert ElementTree.fromstring(content).tag.endswith("svg")


def test_equal_runs_give_equal_files_and_leave_no_trace(files: list[pathlib.Path], tmp_path: Any) -> None:
    before = dict(matplotlib.rcParams)
    again = draw_curves(TWO, "error", tmp_path, stem="fig.2")
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in again]
    assert dict(matplotlib.rcParams) == before


def test_the_line_is_the_mean_and_the_band_one_deviation(drawn: Any) -> None:
    together, *alone = drawn(TWO)
    assert [panel.get_xlabel() for panel in together.axes] == [one.axes[0].get_xlabel() for one in alone]
    for panel, unit in zip(together.axes, (1, 1, 100), strict=True):
        (line,) = panel.lines
        np.testing.assert_allclose(line.get_xdata(), np.array([0, 4, 8]) * unit)
        np.testing.assert_allclose(line.get_ydata(), [1.0, 0.6, 0.2])
        edges = panel.collections[0].get_paths()[0].vertices[:, 1]
        assert edges.max() == pytest.approx(1.0)
        assert 0.6 + np.std([0.5, 0.7], ddof=1) == pytest.approx(edges[np.abs(edges - 0.74).argmin()])
        assert edges.min() == pytest.approx(0.1)  # not 0.2 − 0.14: the smallest seed is the limit
    assert together.axes[0].get_ylabel() == "error"


def test_seeds_of_unequal_cost_meet_stepwise_where_all_have_values(drawn: Any) -> None:
    runs = [run("A", 0, [9.0, 5.0, 3.0, 1.0], [1, 4, 8, 12]), run("A", 1, [7.0, 3.0, 1.0], [2, 5, 9])]
    line = drawn(runs)[0].axes[0].lines[0]
    spent, mean = line.get_xdata(), line.get_ydata()
    assert spent[0] == 2
    assert spent[-1] == 9
    expected = {2: 8.0, 4: 6.0, 5: 4.0, 8: 3.0, 9: 2.0}
    assert dict(zip(spent.tolist(), mean.tolist(), strict=True)).items() <= expected.items()
    assert 3 <= len(spent) <= 4


def test_seeds_that_never_overlap_draw_nothing(drawn: Any) -> None:
    runs = [run("A", 0, [1.0, 0.5], [0, 1]), run("A", 1, [1.0, 0.5], [5, 6])]
    assert len(drawn(runs)[0].axes[0].lines[0].get_xdata()) == 0


def test_variants_differ_in_colour_and_in_line_style(drawn: Any) -> None:
    lines = drawn([run(f"variant {i}", 0, [1.0, 0.5], [0, 1]) for i in range(28)])[0].axes[0].lines
    looks = [(line.get_color(), str(line._unscaled_dash_pattern)) for line in lines]
    assert len(set(looks)) == 28
    assert all(a[0] != b[0] and a[1] != b[1] for a, b in itertools.pairwise(looks))


def test_the_legend_names_variants_and_counts_diverged_runs(drawn: Any) -> None:
    bad = run("A", 2, [1.0, 1e30], [0, 2], status="diverged")
    together = drawn([*TWO, bad, run("B", 0, [0.9, 0.8], [0, 8])])[0]
    names = [text.get_text() for text in together.legends[0].get_texts()]
    assert names == ["A (1 of 3 diverged)", "B"]
    panel = together.axes[0]
    np.testing.assert_allclose(panel.lines[0].get_ydata(), [1.0, 0.6, 0.2])
    assert [line.get_marker() for line in panel.lines].count("x") == 1
    assert panel.get_ylim()[1] < 2  # what blew up does not squeeze the rest


LOG = {
    "an error over decades": ("error", [1.0, 0.1, 0.001], "log"),
    "an error within a decade": ("error", [1.0, 0.5, 0.2], "linear"),
    "an accuracy": ("accuracy", [0.001, 0.5, 0.9], "linear"),
    "an error that is zero": ("error", [1.0, 0.01, 0.0], "linear"),
    "an infinite error": ("error", [float("inf"), 1.0, 0.001], "log"),
    "only NaN": ("error", [float("nan")] * 3, "linear"),
}


@pytest.mark.parametrize("case", LOG)
def test_errors_over_decades_have_a_logarithmic_axis(drawn: Any, case: str) -> None:
    metric, values, scale = LOG[case]
    for made in drawn([run("A", 0, values, [0, 1, 2], metric)]):
        assert {panel.get_yscale() for panel in made.axes} == {scale}


def test_an_unknown_metric_is_refused_before_anything_is_written(tmp_path: Any) -> None:
    with pytest.raises(RunError, match="did you mean 'error'"):
        draw_curves(TWO, "eror", tmp_path / "figures")
    assert not (tmp_path / "figures").exists()
