"""Many jobs: together where only numbers differ, and each as `solve` would have done it."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from experiment.tiny import same_bits
from fedbilevel.experiment import DivergenceWarning
from fedbilevel.experiment.sweep import Job, lanes, sweep

known = fb.Saddle.random(jax.random.key(0), clients=3, d=2, centred=False)
PROBLEM, CLIENTS = known.problem(), known.clients()
EVERY = 2


def job(upper_lr: float = 0.05, seed: int = 0, **changes: Any) -> Job:
    cohort = changes.pop("cohort", 2)
    method = changes.pop("algorithm", fb.FedAvgS(upper_lr, 0.1, cohort=cohort))
    return Job(changes.pop("problem", PROBLEM), changes.pop("clients", CLIENTS), method, seed, **changes)


def alone(one: Job, steps: int, **options: Any) -> Any:
    fields = {name: getattr(one, name) for name in one.__dataclass_fields__}
    return fb.solve(**fields, steps=steps, every=EVERY, **options)


def close(a: Any, b: Any) -> None:
    """Equal to rounding, and in what is counted exactly."""
    jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=1e-5, atol=1e-6), a.state, b.state)
    assert (a.steps, a.seed, a.diverged, a.ledger) == (b.steps, b.seed, b.diverged, b.ledger)
    assert a.history.column("step").tolist() == b.history.column("step").tolist()
    np.testing.assert_allclose(a.history.column("error"), b.history.column("error"), rtol=1e-4, atol=1e-6)


def test_jobs_that_differ_in_numbers_are_one_program() -> None:
    jobs = [job(0.05), job(0.1, cohort=3), job(0.2, seed=7), job(0.1), job(clients=known.clients())]
    assert list(lanes(jobs)) == [[0, 2, 3], [1], [4]]
    scheduled = fb.FedAvgS(lambda step: 0.1, 0.1, cohort=2)
    assert list(lanes([job(), job(algorithm=scheduled)])) == [[0], [1]]
    assert list(lanes([job(), job(problem=eqx.tree_at(lambda p: p.x0, PROBLEM, jnp.zeros(2)))])) == [[0, 1]]
    assert list(lanes([])) == []


def test_a_job_that_goes_on_from_elsewhere_is_another_program() -> None:
    start = alone(job(), 2)
    assert list(lanes([job(), job(start=start), job(0.1)])) == [[0, 2], [1]]


def test_each_is_what_solve_gives_in_the_order_of_the_jobs() -> None:
    jobs = [job(0.05), job(0.1, cohort=3), job(0.2, seed=7), job(0.05, seed=1)]
    for one, result in zip(jobs, sweep(jobs, 5, every=EVERY), strict=True):
        close(result, alone(one, 5))


def test_a_lane_that_diverges_or_stops_leaves_the_others_alone() -> None:
    impatient = fb.Best("error", "max", patience=1)
    jobs = [job(1e30), job(0.05), job(0.1, best=impatient), job(0.1)]
    with pytest.warns(DivergenceWarning):
        results = sweep(jobs, 6, every=EVERY)
    assert [result.steps for result in results][1:] == [6, 2, 6]
    assert [result.diverged for result in results] == [True, False, False, False]
    for one, result in zip(jobs[1:], results[1:], strict=True):
        close(result, alone(one, 6))
    assert results[2].best is not None
    assert results[2].best.step == 0
    with pytest.warns(DivergenceWarning):
        by_itself = alone(jobs[0], 6)
    close(results[0], by_itself)
    assert results[0].steps == by_itself.steps


def test_every_callback_sees_its_own_run() -> None:
    seen: list[list[Any]] = [[], []]
    jobs = [job(0.05, callback=seen[0].append), job(0.1, callback=seen[1].append)]
    results = sweep(jobs, 4, every=EVERY)
    for evaluations, result in zip(seen, results, strict=True):
        assert [evaluation.row for evaluation in evaluations] == list(result.history)
        assert same_bits(evaluations[-1].result().x, result.x)


def test_jobs_go_on_together() -> None:
    halves = [alone(job(rate), 2) for rate in (0.05, 0.1)]
    jobs = [job(rate, start=half) for rate, half in zip((0.05, 0.1), halves, strict=True)]
    assert list(lanes(jobs)) == [[0, 1]]
    for rate, result in zip((0.05, 0.1), sweep(jobs, 4, every=EVERY), strict=True):
        close(result, alone(job(rate), 6))


def test_measures_and_steps_of_zero() -> None:
    results = sweep([job(0.05), job(0.1)], 0, measure=("client_drift",))
    assert [len(result.history) for result in results] == [1, 1]
    assert results[0].history[0]["client_drift"] > 0
    assert sweep([], 3) == []


def test_mistakes_are_those_of_solve() -> None:
    with pytest.raises(ValueError, match="steps is -1"):
        sweep([job(), job(0.1)], -1)
    with pytest.raises(TypeError, match="`problem` is 3"):
        sweep([job(problem=3)], 1)
    with pytest.raises(ValueError, match="did you mean 'simulator'"):
        sweep([job()], 1, engine="simulater")


def test_engines_of_one_lane_run_one_by_one(processes: Any) -> None:
    jobs = [job(0.05), job(0.1)]
    for one, result in zip(jobs, sweep(jobs, 2, every=EVERY, engine=processes), strict=True):
        close(result, alone(one, 2))


def test_words_are_the_same_where_they_read_the_same() -> None:
    """Also if they are two objects, as those of two files are."""
    words = ["".join(("la", "st")) for _ in range(2)]
    assert words[0] is not words[1]
    quadratic = fb.Quadratic.random(jax.random.key(0), 3, 2, 2)
    data = {"problem": quadratic.problem(), "clients": quadratic.clients()}
    methods = [
        fb.PDBO(fb.links.Complete(), lr, 2, fb.SGD(0.1), 2, adjoint_lr=word)
        for lr, word in zip((0.1, 0.05), words, strict=True)
    ]
    jobs = [job(algorithm=method, **data) for method in methods]
    assert list(lanes(jobs)) == [[0, 1]]
    for one, result in zip(jobs, sweep(jobs, 1, every=EVERY), strict=True):
        close(result, alone(one, 1))
