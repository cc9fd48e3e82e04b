"""AggITD: every step against its box in numpy, its mean over Q against the series, its cost, its limits."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from algorithm.quadratics import DX, DY, Running, clients_of, drawn, problem
from fedbilevel.algorithm.aggitd import AggITD
from fedbilevel.algorithm.base import Variables
from fedbilevel.fed.ledger import Ledger, as_arrays, metering

pytestmark = pytest.mark.usefixtures("all_float64")

SCALAR = 8  # bytes
KEYS = 40


@eqx.filter_jit
def stepped(federation, algorithm, x, y, keys):
    def one(key):
        with metering() as meter:
            state, _ = algorithm.step(federation, Variables(x, y), key)
        return state, as_arrays(meter.counts)

    return jax.vmap(one)(keys)


def draws(federation, algorithm, x, y):
    """x, y and the ledger after one step from `(x, y)`, for many keys."""
    keys = jax.random.split(jax.random.key(3), KEYS)
    (x, y), counts = jax.tree.map(np.asarray, stepped(federation, algorithm, x, y, keys))
    ledgers = [Ledger.from_counts({e: times[k] for e, times in counts.items()}) for k in range(KEYS)]
    return list(zip(x, y, ledgers, strict=True))


def close(a, b, tolerance):
    return np.max(np.abs(np.asarray(a) - np.asarray(b))) <= tolerance


def of(function, *vectors):
    """A closed form of the library, in numpy."""
    return np.asarray(function(*map(jnp.asarray, vectors)))


# ------------------------------------------------------------------ the box, where no derivative is constant

COUNT, ROUNDS, RATES = 3, 4, (0.1, 0.15, 0.2)
LOWER_STEPS, UPPER_STEPS = (1, 3, 2), (2, 1, 3)
START = np.array([0.7]), np.array([-0.4])
NUMBERS = np.random.default_rng(5).uniform(0.5, 1.5, (5, COUNT))


def lower_quartic(x, y, samples):
    a, b, k = samples["a"], samples["b"], samples["k"]
    return jnp.mean(a * (y**2 / 2 + y**4 / 12) - b * x * y + k * x * y**2 / 2)


def upper_cubic(x, y, samples):
    c, e = samples["c"], samples["e"]
    return jnp.mean((y - c) ** 2 / 2 + (x - e) ** 2 / 2 + c * x**2 * y + y**3 / 3)


class Derivatives:
    """Of the two functions above, one number a client."""

    def __init__(self):
        self.a, self.b, self.k, self.c, self.e = NUMBERS

    def g_y(self, x, y):
        return self.a * (y + y**3 / 3) - self.b * x + self.k * x * y

    def g_yy(self, x, y):
        return self.a * (1 + y**2) + self.k * x

    def g_xy(self, x, y):
        return -self.b + self.k * y

    def f_x(self, x, y):
        return x - self.e + 2 * self.c * x * y

    def f_y(self, x, y):
        return y - self.c + self.c * x**2 + y**2


def quartic_federation():
    a, b, k, c, e = (jnp.asarray(rows)[:, None] for rows in NUMBERS)
    clients = fb.Clients({"a": a, "b": b, "k": k}, {"c": c, "e": e})
    return fb.Simulator().federation(fb.Problem(upper_cubic, lower_quartic, *START), clients)


def local_steps(slope, start, rate, counts, anchor):
    """The mean of the clients' last points; their steps are corrected if there is an anchor."""
    own = np.full(COUNT, start)
    for client in range(COUNT):
        for _ in range(counts[client]):
            own_slope = slope(own)[client] + (0 if anchor is None else anchor - slope(start)[client])
            own[client] -= rate * own_slope
    return own.mean()


def box(factors, inner, first=None, at_the_end=False):
    """A step of AggITD; wrong ones start r in another round than N−Q−1, or take its factors at y_N."""
    d, (alpha, beta, rate), (x, y) = Derivatives(), RATES, (z.item() for z in START)
    first, r = ROUNDS - factors - 1 if first is None else first, 0.0
    for t in range(ROUNDS):
        if t == first:
            r = d.f_y(x, y).mean()
        elif t > first and not at_the_end:
            r = r - rate * np.mean(d.g_yy(x, y) * r)
        anchor = d.g_y(x, y).mean() if inner == "svrg" else None
        y = local_steps(lambda z: d.g_y(x, z), y, beta, LOWER_STEPS, anchor)
    if at_the_end:
        r = d.f_y(x, y).mean() * (1 - rate * d.g_yy(x, y).mean()) ** factors
    h = np.mean(d.f_x(x, y) - rate * ROUNDS * d.g_xy(x, y) * r)
    return local_steps(lambda z: d.f_x(z, y), x, alpha, UPPER_STEPS, h), y


@functools.cache
def quartic_draws(inner):
    steps = {"lower_steps": LOWER_STEPS, "upper_steps": UPPER_STEPS, "lower_rounds": ROUNDS}
    return draws(quartic_federation(), AggITD(*RATES, **steps, inner=inner), *START)


def factors_of(ledger, clients=COUNT):
    factors, rest = divmod(ledger.calls.get("g_yy", 0), clients)
    assert rest == 0
    return factors


@pytest.mark.parametrize("inner", ["svrg", "sgd"])
def test_every_step_is_the_box(inner):
    seen = set()
    for x, y, ledger in quartic_draws(inner):
        factors = factors_of(ledger)
        assert close((x.item(), y.item()), box(factors, inner), 1e-13)
        seen.add(factors)
    assert seen == set(range(ROUNDS))


def test_wrong_boxes_are_told_apart():
    """r from the first round on, r at the last y as FedNest has it, and the other kind of local steps."""
    for x, y, ledger in quartic_draws("svrg"):
        factors = factors_of(ledger)
        wrong = [box(factors, "svrg", at_the_end=True), box(factors, "sgd")]
        wrong += [box(factors, "svrg", first=0)] if factors < ROUNDS - 1 else []
        assert all(not close((x.item(), y.item()), other, 1e-4) for other in wrong)


# ------------------------------------------------------------------ the mean over Q


def series(hessian, rate, terms):
    """`λ Σ_{n<N} (I − λH)ⁿ`."""
    left = np.eye(DY) - rate * hessian
    return rate * sum(np.linalg.matrix_power(left, n) for n in range(terms))


def own_hypergradient(q, x, y, rate, terms):
    """The mean of the clients' own truncated hypergradients: LFedNest's."""
    f_y = np.einsum("nij,nj->ni", q.D, y - q.c) + np.einsum("nij,i->nj", q.E, x)
    u = np.stack([series(A, rate, terms) @ b for A, b in zip(q.A, f_y, strict=True)])
    return np.mean(q.rho[:, None] * (x - q.e) + q.E @ y + np.einsum("nij,ni->nj", q.B, u), axis=0)


def test_the_mean_over_the_lengths_is_the_truncated_series():
    """At `y*(x)`, where rounds leave y. Every Q once, none by chance: one step of length 1 shows h."""
    q, terms, rate, x = drawn(), 4, 0.2, np.array([1.0, -2.0, 0.5])
    y = of(q.lower_solution, x)
    federation = fb.Simulator().federation(problem(), clients_of(q))
    algorithm = AggITD(1.0, 0.2, rate, lower_rounds=terms, lower_steps=2)
    by_length = {}
    for new_x, new_y, ledger in draws(federation, algorithm, x, y):
        assert close(new_y, y, 1e-13)
        by_length.setdefault(factors_of(ledger, 4), x - new_x)
    assert sorted(by_length) == list(range(terms))
    mean, b = np.mean(list(by_length.values()), axis=0), of(q.upper_slope, x, y)

    def truncated(count):
        return of(q.hypergradient_at, x, y, series(q.A.mean(0), rate, count) @ b)

    assert close(mean, truncated(terms), 1e-13)
    wrong = (truncated(terms - 1), truncated(terms + 1), own_hypergradient(q, x, y, rate, terms))
    assert not any(close(mean, other, 1e-2) for other in wrong)
    assert not any(close(h, mean, 1e-2) for h in by_length.values())


# ------------------------------------------------------------------ limits


def run(q, algorithm, steps):
    return np.asarray(Running(clients_of(q), algorithm).advance(steps).state.x)


def test_where_one_term_is_exact_the_solution_is_reached():
    """Hessians that differ, with the mean 2I: `λ = 1/2`, N = 1. The clients' own series do not get there."""
    q = drawn()
    q = eqx.tree_at(lambda q: q.A, q, q.A - q.A.mean(0) + 2 * np.eye(DY))
    best = q.solution()
    assert close(run(q, AggITD(0.2, 0.3, 0.5, lower_rounds=1), 600), best, 1e-10)
    one = {"series": "sum", "terms": 1, "smoothness": 2.0}
    assert not close(run(q, fb.LFedNestSVRG(0.2, 0.3, **one), 600), best, 1e-2)


def test_a_long_series_comes_near_the_solution():
    """With steps that shrink; the limit of the clients' own series, all terms of it, lies elsewhere."""
    q = drawn(curvature=(1.0, 2.0))
    algorithm = AggITD(lambda t: 0.3 / (1 + 0.02 * t), 0.3, 0.5, lower_rounds=8, lower_steps=2)
    best, offset = np.asarray(q.solution()), own_slope_at(q, np.zeros(DX))
    slope = np.stack([own_slope_at(q, e) - offset for e in np.eye(DX)], axis=1)
    elsewhere = np.linalg.norm(np.linalg.solve(slope, -offset) - best)
    assert np.linalg.norm(run(q, algorithm, 2000) - best) < elsewhere / 3


def own_slope_at(q, x):
    return own_hypergradient(q, x, of(q.lower_solution, x), 0.5, 200)


# ------------------------------------------------------------------ cost


def cost(clients, factors, exchanges, lower_calls, upper_calls, dx, dy):
    """What the docstring says, of a step; `exchanges` are those of the rounds on y."""
    down, up = 2 * dx + (exchanges + factors + 2) * dy, 2 * dx + (exchanges + factors + 1) * dy
    calls = {"g_y": lower_calls, "f_x": upper_calls}
    calls |= {"g_yy": factors * clients, "f_y": clients, "g_xy": clients}
    traffic = exchanges + 2, SCALAR * down * clients, SCALAR * up * clients
    return *traffic, {kind: times for kind, times in calls.items() if times}


def totals(ledger):
    assert not ledger.edge
    calls = {kind: times for kind, times in ledger.calls.items() if times}
    return ledger.rounds, sum(ledger.down.values()), sum(ledger.up.values()), calls


@pytest.mark.parametrize("inner", ["svrg", "sgd"])
def test_a_step_costs_what_the_docstring_says(inner):
    exchanges = 2 * ROUNDS if inner == "svrg" else ROUNDS
    lower = [1 + 2 * steps if inner == "svrg" else steps for steps in LOWER_STEPS]
    upper = [1 + 2 * steps for steps in UPPER_STEPS]
    for _, _, ledger in quartic_draws(inner):
        calls = ROUNDS * sum(lower), sum(upper)
        assert totals(ledger) == cost(COUNT, factors_of(ledger), exchanges, *calls, 1, 1)


def test_a_cohort_is_one_for_the_whole_step():
    """Nobody but its clients downloads anything."""
    size, terms = 2, 3
    federation = fb.Simulator().federation(problem(), clients_of(drawn()))
    algorithm = AggITD(*RATES, lower_rounds=terms, cohort=size, inner="sgd")
    for _, _, ledger in draws(federation, algorithm, np.ones(DX), np.zeros(DY)):
        factors = factors_of(ledger, size)
        assert totals(ledger) == cost(size, factors, terms, terms * size, 3 * size, DX, DY)


# ------------------------------------------------------------------ settings that make no sense


@pytest.mark.parametrize(
    "wrong",
    [{"lower_rounds": 0}, {"inner": "adam"}, {"lower_steps": 0}, {"upper_steps": (1, 2.5)}],
    ids=str,
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AggITD(0.1, 0.1, 0.1, **wrong)


def test_wrong_step_sizes_cohorts_and_problems_are_refused():
    with pytest.raises(ValueError, match="step size is -1"):
        AggITD(0.1, 0.1, -1.0)
    federation, key = quartic_federation(), jax.random.key(0)
    with pytest.raises(ValueError, match="cohort of 9"):
        AggITD(*RATES, cohort=9).step(federation, Variables(*START), key)
    with pytest.raises(ValueError, match="lower_steps has 2 numbers"):
        AggITD(*RATES, lower_steps=(1, 2)).init(federation, key)
    flat = fb.single_level(lambda x, samples: jnp.mean(samples * x), np.ones(1))
    with pytest.raises(ValueError, match="learns y"):
        AggITD(*RATES).init(fb.Simulator().federation(flat, fb.Clients(np.ones((2, 1, 1)))), key)
