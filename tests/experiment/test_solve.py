"""`solve`: what it returns, that it is reproducible, and that it can go on from where it stopped."""

import itertools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest

from fedbilevel import Clients, FedAvgS, FedNest, Ledger, Problem, load, minimax, solve
from fedbilevel.algorithm.base import Algorithm
from fedbilevel.experiment import AdjointWarning, DataWarning, DivergenceWarning, History
from fedbilevel.experiment.suspicion import data_notes
from fedbilevel.fed import Program
from fedbilevel.problem import ProblemError
from fedbilevel.problem.quadratic import DistanceTo, lower_objective, upper_objective
from fedbilevel.problem.structured import saddle_objective
from fedbilevel.schedule import Rate, rate

# Every run below uses these shapes and `every=2`, so that nearly all of them share one compilation.
EVERY = 2


def problem(x0: Any = (1.0, 1.0), y0: Any = (0.5, 0.5)) -> Problem:
    return minimax(
        saddle_objective, jnp.array(x0), jnp.array(y0), metrics={"error": DistanceTo(jnp.zeros(2))}
    )


def clients(seed: int = 0, penalty: float = 1.0) -> Clients:
    """Three clients with four noisy samples each, read two at a time."""
    draws = np.random.default_rng(seed)
    b = draws.normal(size=(3, 4, 2))
    slopes = 0.2 * np.arange(1, 4).reshape(3, 1, 1, 1) * np.eye(2)
    rows = {"A": np.broadcast_to(slopes, (3, 4, 2, 2)), "b": b, "penalty": np.full((3, 4), penalty)}
    return Clients({name: jnp.asarray(row, jnp.float32) for name, row in rows.items()}, batch_size=2)


def run(steps: int, algorithm: Any = None, **options: Any) -> Any:
    algorithm = FedAvgS(0.1, 0.1) if algorithm is None else algorithm
    given = options.pop("problem", None) or problem()
    return solve(
        given, options.pop("clients", None) or clients(), algorithm, steps, **{"every": EVERY} | options
    )


def same_bits(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(jax.tree.map(np.array_equal, a, b))


def same_run(a: Any, b: Any) -> bool:
    return same_bits((a.x, a.y, a.state), (b.x, b.y, b.state)) and (a.ledger, a.history, a.steps) == (
        b.ledger,
        b.history,
        b.steps,
    )


@pytest.fixture(scope="module")
def result() -> Any:
    return run(5)


# ------------------------------------------------------------------- what it returns


def test_the_history_has_a_row_at_the_start_every_so_many_steps_and_at_the_end(result: Any) -> None:
    assert result.history.column("step").tolist() == [0, 2, 4, 5]
    assert (result.steps, result.seed, result.diverged) == (5, 0, False)
    assert (result.failures, result.notes) == ((), ())


def test_the_last_row_belongs_to_the_solution(result: Any) -> None:
    np.testing.assert_allclose(result.history[-1]["error"], np.linalg.norm(result.x), rtol=1e-6)
    np.testing.assert_allclose(result.history[0]["error"], np.sqrt(2), rtol=1e-6)
    assert result.history[-1]["error"] < result.history[0]["error"]
    assert same_bits(tuple(result.state), (result.x, result.y))


def test_the_cost_of_a_row_is_cumulative_and_ends_at_the_whole_cost(result: Any) -> None:
    for name, amount in result.ledger.columns().items():
        column = result.history.column(name)
        assert np.all(np.diff(column) >= 0)
        assert (column[0], column[-1]) == (0, amount)
    pair = 5 * 3 * 8
    assert result.ledger == Ledger(
        rounds=5,
        down={"x": pair, "y": pair},
        up={"xy": 2 * pair},
        calls={"f_x": 15, "f_y": 15},
        samples=30,
    )


def test_the_history_has_about_twenty_rows_by_default() -> None:
    assert run(40, every=None).history.column("step").tolist() == list(range(0, 41, 2))


def test_no_steps_give_the_start() -> None:
    nothing = run(0)
    assert same_bits(nothing.x, problem().x0)
    assert (nothing.steps, len(nothing.history), nothing.ledger) == (0, 1, Ledger())


def test_a_history_is_a_sequence_of_rows_with_columns() -> None:
    history = History(({"step": 0, "a": 1.0}, {"step": 2}, {"step": 4, "a": 3.0}))
    assert len(history) == 3
    assert history[-1] == {"step": 4, "a": 3.0}
    assert isinstance(history[1:], History)
    assert [row["step"] for row in history[1:]] == [2, 4]
    np.testing.assert_array_equal(history.column("a"), [1.0, np.nan, 3.0])
    with pytest.raises(KeyError, match=r"no column 'b'; the columns are \['a', 'step'\]"):
        history.column("b")


# ------------------------------------------------------------------- reproducible


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(result: Any) -> None:
    assert same_run(run(5, seed=0), result)
    other = run(5, seed=1)
    assert not same_bits(other.x, result.x)
    assert other.ledger == result.ledger
    assert other.seed == 1


def test_a_continued_run_is_one_long_run(result: Any) -> None:
    long = run(8)
    assert same_run(run(6, start=run(2)), long)
    assert not same_bits(result.x, long.x)


def test_a_continued_run_keeps_its_seed() -> None:
    assert same_run(run(2, start=run(2, seed=7)), run(4, seed=7))


def test_a_run_continues_from_a_file(tmp_path: Any) -> None:
    path = run(4).save(tmp_path / "half.result")
    assert same_run(run(4, start=load(path)), run(8))


def test_the_rows_of_a_continued_run_depend_on_where_it_stopped_but_its_path_does_not(result: Any) -> None:
    continued = run(3, start=result)
    assert continued.history.column("step").tolist() == [0, 2, 4, 5, 7, 8]
    assert same_bits(continued.x, run(8).x)


# ----------------------------------------------------------------------- callbacks


def test_a_callback_sees_every_evaluation_as_it_is_made() -> None:
    seen: list[Any] = []
    finished = run(5, callback=seen.append)
    assert [evaluation.row for evaluation in seen] == list(finished.history)
    assert same_bits((seen[-1].x, seen[-1].y), (finished.x, finished.y))
    assert same_bits(seen[0].x, problem().x0)


def test_a_callback_stops_the_run_by_returning_true() -> None:
    stopped = run(8, callback=lambda evaluation: evaluation.row["step"] >= 4)
    assert stopped.steps == 4
    assert not stopped.diverged
    assert same_run(stopped, run(4))
    assert same_run(run(4, start=stopped), run(8))


@pytest.mark.parametrize("answer", [np.True_, jnp.asarray(True)], ids=["numpy", "jax"])
def test_a_callback_stops_the_run_by_a_comparison_of_arrays(answer: Any) -> None:
    assert run(4, callback=lambda evaluation: answer).steps == 0


def test_a_callback_can_stop_a_run_before_its_first_step() -> None:
    assert run(8, callback=lambda evaluation: True).steps == 0


# ----------------------------------------------------------------------- schedules


def test_a_constant_schedule_is_a_constant(result: Any) -> None:
    scheduled = run(5, FedAvgS(optax.constant_schedule(0.1), 0.1))
    assert same_bits((scheduled.x, scheduled.y), (result.x, result.y))


def test_a_schedule_gives_each_step_its_own_size() -> None:
    schedule = optax.exponential_decay(0.2, transition_steps=1, decay_rate=0.5)
    scheduled = run(4, FedAvgS(schedule, 0.1))
    by_hand = run(1, FedAvgS(0.2, 0.1))
    for time in range(1, 4):
        by_hand = run(1, FedAvgS(0.2 * 0.5**time, 0.1), start=by_hand)
    np.testing.assert_allclose(scheduled.x, by_hand.x, rtol=1e-6)
    np.testing.assert_allclose(scheduled.y, by_hand.y, rtol=1e-6)
    assert not np.allclose(scheduled.x, run(4, FedAvgS(0.2, 0.1)).x, rtol=1e-3)
    assert same_bits(run(2, FedAvgS(schedule, 0.1), start=run(2, FedAvgS(schedule, 0.1))).x, scheduled.x)


# ---------------------------------------------------------------------- divergence


@pytest.mark.parametrize(("upper_lr", "good_steps"), [(1e30, 1), (1e12, 3), (np.inf, 0)])
def test_a_diverging_run_returns_its_last_finite_state(upper_lr: float, good_steps: int) -> None:
    with pytest.warns(DivergenceWarning, match=rf"diverged after {good_steps} steps.*diagnose"):
        diverged = run(6, FedAvgS(upper_lr, 0.1))
    assert diverged.diverged
    assert diverged.steps == good_steps
    assert np.all(np.isfinite(diverged.x))
    assert np.all(np.isfinite(diverged.y))
    exact = run(good_steps, FedAvgS(upper_lr, 0.1))
    assert not exact.diverged
    assert same_bits((diverged.x, diverged.y), (exact.x, exact.y))
    assert diverged.history[-1]["step"] == good_steps


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_run_that_diverges_by_its_data_says_whose_they_are(bad: float) -> None:
    """Other runs that diverge say nothing of their data: there a warning would be an error."""
    rows = {**clients().lower.flat}
    rows["b"] = rows["b"].at[2 * 4 + 1, 0].set(bad)  # the second sample of client 2
    broken = Clients({name: leaf.reshape(3, 4, *leaf.shape[1:]) for name, leaf in rows.items()})
    warned = pytest.warns(DataWarning, match=r"samples of clients \[2\] hold a NaN")
    with warned, pytest.warns(DivergenceWarning):
        assert run(2, clients=broken.batched(2)).diverged
    ours = Clients.indexed(rows, lower=[[0, 1], [9], [2]], upper=[[9], [0], [1]])
    assert "clients [0, 1] hold" in data_notes(ours)[0]
    assert data_notes(clients()) == ()


# ---------------------------------------------------------- state kept by the clients


class Trained(NamedTuple):
    x: Any
    kept: Any


class Pull(Program):
    """The client's sum of all slopes so far, its own memory."""

    def __call__(self, me: Any, *values: Any) -> Any:
        x, memory = values
        return memory + me.f_x(x, jnp.ones(2), me.batch("upper", me.key))


class Momentum(Algorithm[Trained]):
    """Descent on x along the mean of what the clients keep."""

    lr: Rate = eqx.field(converter=rate)
    growth: Any = 0.0
    curvature: Any = 1.0

    def init(self, fed: Any, key: Any) -> Trained:
        return Trained(fed.problem.x0, fed.keep(jnp.zeros((fed.n, 2))))

    def step(self, fed: Any, state: Trained, key: Any) -> Any:
        cohort = fed.everyone
        memory = cohort.run(Pull(), cohort.send(state.x, "x"), cohort.take(state.kept), key=key)
        x = state.x - self.lr * cohort.mean(memory, "m")
        info = {"adjoint_growth": jnp.asarray(self.growth), "adjoint_curvature": jnp.asarray(self.curvature)}
        return Trained(x, cohort.put(state.kept, memory)), info

    def solution(self, state: Trained) -> Any:
        return state.x, state.kept


def test_what_clients_keep_is_part_of_the_state_and_of_the_solution(tmp_path: Any) -> None:
    long = run(4, Momentum(0.1))
    assert long.y.shape == (3, 2)
    assert len({tuple(row) for row in long.y.tolist()}) == 3
    path = run(2, Momentum(0.1)).save(tmp_path / "kept")
    assert same_run(run(2, Momentum(0.1), start=load(path)), long)


def test_what_the_method_reports_is_in_the_history_and_warned_about() -> None:
    fine = run(2, Momentum(0.1, growth=0.5))
    assert fine.history[-1]["adjoint_growth"] == 0.5
    assert fine.notes == ()
    with pytest.warns(AdjointWarning, match=r"series grew \(by 2 at worst\).*Raise `smoothness`"):
        growing = run(2, Momentum(0.1, growth=2.0))
    assert len(growing.notes) == 1
    with pytest.warns(AdjointWarning, match=r"negative curvature \(-0\.5 at worst\).*Add `damping`"):
        run(2, Momentum(0.1, curvature=-0.5))


def test_what_the_step_that_diverges_reports_is_warned_about_too() -> None:
    with pytest.warns(DivergenceWarning), pytest.warns(AdjointWarning, match=r"grew \(by 2 at worst\)"):
        found = run(2, Momentum(1e300, growth=2.0))
    assert found.diverged
    assert "adjoint_growth" not in found.history[-1], "it is no part of the history"


# ------------------------------------------------------------------- "auto" smoothness


def measure(**options: Any) -> Any:
    """A run of no steps of a method that has to measure a bilevel problem first."""
    eye, mixed, zero = np.eye(3), np.ones((2, 3, 2)), np.zeros((2, 3))
    lower = {"A": np.array([3 * eye, 5 * eye]), "B": mixed, "b": zero}
    upper = {"D": lower["A"], "E": mixed.swapaxes(1, 2), "c": zero, "e": zero[:, :2], "rho": np.ones(2)}
    levels = jax.tree.map(lambda row: jnp.asarray(row, jnp.float32)[:, None], (lower, upper))
    bilevel = Problem(upper_objective, lower_objective, jnp.ones(2), jnp.zeros(3))
    return solve(bilevel, Clients(*levels), FedNest(0.1, 0.1), 0, **options)


def test_auto_smoothness_is_measured_and_billed() -> None:
    vector = 2 * 3 * 4
    assert measure().ledger == Ledger(
        rounds=3,
        down={"x": 2 * 2 * 4, "y": vector, "u": 3 * vector},
        up={"u": 3 * vector},
        calls={"g_yy": 6},
        samples=6,
    )


def test_a_continued_run_with_auto_smoothness_costs_what_one_long_run_costs() -> None:
    first = measure()
    assert measure(start=first).ledger == first.ledger


# ----------------------------------------------------------------------------- errors


@pytest.mark.parametrize("start", [{"x0": (1.0, np.nan)}, {"y0": (np.inf, 0.0)}])
def test_a_start_that_is_not_finite_is_refused(start: Any) -> None:
    with pytest.raises(ValueError, match="x0 or y0 holds a NaN or an infinity: a run cannot start there"):
        run(1, problem=problem(**start))


def test_an_unknown_engine_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        ValueError, match=r"no engine 'simulatr'; the engines are .*did you mean 'simulator'\?"
    ):
        run(1, engine="simulatr")
    with pytest.raises(ValueError, match=r"the engines are simulator, process, mesh, nvflare$"):
        run(1, engine="xyz")


@pytest.mark.parametrize(
    ("steps", "every"), [(-1, 2), (1, 0), (1, -3), (3.5, 1), ("3", 1), (None, 1), (True, 1), (2, 1.5)]
)
def test_numbers_of_steps_are_checked(steps: Any, every: Any) -> None:
    with pytest.raises(ValueError, match=r"(steps|every) is .*; it must be a whole number of at least [01]"):
        run(steps, every=every)


def test_numbers_of_steps_may_be_numpys() -> None:
    assert run(np.int64(2), every=np.int32(1)).steps == 2


def per_sample(x: Any, y: Any, samples: Any) -> Any:
    return (samples - y) ** 2


def with_extras(x: Any, y: Any, samples: Any) -> Any:
    return jnp.mean(samples - y), {"extra": 1}


def whole_number(x: Any, y: Any, samples: Any) -> Any:
    return jnp.sum(samples > y)


def mean_square(x: Any, y: Any, samples: Any) -> Any:
    return jnp.mean((samples - y) ** 2)


EQUAL, UNEQUAL = (3, 3), (2, 3)


@pytest.mark.parametrize(
    ("wrong", "sizes"),
    list(itertools.product([per_sample, with_extras, whole_number], [EQUAL, UNEQUAL])),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_objective_that_is_no_real_number_is_refused(wrong: Any, sizes: Any, monkeypatch: Any) -> None:
    # As in a user's process: no type checker steps in before the library's own message.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    data = Clients(lower=[np.ones(size) for size in sizes])
    for level, functions in (("upper", (wrong, mean_square)), ("lower", (mean_square, wrong))):
        with pytest.raises(
            ProblemError, match=rf"the {level} objective must return one real number.*jnp\.mean"
        ):
            solve(Problem(*functions, x0=0.0, y0=0.0), data, FedAvgS(0.1, 0.1), 1)
