"""What is measured between steps: against closed forms, on every engine, and at no cost to the run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithm.measure import MEASURES
from fedbilevel.experiment.evaluate import SUMMARIES, summary

METHOD = fb.FedBiO(0.05, 0.1, 0.1)
EVERY = 2


def quadratic() -> fb.Quadratic:
    return fb.Quadratic.random(jax.random.key(0), clients=3, dx=2, dy=4)


def expected(known: fb.Quadratic, x: Any, y: Any) -> dict[str, float]:
    """The measures at a point by their definitions, from the problem's closed forms."""
    slopes = known.A @ y - known.B @ x - known.b
    spread = jnp.sum((slopes - slopes.mean(0)) ** 2, axis=1)
    values = {
        "hypergradient_norm": jnp.linalg.norm(known.hypergradient_at(x, y, known.adjoint_at(x, y))),
        "lower_distance": jnp.linalg.norm(y - known.lower_solution(x)),
        "client_drift": jnp.sqrt(spread.mean()),
        "adjoint_residual": 0.0,
    }
    return {name: float(value) for name, value in values.items()}


def measured(known: Any, steps: int = 2, clients: Any = None, **options: Any) -> tuple[Any, list[Any]]:
    points: list[Any] = []
    result = fb.solve(
        known.problem(),
        known.clients() if clients is None else clients,
        options.pop("algorithm", METHOD),
        steps,
        **{"measure": tuple(MEASURES), "every": EVERY, "callback": points.append} | options,
    )
    return result, points


@pytest.mark.usefixtures("float64")
def test_measures_are_the_closed_forms() -> None:
    known = quadratic()
    result, points = measured(known, 4)
    assert len(points) == 3
    for seen in points:
        wanted = expected(known, seen.x, seen.y)
        assert {name: seen.row[name] for name in wanted} == pytest.approx(wanted, abs=1e-10, rel=1e-10)
    assert result.history[0]["hypergradient_norm"] > 0.1
    assert result.history[0]["client_drift"] > 0.1


@pytest.mark.usefixtures("float64")
def test_measures_use_all_data_whatever_the_batches_and_dropouts() -> None:
    known = quadratic()
    noisy = known.clients(samples=5, noise=1.0, batch_size=2)
    _, points = measured(known, 2, noisy, engine=fb.Simulator(dropout=0.3, chunk=2))
    for seen in points:
        wanted = expected(known, seen.x, seen.y)
        assert {name: seen.row[name] for name in wanted} == pytest.approx(wanted, abs=1e-10, rel=1e-10)


def test_measures_change_neither_the_run_nor_its_bill() -> None:
    known = quadratic()
    noisy = known.clients(samples=4, noise=0.3, batch_size=2)
    with_measures, _ = measured(known, 4, noisy)
    without, _ = measured(known, 4, noisy, measure=())
    np.testing.assert_array_equal(with_measures.x, without.x)
    assert with_measures.ledger == without.ledger
    assert set(with_measures.history[-1]) - set(without.history[-1]) == set(MEASURES)


def test_only_what_is_asked_for_is_measured() -> None:
    for name in MEASURES:
        result, _ = measured(quadratic(), 0, measure=(name,))
        assert set(MEASURES) & set(result.history[0]) == {name}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("structure", ["minimax", "compositional"])
def test_measures_of_other_structures(structure: str) -> None:
    """In a saddle g = −f, so H = I and the distance is exact; f(y), r(x) likewise."""
    if structure == "minimax":
        known: Any = fb.Saddle.random(jax.random.key(1), 3, 2, centred=False)
        names, lower = (
            ("hypergradient_norm", "lower_distance", "client_drift"),
            known.b.mean(0) - known.A.mean(0) @ jnp.ones(2),
        )
    else:
        known = fb.Composition.random(jax.random.key(1), 3, 2, 3)
        names, lower = tuple(MEASURES), known.R.mean(0) @ jnp.ones(2) + known.s.mean(0)
    result, points = measured(known, 0, measure=names, algorithm=fb.FedNest(0.05, 0.1))
    assert result.history[0]["lower_distance"] == pytest.approx(
        float(jnp.linalg.norm(points[0].y - lower)), abs=1e-10
    )
    assert result.history[0]["hypergradient_norm"] > 0


def test_the_gradient_of_a_single_level_problem() -> None:
    data = jnp.arange(12.0).reshape(3, 2, 2)
    problem = fb.single_level(square, jnp.ones(2))
    result = fb.solve(problem, fb.Clients(data), fb.FedAvg(0.1), 0, measure=("hypergradient_norm",))
    slope = 2 * (1 - np.asarray(data).mean((0, 1)))
    assert result.history[0]["hypergradient_norm"] == pytest.approx(np.linalg.norm(slope), rel=1e-6)


def square(x: Any, samples: Any) -> Any:
    return jnp.mean(jnp.sum((x - samples) ** 2, axis=-1))


def test_mistakes_are_explained() -> None:
    with pytest.raises(ValueError, match=r"no measure 'client_drif'.*did you mean 'client_drift'"):
        measured(quadratic(), 0, measure=("client_drif",))
    with pytest.raises(TypeError, match="must be a sequence of names"):
        measured(quadratic(), 0, measure="client_drift")
    saddle = fb.Saddle.random(jax.random.key(1), 3, 2)
    with pytest.raises(ValueError, match="adjoint_residual cannot be measured on a minimax problem"):
        measured(saddle, 0, measure=("adjoint_residual",), algorithm=fb.FedNest(0.1, 0.1))


# ----------------------------------------------------------------------- at the clients


def distance(x: Any, y: Any, samples: Any) -> Any:
    return jnp.mean(jnp.sum((y - samples["c"]) ** 2, axis=-1))


def with_client_metrics(known: fb.Quadratic) -> fb.Problem:
    return known.problem(client_metrics={"distance": distance})


def test_every_client_is_evaluated_on_all_of_its_own_test_data() -> None:
    known = quadratic()
    test = [{"c": jnp.full((size, 4), float(size))} for size in (1, 2, 3)]
    own = known.clients(samples=4, noise=0.5, batch_size=2, test=test)
    result = fb.solve(with_client_metrics(known), own, METHOD, 2, every=EVERY)
    values = result.history.clients("distance")
    assert values.shape == (2, 3)
    for y, row in ((np.zeros(4), values[0]), (np.asarray(result.y), values[1])):
        np.testing.assert_allclose(row, [np.sum((y - size) ** 2) for size in (1, 2, 3)], rtol=1e-5)
    last = result.history[-1]
    assert last["distance_mean"] == pytest.approx(values[1].mean())
    assert last["distance_worst"] == pytest.approx(values[1].max())
    assert last["distance_p10"] == pytest.approx(np.percentile(values[1], 90))
    assert last["distance_weighted"] == pytest.approx(values[1] @ [1, 2, 3] / 6)


@pytest.mark.usefixtures("float64")
def test_validation_data_have_columns_of_their_own_on_every_engine(processes: Any) -> None:
    """And neither f nor g nor the metrics of the test data see them."""
    known = quadratic()
    held_out = [{"c": jnp.full((size, 4), float(size))} for size in (1, 2, 3)]
    test = [{"c": jnp.zeros((1, 4))}] * 3
    plain = known.clients(samples=4, noise=0.5, batch_size=2, test=test)
    own = known.clients(samples=4, noise=0.5, batch_size=2, test=test, validation=held_out)
    problem = with_client_metrics(known)
    result, without = (fb.solve(problem, clients, METHOD, 2, every=EVERY) for clients in (own, plain))
    np.testing.assert_array_equal(result.x, without.x)
    kinds = ("mean", "worst", "p10", "weighted")
    assert set(result.history[-1]) - set(without.history[-1]) == {f"validation_distance_{k}" for k in kinds}
    assert all(result.history[-1][name] == value for name, value in without.history[-1].items())
    values = result.history.clients("validation_distance")
    wanted = [np.sum((np.asarray(result.y) - size) ** 2) for size in (1, 2, 3)]
    np.testing.assert_allclose(values[-1], wanted, rtol=1e-12)
    assert result.history[-1]["validation_distance_weighted"] == pytest.approx(values[-1] @ [1, 2, 3] / 6)
    there = fb.solve(problem, own, METHOD, 0, engine=processes)
    assert there.history[0] == pytest.approx(result.history[0], rel=1e-12)


def test_the_worst_tenth_is_at_the_bad_end() -> None:
    values = np.arange(11.0)
    first = np.array([90.0] + [1.0] * 10)  # of 100 samples, 90 are those of the first client
    found = summary({"loss": values, "accuracy": values}, {"loss": first, "accuracy": first})
    both = {"mean": 5.0, "weighted": 0.55}
    assert {k: found[f"loss_{k}"] for k in SUMMARIES} == pytest.approx(both | {"worst": 10.0, "p10": 9.0})
    assert {k: found[f"accuracy_{k}"] for k in SUMMARIES} == pytest.approx(both | {"worst": 0.0, "p10": 1.0})
    assert len(found) == 2 * len(SUMMARIES)
    assert summary({}, {}) == {}


def test_a_client_without_a_number_is_not_hidden() -> None:
    for bad in (np.array([1.0, np.nan, 3.0]), np.array([])):
        assert np.isnan([*summary({"loss": bad}, {"loss": np.ones(len(bad))}).values()]).all()


def test_clients_metrics_do_not_change_the_run() -> None:
    known = quadratic()
    plain = fb.solve(known.problem(), known.clients(), METHOD, 2, every=EVERY)
    result = fb.solve(with_client_metrics(known), known.clients(), METHOD, 2, every=EVERY)
    np.testing.assert_array_equal(plain.x, result.x)
    assert plain.ledger == result.ledger


def test_clients_values_survive_files_and_continuation(tmp_path: Any) -> None:
    known = quadratic()
    problem, clients = with_client_metrics(known), known.clients()
    whole = fb.solve(problem, clients, METHOD, 4, every=EVERY)
    half = fb.load(fb.solve(problem, clients, METHOD, 2, every=EVERY).save(tmp_path / "half"))
    continued = fb.solve(problem, clients, METHOD, 2, every=EVERY, start=half)
    np.testing.assert_array_equal(continued.history.clients("distance"), whole.history.clients("distance"))
    with pytest.raises(KeyError, match=r"no client metric 'distanc'; there are \['distance'\]"):
        whole.history.clients("distanc")


# ---------------------------------------------------------------------- other engines


@pytest.mark.usefixtures("float64")
def test_client_processes_give_the_same_numbers(processes: Any) -> None:
    known = quadratic()
    own = known.clients(samples=3, noise=0.5, batch_size=2)
    problem = with_client_metrics(known)
    runs = [
        fb.solve(problem, own, METHOD, 0, measure=tuple(MEASURES), engine=engine)
        for engine in ("simulator", processes)
    ]
    for here, there in zip(runs[0].history, runs[1].history, strict=True):
        assert here.keys() == there.keys()
        assert there == pytest.approx(here, abs=1e-10, rel=1e-10)
    np.testing.assert_allclose(
        runs[0].history.clients("distance"), runs[1].history.clients("distance"), rtol=1e-12
    )
    assert runs[1].ledger == fb.Ledger(), "evaluation is not billed"
    assert runs[1].failures == ()
