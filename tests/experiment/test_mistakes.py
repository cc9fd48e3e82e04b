"""What a user sees after a typical mistake: what was seen, why it is wrong, what to do."""

from __future__ import annotations

import threading
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.data import DataError
from fedbilevel.experiment import AdjointWarning
from fedbilevel.fed import Program, ProgramError
from fedbilevel.local import Work
from fedbilevel.problem import ProblemError


def upper(x: Any, y: Any, samples: Any) -> Any:
    return jnp.mean((samples @ y) ** 2) + jnp.sum(x**2)


def lower(x: Any, y: Any, samples: Any) -> Any:
    return upper(x, y, samples) + jnp.sum((y - x) ** 2)


def linear(x: Any, y: Any, samples: Any) -> Any:
    return jnp.sum(y) * jnp.sum(x) + 0 * jnp.sum(samples)


DATA = np.ones((2, 3, 4), np.float32)
LINEAR = fb.Problem(upper, linear, jnp.zeros(4), jnp.zeros(4))
METHOD = fb.FedNest(0.1, 0.1, series="cg", terms=2)


def solve(problem: Any = None, clients: Any = None, algorithm: Any = METHOD, **options: Any) -> Any:
    problem = fb.Problem(upper, lower, jnp.zeros(4), jnp.zeros(4)) if problem is None else problem
    return fb.solve(problem, fb.Clients(DATA) if clients is None else clients, algorithm, 1, **options)


MISTAKES: dict[str, tuple[Any, type[Exception], str]] = {
    "y0 of a wrong shape": (
        lambda: solve(fb.Problem(upper, lower, jnp.zeros(4), jnp.zeros(5))),
        ProblemError,
        r"upper objective failed.*\(x, y, samples\) of the shapes x \(4,\), y \(5,\)",
    ),
    "y0 of a wrong structure": (
        lambda: solve(fb.Problem(upper, lower, jnp.zeros(4), {"w": jnp.zeros(4)})),
        ProblemError,
        "structure that it expects",
    ),
    "no number in y0": (
        lambda: fb.Problem(upper, lower, jnp.zeros(4), {"w": jnp.tanh}),
        ProblemError,
        "equinox.partition",
    ),
    "structure": (
        lambda: fb.Problem(upper, lower, 0.0, 0.0, structure="minmax"),  # type: ignore[arg-type]
        ProblemError,
        "minmax.*minimax",
    ),
    "problem and clients exchanged": (
        lambda: fb.solve(fb.Clients(DATA), 0, METHOD, 1),  # type: ignore[arg-type]
        TypeError,
        r"`problem` is .*solve\(problem, clients, algorithm, steps\)",
    ),
    "data in the place of clients": (lambda: solve(clients=[DATA]), TypeError, "must be a Clients"),
    "class in the place of a method": (lambda: solve(algorithm=fb.FedNest), TypeError, "must be a Algorithm"),
    "step size as text": (lambda: fb.FedAvg("0.1"), ValueError, "step size is '0.1'"),
    "negative step size": (lambda: fb.FedAvg(-0.1), ValueError, "at least 0"),
    "vector as metric": (
        lambda: solve(fb.Problem(upper, lower, jnp.zeros(4), jnp.zeros(4), metrics={"m": lambda x, y: x})),
        ValueError,
        "metric 'm' must be a JAX function",
    ),
    "numpy in a metric": (
        lambda: solve(
            fb.Problem(
                upper, lower, jnp.zeros(4), jnp.zeros(4), metrics={"m": lambda x, y: np.max(np.asarray(x))}
            )
        ),
        ValueError,
        "metric 'm' must be a JAX function",
    ),
    "metric named like a column": (
        lambda: solve(
            fb.Problem(upper, lower, jnp.zeros(4), jnp.zeros(4), metrics={"rounds": lambda x, y: 0.0})
        ),
        ValueError,
        "rounds.*rename",
    ),
    "list inside stacked data": (lambda: fb.Clients({"a": [DATA[0], DATA[1]]}), DataError, "outermost"),
    "batch size of a fraction": (lambda: fb.Clients(DATA, batch_size=2.5), DataError, "whole number"),  # type: ignore[arg-type]
    "weightless clients in a sampled cohort": (
        lambda: solve(clients=fb.Clients(DATA, weights=[1.0, 0.0]), algorithm=fb.FedNest(0.1, 0.1, cohort=1)),
        ValueError,
        "weight 0",
    ),
    "an objective that is no function": (
        lambda: fb.Problem(3, lower, jnp.zeros(4), jnp.zeros(4)),  # type: ignore[arg-type]
        ProblemError,
        r"upper is 3; it must be a function of \(x, y, samples\)",
    ),
    "a damping that makes it worse": (
        lambda: fb.FedNest(0.1, 0.1, damping=-1.0),
        ValueError,
        "damping is -1.0; it must be a number of at least 0",
    ),
    "a series that is none": (
        lambda: fb.FedNest(0.1, 0.1, series="smapled"),  # type: ignore[arg-type]
        ValueError,
        "series is 'smapled'; it must be one of .*did you mean 'sampled'",
    ),
    "local work on the data of no level": (
        lambda: Work("uper"),
        ValueError,
        "level is 'uper'; it must be 'upper' or 'lower'",
    ),
    "a decoder that is numbered with a fraction": (
        lambda: fb.EachDecoder((fb.LinearSketch(3, seed=1), fb.LinearSketch(3, seed=2)), (0, 1.0)),  # type: ignore[arg-type]
        ValueError,
        r"assignment names the decoder 1\.0, but there are 2",
    ),
    "diagnosis of a linear lower level": (
        lambda: fb.diagnose(LINEAR, fb.Clients(DATA), jnp.zeros(4), jnp.zeros(4)),
        ValueError,
        "no curvature",
    ),
    "the smoothness of a linear lower level": (
        lambda: solve(LINEAR, algorithm=fb.FedNest(0.1, 0.1, smoothness="auto")),
        ValueError,
        "no curvature.*give `smoothness` as a number",
    ),
    "the clients' own smoothness of a linear lower level": (
        lambda: solve(LINEAR, algorithm=fb.LFedNest(0.1, 0.1, smoothness="auto")),
        ValueError,
        "no curvature.*give `smoothness` as a number",
    ),
    "diagnosis of NaN": (
        lambda: fb.diagnose(
            fb.Problem(upper, lower, jnp.zeros(4), jnp.zeros(4)),
            fb.Clients(DATA),
            jnp.full(4, jnp.nan),
            jnp.zeros(4),
        ),
        ValueError,
        "NaN",
    ),
}


LEARN_Y = {
    "SGP": lambda: fb.SGP(fb.links.Ring(), 0.1),
    "PDBO": lambda: fb.PDBO(fb.links.Ring(), 0.1, 2, fb.SGD(0.1), terms=2),
    "Local": lambda: fb.Local(0.1),
    "QFFL": lambda: fb.QFFL(0.1),
    "FedProx": lambda: fb.FedProx(0.1, 1.0),
    "FedSep": lambda: fb.FedSep(fb.LinearSketch(2), fb.SGD(0.1)),
    "CompressedFedAvg": fb.CompressedFedAvg,
    "FetchSGD": lambda: fb.FetchSGD(fb.SGD(0.1), 1, 3, 4, 1),
}


@pytest.mark.parametrize("name", LEARN_Y)
def test_a_method_that_learns_y_needs_one(name: str) -> None:
    """Over an empty y it would do nothing, and say nothing."""
    one = fb.single_level(lambda x, samples: upper(0 * x, x, samples), jnp.zeros(4))
    with pytest.raises(ValueError, match=r"learns y, and this problem \(single_level\) has none.*make it y"):
        solve(one, algorithm=LEARN_Y[name]())


def test_pdbo_needs_an_x() -> None:
    alone = fb.Problem(lambda x, y, s: jnp.mean(s @ y), lambda x, y, s: jnp.mean(s @ y), (), jnp.zeros(4))
    with pytest.raises(ValueError, match="tunes x, and this problem has none: its x0 is empty"):
        solve(alone, algorithm=LEARN_Y["PDBO"]())


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_gets_an_error_that_explains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the type checker of the tests, which a user does not have.
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    use, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=f"(?s){message}"):
        use()


class Smuggle(Program):
    function: Any = eqx.field(static=True)

    def __call__(self, me: Any, *values: Any) -> Any:
        return self.function(values[0])


def test_a_closure_in_a_field_is_refused() -> None:
    secret = jnp.ones(4)
    fed = fb.Simulator().federation(fb.Problem(upper, lower, jnp.zeros(4), jnp.zeros(4)), fb.Clients(DATA))
    everyone = fed.everyone
    with pytest.raises(ProgramError, match=r"field function.*cannot be found by name"):
        everyone.run(Smuggle(lambda x: x + secret), everyone.send(0.0, "x"), key=jax.random.key(0))
    everyone.run(Smuggle(jnp.sin), everyone.send(0.0, "x"), key=jax.random.key(0))


def test_a_tuple_is_a_tree_and_a_list_is_the_clients() -> None:
    features, targets = np.zeros((5, 3, 2)), np.zeros((5, 3))
    assert fb.Clients((features, targets)).n == 5
    assert fb.Clients([(features[0], targets[0]), (features[1], targets[1])]).n == 2


def test_runs_in_several_threads_keep_their_own_books() -> None:
    results: list[Any] = []
    problem = fb.single_level(lambda x, samples: jnp.mean((x - samples) ** 2), jnp.zeros(4))

    def run() -> None:
        results.append(fb.solve(problem, fb.Clients(DATA), fb.FedAvg(0.1), 3))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert all(result.ledger == results[0].ledger for result in results)


def test_a_billion_samples_in_a_step_are_counted() -> None:
    """2 clients × 1,000 steps × a batch of 2,000,000 repeated samples: more than 32 bits hold."""
    problem = fb.single_level(lambda x, samples: x**2 + 0 * samples[0], 0.0)
    clients = fb.Clients(jnp.zeros((2, 2_000_000), jnp.int8))
    assert fb.solve(problem, clients, fb.FedAvg(1e-6, steps=1000), 1).ledger.samples == 4_000_000_000


def test_one_kind_of_trouble_is_one_note() -> None:
    problem = fb.Problem(upper, lower, jnp.ones(4), jnp.ones(4))
    method = fb.FedNest(1e-3, 1e-3, series="sum", terms=3, smoothness=0.1)
    with pytest.warns(AdjointWarning) as caught:
        result = fb.solve(problem, fb.Clients(DATA), method, 3, every=1)
    assert len(result.notes) == len(caught) == 1


# ------------------------------------------------- clients that differ in curvature


def tilted(x: Any, y: Any, samples: Any) -> Any:
    """Each client is steep along an axis of its own, so the mean is much flatter than any of them."""
    return jnp.mean(jnp.sum(samples * y**2, -1)) / 2 - jnp.sum(x * y)


def test_local_methods_measure_the_clients_own_curvature() -> None:
    problem = fb.Problem(upper_of_y, tilted, jnp.ones(3), jnp.zeros(3))
    clients = fb.Clients((jnp.ones((3, 3)) + 9 * jnp.eye(3))[:, None])
    settings: dict[str, Any] = {"upper_lr": 0.01, "lower_lr": 0.05, "series": "sum", "terms": 3}
    own = fb.solve(problem, clients, fb.LFedNest(**settings), 1).smoothness
    mean = fb.solve(problem, clients, fb.FedNest(**settings), 1).smoothness
    assert own is not None
    assert mean is not None
    assert mean >= 4.0 * (1 - 1e-5), "the mean Hessian is 4 I"
    assert 10.0 * (1 - 1e-5) <= own <= 12.0


@pytest.mark.parametrize("method", [fb.LFedNest, fb.LFedNestNonAlt])
def test_local_adjoints_that_fail_are_reported_on_request(method: Any) -> None:
    """A third of the clients have an eigenvalue above 2ℓ; the report costs two scalars a client."""
    problem = fb.Problem(upper_of_y, tilted, jnp.ones(3), jnp.zeros(3))
    clients = fb.Clients(jnp.array([[[1.0, 1.0, 1.0]], [[1.0, 1.0, 2.0]], [[1.0, 1.0, 10.0]]]))
    settings: dict[str, Any] = {"upper_lr": 1e-3, "lower_lr": 1e-2, "series": "sum", "terms": 6}
    with pytest.warns(AdjointWarning, match="33% of the clients"):
        bad = fb.solve(problem, clients, method(**settings, smoothness=3.0, residual=True), 2)
    good = fb.solve(problem, clients, method(**settings, smoothness=11.0, damping=50.0, residual=True), 2)
    plain = fb.solve(problem, clients, method(**settings, smoothness=11.0, damping=50.0), 2)
    assert bad.history[-1]["adjoint_failed"] == pytest.approx(1 / 3)
    assert good.history[-1]["adjoint_failed"] == 0
    assert 0 < good.history[-1]["adjoint_residual"] < 0.1 < bad.history[-1]["adjoint_residual"]
    assert good.ledger.bytes - plain.ledger.bytes == 2 * 3 * 2 * 4
    assert good.ledger.calls["g_yy"] - plain.ledger.calls["g_yy"] == 2 * 3
    np.testing.assert_allclose(good.x, plain.x, rtol=1e-6)


def upper_of_y(x: Any, y: Any, samples: Any) -> Any:
    return jnp.sum((y - 1) ** 2) + 0.1 * jnp.sum(x**2) + 0 * jnp.mean(samples)


def test_diagnosis_draws_estimates_as_a_run_would() -> None:
    """With one sample a batch the noise of the batches is part of the error."""
    quadratic = fb.Quadratic.random(jax.random.key(0), 3, 3, 4)
    problem, method = quadratic.problem(), fb.FedNest(0.1, 0.1, series="cg", terms=4)
    errors = {}
    for size in (1, None):
        clients = quadratic.clients(samples=4, noise=1.0, batch_size=size)
        errors[size] = fb.diagnose(problem, clients, problem.x0, problem.y0, algorithm=method).estimator_error
    assert errors[1] is not None
    assert errors[1] > 0.05
    assert errors[None] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("method", [fb.FedNest, fb.LFedNest])
def test_residual_of_a_system_without_right_hand_side_is_zero(method: Any) -> None:
    """At the optimum `∇_y f = 0`: the report must be a number, not 0/0."""
    problem = fb.Problem(upper, lower, jnp.zeros(4), jnp.zeros(4))
    result = fb.solve(problem, fb.Clients(DATA), method(0.1, 0.1, series="cg", terms=2, residual=True), 1)
    assert result.history[-1]["adjoint_residual"] == 0
