"""The best point of a run, and stopping when there is no better one."""

import math
from typing import Any

import jax
import numpy as np
import pytest

from fedbilevel import Best, FedAvgS, Saddle, load, solve
from fedbilevel.experiment.best import higher_is_better, recorded_best

known = Saddle.random(jax.random.key(0), clients=3, d=2)


def history(*values: float | None) -> list[dict[str, float]]:
    return [{"step": i} | ({} if value is None else {"error": value}) for i, value in enumerate(values)]


def run(steps: int, best: Best | None, **options: Any) -> Any:
    lr = options.pop("upper_lr", 0.05)
    return solve(known.problem(), known.clients(), FedAvgS(lr, 0.1), steps, every=2, best=best, **options)


PLACES = {
    "min by name": (Best("error"), (3.0, 1.0, 2.0), 1),
    "max": (Best("error", "max"), (1.0, 3.0, 2.0), 1),
    "first of equals": (Best("error"), (2.0, 1.0, 1.0), 1),
    "no numbers are passed over": (Best("error"), (math.nan, -math.inf, 2.0, math.inf), 2),
    "no infinity is the most": (Best("error", "max"), (math.inf, 1.0, math.nan), 1),
    "rows without it": (Best("error"), (None, 4.0, None), 1),
    "nothing finite": (Best("error"), (math.nan, math.inf), None),
    "nothing yet": (Best("error"), (), None),
}


@pytest.mark.parametrize("case", PLACES)
def test_the_best_row(case: str) -> None:
    best, values, place = PLACES[case]
    assert best.place(history(*values)) == place


def test_accuracies_rise_and_errors_fall() -> None:
    assert all(
        map(
            higher_is_better,
            (
                "test_accuracy",
                "accuracy_p10",
                "f1",
                "auc",
                "recall",
                "acc_worst",
                "R2",
                "rocauc",
                "macrof1",
                "Accuracy",
            ),
        )
    )
    assert not any(
        map(higher_is_better, ("error", "test_loss", "hypergradient_norm", "client_drift", "df1x"))
    )
    rows = [{"accuracy": 0.1}, {"accuracy": 0.9}, {"accuracy": 0.5}]
    assert Best("accuracy").place(rows) == 1
    assert Best("accuracy", "min").place(rows) == 0


def test_patience_counts_evaluations_since_the_best() -> None:
    best = Best("error", patience=2)
    assert not best.is_out_of_patience(history(3.0, 1.0, 2.0))
    assert best.is_out_of_patience(history(3.0, 1.0, 2.0, 1.0)), "an equal one is no better one"
    assert not best.is_out_of_patience(history(3.0, 1.0, 2.0, 0.5))
    assert not best.is_out_of_patience(history(math.nan, math.nan, math.nan)), "there is no best yet"
    assert not Best("error").is_out_of_patience(history(1.0, *[2.0] * 99))


def test_mistakes_are_explained() -> None:
    with pytest.raises(
        ValueError, match="'eror', which no row has; there are step, error; did you mean 'error'"
    ):
        Best("eror").place(history(1.0))
    with pytest.raises(ValueError, match='mode is \'least\'; it must be "max" or "min"'):
        Best("error", "least")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="patience is 0; it must be at least 1"):
        Best("error", patience=0)


def test_a_folder_says_what_its_best_point_is(tmp_path: Any) -> None:
    assert recorded_best(tmp_path) is None
    (tmp_path / "config.toml").write_text("steps = 1\n")
    assert recorded_best(tmp_path) is None
    (tmp_path / "config.toml").write_text('[best]\nmetric = "error"\nmode = "max"\npatience = 2\n')
    assert recorded_best(tmp_path) == Best("error", "max", 2)


def test_a_run_keeps_its_best_point(tmp_path: Any) -> None:
    """The error of the lower level is best somewhere in the middle, where x has the point of that row."""
    seen: dict[float, Any] = {}
    result = run(8, Best("error", "max"), callback=lambda e: seen.update({e.row["step"]: (e.x, e.y)}))
    assert result.best is not None
    assert (result.best.step, result.best.value) == (0, result.history[0]["error"])
    falling = run(8, Best("error"), callback=lambda e: seen.update({e.row["step"]: (e.x, e.y)}))
    assert falling.best.step == 8
    np.testing.assert_array_equal(falling.best.x, falling.x)
    np.testing.assert_array_equal(result.best.x, seen[0][0])
    back = load(result.save(tmp_path / "run")).best
    assert (back.step, back.value) == (result.best.step, result.best.value)
    np.testing.assert_array_equal(back.y, result.best.y)


def test_a_run_stops_when_it_is_out_of_patience() -> None:
    result = run(20, Best("error", "max", patience=3))
    assert result.steps == 6
    assert not result.diverged
    assert run(20, Best("error", patience=3)).steps == 20


def test_a_continued_run_remembers_its_best_and_its_patience() -> None:
    best = Best("error", "max", patience=4)
    whole = run(20, best)
    half = run(4, best)
    continued = run(16, best, start=half)
    assert (half.steps, whole.steps, continued.steps) == (4, 8, 8)
    assert continued.best.step == whole.best.step == 0
    np.testing.assert_array_equal(continued.best.x, whole.best.x)
    assert run(20, best, start=whole).steps == 8, "it has stopped"


def test_a_misspelt_metric_fails_before_the_first_step() -> None:
    seen: list[Any] = []
    with pytest.raises(ValueError, match="did you mean 'error'"):
        run(4, Best("eror"), callback=seen.append)
    assert seen == []
