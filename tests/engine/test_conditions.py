"""Conditions of a simulated federation: who is there, who is late, and how long it takes."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.engine.conditions import Bernoulli, DayNight, Link, LogNormal, OnOff, Speed, Trace
from fedbilevel.engine.conditions.cohort import ConditionedCohort
from fedbilevel.fed import Dense, Program
from fedbilevel.fed.codec import Partial
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.ledger import Ledger, metering

N, KEY = 6, jr.key(3)
VALUES = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0], np.float32)
IDS = jnp.arange(N)


def distance(x: Any, y: Any, samples: Any) -> Any:
    return jnp.mean((samples - y) ** 2) / 2


class Slope(Program):
    """`calls` oracle calls on two samples each; returns the client's own value."""

    calls: int = eqx.field(static=True, default=1)

    def __call__(self, me: Any, *values: Any) -> Any:
        for _ in range(self.calls):
            me.g_y(0.0, 0.0, me.batch("lower", me.key))
        return values[0]


def federation(**conditions: Any) -> Any:
    problem = fb.Problem(distance, distance, x0=0.0, y0=0.0)
    return fb.Simulator(**conditions).federation(problem, fb.Clients(lower=jnp.zeros((N, 2))))


def spent(fed: Any, step: Any, time: int = 0) -> tuple[Any, Ledger]:
    """What a step of one's own returns under the conditions of a federation, and its bill."""
    with metering() as meter, fed.in_step(KEY, time):
        out = step(fed.everyone)
    return out, Ledger.from_counts(meter.counts)


def asked(everyone: Any) -> Any:
    """One question to everyone: 4 bytes there, one call, 4 bytes back."""
    return everyone.gather(everyone.run(Slope(), everyone.deal(VALUES, "v"), key=KEY), "v")


# ---------------------------------------------------------------- who is there


def presence(availability: Any, steps: int) -> Any:
    """`(steps, N)`: who is there."""
    return np.asarray(jax.vmap(lambda step: availability.there(KEY, step, IDS))(jnp.arange(steps)))


def test_bernoulli_has_the_rates_it_is_given() -> None:
    rates = np.array([0.0, 0.2, 0.5, 0.8, 1.0, 0.5])
    np.testing.assert_allclose(presence(Bernoulli(rates), 4000).mean(0), rates, atol=0.03)


def test_a_client_draws_the_same_whoever_else_is_asked() -> None:
    for kind in (Bernoulli(0.5), OnOff(0.2, 0.3)):
        everyone = np.asarray(kind.there(KEY, jnp.asarray(7), IDS))
        few = np.array([4, 1])
        np.testing.assert_array_equal(kind.there(KEY, jnp.asarray(7), jnp.asarray(few)), everyone[few])


def test_a_markov_chain_has_its_transition_probabilities() -> None:
    leaves, returns = 0.1, 0.3
    seen = presence(OnOff(leaves, returns), 8000)
    before, after = seen[:-1], seen[1:]
    assert abs(seen.mean() - returns / (leaves + returns)) < 0.02
    assert abs((~after)[before].mean() - leaves) < 0.01
    assert abs(after[~before].mean() - returns) < 0.015
    independent = presence(Bernoulli(0.75), 8000)
    assert abs((~independent[1:])[independent[:-1]].mean() - leaves) > 0.1, "negative control"


def test_day_and_night() -> None:
    seen = presence(DayNight(period=4, day=0.5, zones=2), 8)
    np.testing.assert_array_equal(seen[:, 0], [1, 1, 0, 0] * 2)
    np.testing.assert_array_equal(seen[:, 1], [0, 0, 1, 1] * 2)
    np.testing.assert_array_equal(seen[:, 2], seen[:, 0])


def test_a_trace_begins_again() -> None:
    rows = np.random.default_rng(0).integers(0, 2, (3, N))
    np.testing.assert_array_equal(presence(Trace(rows), 6), np.tile(rows, (2, 1)))


def test_who_is_away_is_not_in_the_mean_nor_billed_for_work() -> None:
    there = np.array([1, 0, 1, 1, 0, 1], bool)
    (rows, answered), bill = spent(federation(availability=Trace([there])), asked)
    np.testing.assert_array_equal(answered, there)
    np.testing.assert_array_equal(rows, np.where(there, VALUES, 0))
    assert bill == Ledger(1, down={"v": 4 * N}, up={"v": 16}, calls={"g_y": 4}, samples=8)
    assert bill.seconds is None, "nothing says how long it takes"


def test_who_is_away_keeps_what_it_has_and_is_not_asked_for_it() -> None:
    there = np.array([1, 0, 1, 1, 0, 1], bool)
    fed = federation(availability=Trace([there]))

    def step(everyone: Any) -> Any:
        kept = fed.keep(-VALUES)
        _, answered = everyone.gather(everyone.take(kept), "kept")
        return answered, fed.stacked(everyone.put(kept, everyone.deal(VALUES, "v")))

    (answered, kept), _ = spent(fed, step)
    np.testing.assert_array_equal(answered, there)
    np.testing.assert_array_equal(kept, np.where(there, VALUES, -VALUES))


def test_where_nobody_would_be_there_all_are() -> None:
    (_, answered), _ = spent(federation(availability=Trace([[0] * N, [1] * N])), asked)
    assert np.all(answered)


def steps_of(start: fb.Result | None, steps: int, speed: float = 0.01, deadline: float = 0.08) -> fb.Result:
    """Steps of a method with local steps, whose clients come and go and are sometimes late."""
    known = fb.Saddle.random(jr.key(0), clients=4, d=2)
    speeds = Speed(call=LogNormal(speed, within=0.5))
    engine = fb.Simulator(availability=OnOff(0.3, 0.3), speed=speeds, link=LINK, deadline=deadline)
    method = fb.FedAvgS(0.05, 0.05, steps=2)
    return fb.solve(known.problem(), known.clients(), method, steps, every=3, engine=engine, start=start)


def test_a_run_stops_and_goes_on_under_the_same_conditions() -> None:
    whole, half = steps_of(None, 6), steps_of(None, 3)
    rest = steps_of(half, 3)
    np.testing.assert_array_equal(rest.x, whole.x)
    assert rest.ledger == whole.ledger
    seconds = whole.history.column("simulated_seconds")
    np.testing.assert_allclose(rest.history.column("simulated_seconds"), seconds, rtol=1e-6)
    assert seconds[0] == 0 < seconds[1] < seconds[2]
    assert 0 < whole.ledger.up["xy"] < 6 * 4 * 16, "some answers did not come"


def test_other_numbers_are_no_other_program(compilations: Any) -> None:
    first, so_far = steps_of(None, 3), compilations()
    second = steps_of(None, 3, speed=0.02, deadline=0.3)
    assert compilations() == so_far
    assert first.ledger.seconds != second.ledger.seconds


# ------------------------------------------------------------------ who is late


LINK = Link(latency=0.01, up=1e3, down=1e4)


def test_an_exchange_takes_as_long_as_the_last() -> None:
    calls = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    fed = federation(speed=Speed(call=calls, sample=0.5), link=Link(latency=0.1, up=8.0, down=16.0))
    (_, answered), bill = spent(fed, asked)
    assert np.all(answered)
    np.testing.assert_allclose(bill.seconds, 4 / 16 + (6 + 2 * 0.5) + 4 / 8 + 2 * 0.1, rtol=1e-6)


def test_a_second_answer_takes_no_second_computation() -> None:
    def twice(everyone: Any) -> None:
        out = everyone.run(Slope(), everyone.deal(VALUES, "v"), key=KEY)
        everyone.mean(out, "a")
        everyone.mean(out, "b")

    _, bill = spent(federation(speed=1.0, link=0.25), twice)
    np.testing.assert_allclose(bill.seconds, (1 + 0.5) + 0.5, rtol=1e-6)


def test_a_published_value_travels_once() -> None:
    fed = federation(link=Link(down=4.0))

    def twice(everyone: Any) -> None:
        published = fed.publish(jnp.float32(1.0), "p")
        for _ in range(2):
            value, published = everyone.read(published)
            everyone.mean(everyone.run(Slope(), value, key=KEY), "v")

    np.testing.assert_allclose(spent(fed, twice)[1].seconds, 4 / 4, rtol=1e-6)


def test_a_part_of_a_value_takes_the_time_of_that_part() -> None:
    sizes, down, up = (4, 8, 4, 4, 4, 16), np.array([1.0, 1, 8, 8, 8, 4]), 4.0

    def asked_for_parts(everyone: Any) -> None:
        there = everyone.send(jnp.zeros(4), "v", codec=Partial(sizes))
        everyone.mean(everyone.run(Slope(), there, key=KEY), "v", codec=Partial(sizes))

    bill = spent(federation(link=Link(down=down, up=up)), asked_for_parts)[1]
    np.testing.assert_allclose(bill.seconds, max(np.array(sizes) * (1 / down + 1 / up)), rtol=1e-6)


def test_who_is_late_does_not_answer_but_is_billed_for_its_work() -> None:
    late = np.array([0, 1, 0, 0, 1, 0], bool)
    (rows, answered), bill = spent(federation(speed=np.where(late, 2.0, 0.5), deadline=1.5), asked)
    np.testing.assert_array_equal(answered, ~late)
    np.testing.assert_array_equal(rows, np.where(late, 0, VALUES))
    assert bill == Ledger(1, down={"v": 4 * N}, up={"v": 16}, calls={"g_y": N}, samples=2 * N)
    np.testing.assert_allclose(bill.seconds, 1.5, rtol=1e-6)


def test_who_was_late_is_back_in_the_next_exchange() -> None:
    fed = federation(speed=[0.1] * 5 + [1.0], deadline=0.5)

    def twice(everyone: Any) -> Any:
        out = everyone.run(Slope(), everyone.deal(VALUES, "v"), key=KEY)
        return everyone.gather(out, "v")[1], everyone.gather(out, "v")[1]

    (first, second), bill = spent(fed, twice)
    np.testing.assert_array_equal(first, [1, 1, 1, 1, 1, 0])
    assert np.all(second)
    np.testing.assert_allclose(bill.seconds, 0.5, rtol=1e-6)


def test_a_deadline_is_waited_for_only_if_someone_is_missing() -> None:
    seconds = spent(federation(speed=0.1, deadline=2.0), asked)[1].seconds
    np.testing.assert_allclose(seconds, 0.1, rtol=1e-6)
    away = Trace([[1, 1, 1, 1, 1, 0]])
    seconds = spent(federation(speed=0.1, deadline=2.0, availability=away), asked)[1].seconds
    np.testing.assert_allclose(seconds, 2.0, rtol=1e-6)


def test_where_all_are_late_the_server_waits_on() -> None:
    (_, answered), bill = spent(federation(speed=3.0, deadline=1.0), asked)
    assert np.all(answered)
    np.testing.assert_allclose(bill.seconds, 3.0, rtol=1e-6)


def test_time_passes_in_every_turn_of_a_loop() -> None:
    fed = federation(speed=[1.0, 2.0, 0, 0, 0, 0], link=0.25)

    def looped(everyone: Any) -> Any:
        def body(index: Any, carry: Any) -> Any:
            out = everyone.run(Slope(), everyone.send(carry, "x"), key=KEY)
            return everyone.mean(out, "x")

        everyone.run(Slope(3), everyone.deal(VALUES, "v"), key=KEY)  # unread: it delays the first turn
        return fed.loop(4, body, jnp.float32(1.0))

    _, bill = spent(fed, looped)
    np.testing.assert_allclose(bill.seconds, 3 * 2 + 4 * (2 + 0.5), rtol=1e-6)


def test_work_that_nobody_reads_is_waited_for_at_the_end() -> None:
    def unread(everyone: Any) -> None:
        everyone.run(Slope(2), everyone.deal(VALUES, "v"), key=KEY)

    np.testing.assert_allclose(spent(federation(speed=1.5), unread)[1].seconds, 3.0, rtol=1e-6)
    impatient = federation(speed=1.5, deadline=2.0)
    np.testing.assert_allclose(spent(impatient, unread)[1].seconds, 2.0, rtol=1e-6)


def test_error_feedback_remembers_what_was_late() -> None:
    fed = federation(speed=[0.1] * 5 + [1.0], deadline=0.5)

    def step(everyone: Any) -> Any:
        out = everyone.run(Slope(), everyone.deal(VALUES, "v"), key=KEY)
        _, memory = everyone.mean_with_feedback(out, fed.keep(np.full(N, 7.0, np.float32)), "v", Dense())
        return fed.stacked(memory)

    memory, _ = spent(fed, step)
    np.testing.assert_allclose(memory, [0, 0, 0, 0, 0, 7])


# ------------------------------------------------------------------- over links


def test_a_push_takes_as_long_as_its_last_message() -> None:
    """In a ring one way each sends one message; it has the latencies of both ends."""
    latency = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    fed = federation(speed=1.0, link=Link(latency, up=8.0, down=16.0), deadline=1e-3)

    def pushed(everyone: Any) -> None:
        out = everyone.run(Slope(), everyone.take(fed.keep(VALUES)), key=KEY)
        everyone.push(out, fb.links.Ring(directed=True), "v")

    _, bill = spent(fed, pushed)
    np.testing.assert_allclose(bill.seconds, 1 + 4 / 8 + 4 / 16 + 0.5 + 0.6, rtol=1e-6)
    assert bill.edge == {"v": 4 * N}, "the deadline is the server's"


def test_a_push_among_a_few_takes_their_time_alone() -> None:
    latency = np.arange(1.0, N + 1)
    fed = federation(link=Link(latency), availability=0.99)
    cohort = fed.sample(KEY, 2)

    def pushed(everyone: Any) -> None:
        cohort.push(cohort.take(fed.keep(VALUES)), fb.links.Complete(), "v")

    np.testing.assert_allclose(spent(fed, pushed)[1].seconds, latency[cohort.ids].sum(), rtol=1e-6)


@pytest.mark.parametrize(
    "links",
    [fb.links.Ring(), fb.links.Ring(directed=True), fb.links.Complete(), fb.links.Stochastic(0.3, 0.6)],
    ids=lambda links: type(links).__name__,
)
def test_a_push_among_those_who_are_there_loses_nothing(links: Any) -> None:
    there = np.array([1, 0, 1, 1, 0, 1], bool)
    fed = federation(availability=Trace([there]))

    def pushed(everyone: Any) -> Any:
        mixed = everyone.push(everyone.take(fed.keep(VALUES)), links, "v", key=KEY)
        seen = everyone.witnessed(links, key=KEY)
        return mixed.value, seen.value

    (mixed, seen), bill = spent(fed, pushed)
    np.testing.assert_allclose(mixed.sum(), VALUES.sum(), rtol=1e-6)
    np.testing.assert_allclose(mixed[~there], VALUES[~there], rtol=1e-6)
    np.testing.assert_allclose(mixed, seen["sent"].T @ VALUES, rtol=1e-6)
    assert sum(bill.edge.values()) <= 4 * 12, "at most twelve pairs are there"


def test_symmetric_weights_stay_doubly_stochastic() -> None:
    there = jnp.asarray([1, 0, 1, 1, 0, 1], bool)
    weights = fb.links.ErdosRenyi(0.6).weights(KEY, N, 0, there)
    np.testing.assert_allclose(weights, weights.T, atol=1e-7)
    np.testing.assert_allclose(weights.sum(0), 1, rtol=1e-6)


def test_push_sum_reaches_the_mean_though_clients_come_and_go() -> None:
    fed, links = federation(availability=0.7), fb.links.Ring(directed=True)

    def turn(step: Any, pair: Any) -> Any:
        with fed.in_step(KEY, step):
            return fed.everyone.push(fed.everyone.take(fed.keep(pair)), links, "v").value

    start = jnp.asarray(VALUES), jnp.ones(N)
    values, weights = jax.lax.fori_loop(0, 400, turn, start)
    np.testing.assert_allclose(values / weights, VALUES.mean(), rtol=1e-3)
    assert np.std(weights) > 0.05, "somebody was away: weights are not doubly stochastic"


def test_a_method_without_server_runs_though_clients_come_and_go() -> None:
    known = fb.Quadratic.random(jr.key(0), clients=5, dx=2, dy=2)
    problem, clients = known.problem(), known.clients()
    engine = fb.Simulator(availability=0.6, link=0.1)
    result = fb.solve(problem, clients, fb.SGP(fb.links.Ring(directed=True), 0.01), 4, every=4, engine=engine)
    weights = np.asarray(result.state.lower.w.value)
    np.testing.assert_allclose(weights.sum(), 5, rtol=1e-5)
    assert weights.std() > 0.05, "somebody was away"
    rounds = sum(result.ledger.edge.values()) and result.ledger.seconds / 0.2
    assert 1 <= round(rounds, 4) <= 4, "an exchange takes two latencies, or nothing where no two are there"


# ------------------------------------------------------------------------ laws


def test_a_law_has_its_median_and_spreads() -> None:
    ids = jnp.arange(4000)
    law = LogNormal(2.0, between=0.5, within=0.25)
    one, other = np.log(law.draw(jr.key(1), ids)), np.log(law.draw(jr.key(2), ids))
    assert abs(np.median(one) - np.log(2)) < 0.03
    assert abs(one.std() - np.hypot(0.5, 0.25)) < 0.02
    assert abs((one - other).std() - np.sqrt(2) * 0.25) < 0.02
    np.testing.assert_array_equal(LogNormal(2.0).draw(KEY, ids), np.full(4000, 2.0))


def test_without_conditions_the_program_has_no_trace_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as with the hooks of a cohort that knows of no conditions."""
    with_hooks = program()
    for name in ("_there", "_arriving", "_awaited", "_heard", "_delivered"):
        monkeypatch.setattr(ConditionedCohort, name, getattr(Cohort, name))
    monkeypatch.setattr(ConditionedCohort, "_computed", lambda *_: None)
    assert program() == with_hooks
    assert program(speed=0.1) != with_hooks, "negative control"


def program(**conditions: Any) -> str:
    """A step with published values, sampled cohorts, loops and error feedback, as text."""
    known = fb.Quadratic.random(jr.key(0), clients=4, dx=2, dy=2)
    problem, clients = known.problem(), known.clients()
    fed = fb.Simulator(**conditions).federation(problem, clients)
    method = fb.CommFedBiO(0.1, 0.1, 0.1, topk=1, terms=1)
    state = jax.eval_shape(lambda key: method.init(fed, key), KEY)

    def steps(state: Any) -> Any:
        block = fb.simulate(fed, method, state, KEY, 0, 1, 1)
        return block.state, [block.counts[entry] for entry in sorted(block.counts) if entry.kind != "seconds"]

    return str(jax.make_jaxpr(steps)(state))


# ------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"availability": 1.5}, r"probability is 1\.5; it must be from 0 to 1"),
        ({"availability": "often"}, "availability is 'often'; it must be a number"),
        ({"speed": -1.0}, r"speed is -1\.0; it must be at least 0"),
        ({"speed": {}}, "speed is {}; it must be a number"),
        ({"link": [0.1, float("nan")]}, r"link is \[0\.1, nan\]; it must be at least 0"),
        ({"speed": 0.1, "deadline": 0.0}, r"deadline is 0\.0; it must be a number of seconds above 0"),
        ({"deadline": 1.0}, r"deadline is 1\.0 s, but nobody can be late"),
    ],
)
def test_wrong_conditions_are_refused(settings: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        fb.Simulator(**settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OnOff(0.5, 0.7), "their sum must be at most 1"),
        (lambda: OnOff(0.5, 0.0), "would never be there again"),
        (lambda: DayNight(0), "period is 0"),
        (lambda: Trace([[0, 2]]), "a trace needs rows of 0 and 1"),
        (lambda: Trace([[0, 1], [1]]), "a trace needs rows of 0 and 1"),
        (lambda: Link(up=0.0), r"up is 0\.0; it must be at least 0\.001"),
        (lambda: Speed(call=LogNormal(1.0, within=-1)), "within is -1"),
    ],
)
def test_wrong_laws_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "settings",
    [
        {"availability": [0.5, 0.5]},
        {"availability": OnOff([0.1, 0.1], 0.5)},
        {"availability": Trace([[1, 0]])},
        {"speed": [0.1, 0.1]},
        {"link": Link(up=[1e6, 1e6])},
    ],
)
def test_numbers_of_another_count_than_clients_are_refused(settings: Any) -> None:
    with pytest.raises(ValueError, match=f"2 .*but there are {N}"):
        federation(**settings)
