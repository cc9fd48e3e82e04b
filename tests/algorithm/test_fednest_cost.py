"""What a step costs: the ledger against the closed-form table of every method."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithm.base import Variables
from fedbilevel.engine.simulator import SimulatedFederation
from fedbilevel.fed.ledger import Ledger, as_arrays, metering
from fedbilevel.problem.quadratic import lower_objective, upper_objective
from fedbilevel.problem.structured import inner_map, outer_distance, saddle_objective

pytestmark = pytest.mark.usefixtures("float64")

CLIENTS, DX, DY, SAMPLES = 4, 3, 4, 2
CAPACITY = 400
STEPS = 2
SCALAR = 8  # bytes

CG = {"series": "cg", "terms": 6}
DRIFTING = CG | {"lower_steps": 5, "lower_rounds": 2}


@dataclasses.dataclass
class Cost:
    """Of one step and client: scalars each way, oracle calls, and how many batches they read."""

    exchanges: int
    down: int
    up: int
    calls: dict[str, int]
    batches: int


# ------------------------------------------------------------------ the tables, T rounds on y


def fednest(products, T=1, inner_steps=1, outer_steps=1):
    """2T + N' + 3 exchanges; an anchor and two gradients a step on either level."""
    calls = {
        "g_y": T * (1 + 2 * inner_steps),
        "f_y": 1,
        "g_yy": products,
        "g_xy": 1,
        "f_x": 1 + 2 * outer_steps,
    }
    down, up = 2 * DX + (2 * T + products + 2) * DY, 2 * DX + (2 * T + products + 1) * DY
    return Cost(2 * T + products + 3, down, up, calls, sum(calls.values()))


def fednest_sgd(products, T, inner_steps):
    """FedNest without its T anchors on y: T exchanges, T vectors each way and gradients fewer."""
    full = fednest(products, T)
    calls = full.calls | {"g_y": T * inner_steps}
    return Cost(full.exchanges - T, full.down - T * DY, full.up - T * DY, calls, sum(calls.values()))


def own_series(products):
    """The calls of one local hypergradient; f_x and f_y read one batch together."""
    return {"f_x": 1, "f_y": 1, "g_yy": products, "g_xy": 1}, products + 2


def lfednest(products, T, inner_steps):
    calls, batches = own_series(products)
    return Cost(
        T + 1, DX + (T + 1) * DY, DX + T * DY, calls | {"g_y": T * inner_steps}, batches + T * inner_steps
    )


def lfednest_svrg(products, T, inner_steps):
    calls, batches = own_series(products)
    gradients = T * (1 + 2 * inner_steps)
    return Cost(
        2 * T + 1, DX + (2 * T + 1) * DY, DX + 2 * T * DY, calls | {"g_y": gradients}, batches + gradients
    )


def nonalt(products, inner_steps):
    calls, batches = own_series(products)
    return Cost(1, DX + DY, DX + DY, calls | {"g_y": inner_steps}, batches + inner_steps)


def minimax(T, inner_steps, outer_steps):
    calls = {"g_y": T * (1 + 2 * inner_steps), "f_x": 1 + 2 * outer_steps}
    return Cost(2 * T + 2, 2 * DX + (2 * T + 1) * DY, 2 * DX + 2 * T * DY, calls, sum(calls.values()))


# ------------------------------------------------------------------ problems


def pair(rows):
    """Two samples a client."""
    return jnp.asarray(np.stack([rows, rows], axis=1))


def bilevel(clients=CLIENTS):
    rows = np.arange(1.0, clients + 1)[:, None]
    lower = {
        "A": pair(rows[..., None] * np.eye(DY)),
        "B": pair(rows[..., None] * np.ones((DY, DX))),
        "b": pair(rows * np.ones(DY)),
    }
    upper = {
        "D": pair(rows[..., None] * np.eye(DY)),
        "E": pair(rows[..., None] * np.ones((DX, DY))),
        "c": pair(rows * np.ones(DY)),
        "e": pair(rows * np.ones(DX)),
        "rho": pair(rows[:, 0]),
    }
    problem = fb.Problem(upper_objective, lower_objective, np.ones(DX), np.zeros(DY))
    return problem, fb.Clients(lower, upper)


def saddle():
    data = {
        "A": pair(np.ones((CLIENTS, DY, DX))),
        "b": pair(np.ones((CLIENTS, DY))),
        "penalty": pair(np.ones(CLIENTS)),
    }
    return fb.minimax(saddle_objective, np.ones(DX), np.zeros(DY)), fb.Clients(data)


def composition():
    lower = {"R": pair(np.ones((CLIENTS, DY, DX))), "s": pair(np.ones((CLIENTS, DY)))}
    problem = fb.compositional(outer_distance, inner_map, np.ones(DX), np.zeros(DY))
    return problem, fb.Clients(lower, {"t": pair(np.ones((CLIENTS, DY)))})


def distance(x, samples):
    return jnp.mean(jnp.sum((x - samples) ** 2, axis=-1))


def flat():
    return fb.single_level(distance, np.ones(DX)), fb.Clients(pair(np.ones((CLIENTS, DX))))


def spent(setting, algorithm, steps=STEPS, seed=0):
    """The ledger of every single step."""
    problem, clients = setting
    with fb.Simulator().connect(problem, clients, algorithm) as session:
        state = Variables(problem.x0, problem.y0)
        counts = session.advance(state, jax.random.key(seed), 0, steps, CAPACITY).counts
    return [Ledger.from_counts({entry: times[t] for entry, times in counts.items()}) for t in range(steps)]


def in_all(cost, clients=CLIENTS):
    """What a ledger shows for a step of so many clients: totals of everything."""
    return {
        "rounds": cost.exchanges,
        "down": cost.down * SCALAR * clients,
        "up": cost.up * SCALAR * clients,
        "edge": 0,
        "calls": {kind: times * clients for kind, times in cost.calls.items() if times},
        "samples": cost.batches * SAMPLES * clients,
    }


def totals(ledger):
    return {
        "rounds": ledger.rounds,
        "down": sum(ledger.down.values()),
        "up": sum(ledger.up.values()),
        "edge": sum(ledger.edge.values()),
        "calls": {kind: times for kind, times in ledger.calls.items() if times},
        "samples": ledger.samples,
    }


SMALL = 1e-3
SUM = {"series": "sum", "terms": 60, "smoothness": 50.0}
CASES = {
    "FedNest, cg": (bilevel, fb.FedNest(SMALL, SMALL, **CG), fednest(6)),
    "FedNest, sum": (
        bilevel,
        fb.FedNest(SMALL, SMALL, **SUM, upper_steps=4, lower_steps=5, lower_rounds=3),
        fednest(59, 3, 5, 4),
    ),
    "FedNestSGD": (bilevel, fb.FedNestSGD(SMALL, SMALL, **DRIFTING), fednest_sgd(6, 2, 5)),
    "LFedNest": (bilevel, fb.LFedNest(SMALL, SMALL, **DRIFTING), lfednest(6, 2, 5)),
    "LFedNestSVRG": (bilevel, fb.LFedNestSVRG(SMALL, SMALL, **DRIFTING), lfednest_svrg(6, 2, 5)),
    "LFedNestNonAlt": (
        bilevel,
        fb.LFedNestNonAlt(SMALL, SMALL, **CG, lower_steps=100),
        nonalt(6, 100),
    ),
    "minimax": (
        saddle,
        fb.FedNest(SMALL, SMALL, lower_steps=3, upper_steps=2, lower_rounds=2),
        minimax(2, 3, 2),
    ),
    "minimax, FedAvgS": (
        saddle,
        fb.FedAvgS(SMALL, SMALL, steps=5),
        Cost(1, DX + DY, DX + DY, {"f_x": 5, "f_y": 5}, 5),
    ),
    "compositional": (
        composition,
        fb.FedNest(SMALL, SMALL, lower_steps=3, upper_steps=2, lower_rounds=2),
        fednest(0, 2, 3, 2),
    ),
    "single level": (
        flat,
        fb.FedNest(SMALL, SMALL, upper_steps=3),
        Cost(2, 2 * DX, 2 * DX, {"f_x": 7}, 7),
    ),
    "single level, FedAvg": (flat, fb.FedAvg(SMALL, steps=3), Cost(1, DX, DX, {"f_x": 3}, 3)),
    "FedAvg on y": (
        bilevel,
        fb.FedAvg(SMALL, level="lower", steps=3),
        Cost(1, DX + DY, DY, {"g_y": 3}, 3),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_step_costs_what_the_table_says(case):
    setting, algorithm, cost = CASES[case]
    assert [totals(ledger) for ledger in spent(setting(), algorithm)] == [in_all(cost)] * STEPS


def test_unequal_step_counts_are_billed_one_by_one():
    inner, outer = (1, 2, 5, 8), (1, 3, 2, 6)
    algorithm = fb.FedNest(SMALL, SMALL, **SUM, upper_steps=outer, lower_steps=inner, lower_rounds=2)
    calls = spent(bilevel(), algorithm, steps=1)[0].calls
    assert calls["g_y"] == sum(2 * (1 + 2 * steps) for steps in inner)
    assert calls["f_x"] == sum(1 + 2 * steps for steps in outer)


def test_sampled_series_is_billed_by_the_number_of_products_drawn():
    terms, T = 5, 2
    algorithm = fb.FedNest(SMALL, SMALL, terms=terms, smoothness=9.0, lower_rounds=T)
    drawn = []
    for ledger in spent(bilevel(), algorithm, steps=40):
        drawn.append(ledger.calls.get("g_yy", 0) // CLIENTS)
        assert ledger.rounds == 2 * T + drawn[-1] + 3
        assert totals(ledger) == in_all(fednest(drawn[-1], T))
    assert sorted(set(drawn)) == list(range(terms))


# ------------------------------------------------------------------ the residual


def test_residual_costs_one_exchange_more_and_is_right():
    """`‖H u − b‖/‖b‖ = ‖(I − H/ℓ)^N b‖/‖b‖` for the truncated sum."""
    terms, bound = 4, 9.0
    algorithm = fb.FedNest(0.0, 0.0, series="sum", terms=terms, smoothness=bound, residual=True)
    problem, clients = bilevel()
    x, y = np.array([1.0, -2.0, 0.5]), np.array([0.3, 1.0, -1.0, 2.0])
    with fb.Simulator().connect(problem, clients, algorithm) as session:
        block = session.advance(Variables(x, y), jax.random.key(0), 0, 1, CAPACITY)

    plain, one_more = fednest(terms - 1), DY * SCALAR * CLIENTS
    seen, expected = totals(Ledger.from_counts(block.counts)), in_all(plain)
    assert seen["rounds"] == expected["rounds"] + 1
    assert seen["down"] == expected["down"] + one_more
    assert seen["up"] == expected["up"] + one_more
    assert seen["calls"] == expected["calls"] | {"g_yy": terms * CLIENTS}
    assert seen["samples"] == expected["samples"] + CLIENTS * SAMPLES

    H = np.mean(np.arange(1.0, CLIENTS + 1))  # times the identity
    assert float(block.info["adjoint_residual"][0]) == pytest.approx(abs(1 - H / bound) ** terms, rel=1e-12)


# ------------------------------------------------------------------ a cohort of a few


class Watched(SimulatedFederation):
    """A simulated federation that notes who is drawn; its loops are unrolled so that nothing is hidden."""

    drawn: list = eqx.field(static=True, default_factory=list)

    def sample(self, key, size):
        cohort = super().sample(key, size)
        self.drawn.append(cohort.ids)
        return cohort

    def loop(self, times, body, carry):
        for index in range(times):
            carry = body(index, carry)
        return carry


def test_newcomers_downloads_are_billed():
    """Everybody who is asked about `(x, y)` downloads it once: a recount from the cohorts themselves."""
    size, terms, everyone = 2, 2, 5
    problem, clients = bilevel(everyone)
    algorithm = fb.FedNest(SMALL, SMALL, series="sum", terms=terms, smoothness=9.0, cohort=size)

    @jax.jit
    def step(key):
        federation = Watched(problem, clients)
        with metering() as meter:
            algorithm.step(federation, Variables(problem.x0, problem.y0), key)
        return jnp.stack(federation.drawn), as_arrays(meter.counts)

    products, unions = terms - 1, []
    for seed in range(20):
        cohorts, counts = jax.tree.map(np.asarray, step(jax.random.key(seed)))
        ledger = Ledger.from_counts(counts)
        assert cohorts.shape == (2 + products, size)  # of the round, of ∇_y f, one a product
        assert all(len(set(cohort)) == size for cohort in cohorts)
        unions.append(len(set(cohorts.ravel())))
        assert ledger.down["x"] == SCALAR * DX * unions[-1]
        assert ledger.down["y"] == SCALAR * DY * (size + unions[-1])  # for FedInn, and as a point
        assert ledger.down["u"] == SCALAR * DY * size * (products + 1)
        table, newcomers = in_all(fednest(products), size), unions[-1] - size
        assert totals(ledger) == table | {"down": table["down"] + SCALAR * (DX + DY) * newcomers}
    assert set(unions) >= {3, 4, 5}, "the draws must show newcomers"


def test_conjugate_gradients_ask_one_cohort_in_all_exchanges():
    problem, clients = bilevel(5)
    algorithm = fb.FedNest(SMALL, SMALL, **CG, cohort=2)
    federation = Watched(problem, clients)
    state = Variables(problem.x0, problem.y0)
    jax.eval_shape(lambda key: algorithm.step(federation, state, key), jax.random.key(0))
    assert len(federation.drawn) == 1


def test_a_cohort_larger_than_the_federation_is_refused():
    with pytest.raises(ValueError, match="cohort of 9"):
        spent(flat(), fb.FedAvg(SMALL, cohort=9))
