"""FedMBO: single draws against all that the definition allows, their law, its cost, silent clients."""

import itertools

import equinox as eqx
import jax
import numpy as np
import pytest

import fedbilevel as fb
from algorithm.quadratics import CLIENTS, DX, DY, SAMPLES, X0, Y0, Running, clients_of, drawn, problem
from fedbilevel.algorithm.base import Variables
from fedbilevel.algorithm.fednest_family import FedMBO
from fedbilevel.experiment import AdjointWarning
from fedbilevel.fed.ledger import Ledger, as_arrays, metering

pytestmark = pytest.mark.usefixtures("all_float64")

SCALAR, BOUND = 8, 6.0
SETTINGS = {
    "everyone": {"n": 2, "size": 2, "terms": 2},
    "three terms, damped": {"n": 2, "size": 2, "terms": 3, "damping": 0.7},
    "one of three": {"n": 3, "size": 1, "terms": 2},
    "weights": {"n": 2, "size": 2, "terms": 2, "weights": (1.0, 3.0)},
}


# ------------------------------------------------------------------ the definition in numpy


class Setting:
    """Clients at one point, how many are in a cohort, N, ℓ, damping and weights."""

    def __init__(self, n, size, terms, damping=0.0, weights="uniform", alike=False):
        self.q = drawn(clients=n, alike=alike)
        self.n, self.size, self.terms, self.damping = n, size, terms, damping
        self.weights = weights
        self.w = np.ones(n) if weights == "uniform" else np.asarray(weights) / np.mean(weights)
        self.bound = BOUND * self.w.max() + damping
        q = self.q
        self.f_x = q.rho[:, None] * (X0 - q.e) + q.E @ Y0
        self.f_y = np.einsum("nij,nj->ni", q.D, Y0 - q.c) + np.einsum("nij,i->nj", q.E, X0)

    def factor(self, i):
        return np.eye(DY) - (self.w[i] * self.q.A[i] + self.damping * np.eye(DY)) / self.bound

    def h(self, pairs):
        """The weighted mean of `∇_x f_c − J_c u_c` over pairs of c and a vector; u_c is N/ℓ times that."""
        rows = [self.f_x[c] + self.terms / self.bound * self.q.B[c].T @ v for c, v in pairs]
        return np.average(rows, axis=0, weights=[self.w[c] for c, _ in pairs])

    def product_of_means(self, length):
        """FedNest's h with this N'."""
        mean = np.mean([self.factor(i) for i in range(self.n)], axis=0)
        v = np.linalg.matrix_power(mean, length) @ np.mean(self.w[:, None] * self.f_y, axis=0)
        return self.h([(c, v) for c in range(self.n)])

    def truncated(self):
        """The hypergradient with N terms of the series of the mean Hessian."""
        return np.mean([self.product_of_means(length) for length in range(self.terms)], axis=0)

    def own(self, lengths):
        """LFedNest's h: every client's own product."""
        powers = [np.linalg.matrix_power(self.factor(c), length) for c, length in enumerate(lengths)]
        return self.h([(c, power @ self.f_y[c]) for c, power in enumerate(powers)])

    # What may happen in an exchange, with its probability: whom the chains meet, and who of them answers.

    def answering(self, dropout):
        """Any but nobody: then all are asked again."""
        for who in itertools.product((True, False), repeat=self.size):
            chance = dropout ** who.count(False) * (1 - dropout) ** who.count(True)
            chance += dropout**self.size if all(who) else 0
            if any(who) and chance > 0:
                yield who, chance

    def meetings(self, places, dropout):
        pairs = itertools.product(places := list(places), self.answering(dropout))
        return [((clients, who), chance / len(places)) for clients, (who, chance) in pairs]

    def outcomes(self, dropout=0.0, later=True):
        """Every h that the definition allows, and its probability."""
        walks = self.meetings(itertools.permutations(range(self.n), self.size), dropout)
        ends = self.meetings(itertools.combinations(range(self.n), self.size), dropout)
        found = []
        for lengths in itertools.product(range(self.terms), repeat=self.size):
            for *walk, (end, chance) in itertools.product(*[walks] * (1 + max(lengths)), ends):
                vectors = self.chains(lengths, *[meeting for meeting, _ in walk], later=later)
                pairs = [(c, v) for c, v, there in zip(end[0], vectors, end[1], strict=True) if there]
                found.append((self.h(pairs), chance * np.prod([chance for _, chance in walk])))
        values, chances = zip(*found, strict=True)
        return np.stack(values), np.array(chances) / self.terms**self.size

    def chains(self, lengths, first, *walk, later):
        """What the chains arrive at. A factor of a silent client comes `later`, or is lost."""
        starts = [self.w[i] * self.f_y[i] for i in first[0]]
        mean = np.mean([v for v, is_there in zip(starts, first[1], strict=True) if is_there], axis=0)
        vectors = [v if is_there else mean for v, is_there in zip(starts, first[1], strict=True)]
        left = list(lengths)
        for index, (clients, there) in enumerate(walk):
            for c, i in enumerate(clients):
                goes_on = left[c] > 0 if later else index < lengths[c]
                if there[c] and goes_on:
                    vectors[c], left[c] = self.factor(i) @ vectors[c], left[c] - 1
        return vectors


def kinds(values, chances):
    """The different ones, and the probability of each."""
    _, index, which = np.unique(np.round(values, 9), axis=0, return_index=True, return_inverse=True)
    return values[index], np.bincount(which.ravel(), chances)


def follow(values, law):
    """Whether values are some of those of a law, all of them, and about as many of each as it says."""
    rows, chances = kinds(*law)
    which, gap = nearest(values, rows)
    expected, seen = len(values) * chances, np.bincount(which, minlength=len(rows))
    return gap.max() <= 1e-12 and np.all(seen > 0) and np.all(abs(seen - expected) < 5 * np.sqrt(expected))


def nearest(values, rows):
    """For each value the number of the nearest row, and how far that is."""
    gaps = np.max(np.abs(values[:, None] - rows), axis=-1)
    return gaps.argmin(axis=1), gaps.min(axis=1)


# ------------------------------------------------------------------ the library


@eqx.filter_jit
def _drawn(federation, algorithm, keys):
    return jax.vmap(lambda key: algorithm.hypergradient(federation, X0, Y0, key))(keys)


def draws(setting, method=FedMBO, count=1500, dropout=0.0):
    """Many draws of a method's h."""
    clients = clients_of(setting.q, weights=setting.weights)
    federation = fb.Simulator(dropout=dropout).federation(problem(), clients)
    cohort = None if setting.size == setting.n else setting.size
    options = {"terms": setting.terms, "smoothness": BOUND, "damping": setting.damping, "cohort": cohort}
    keys = jax.random.split(jax.random.key(11), count)
    return np.asarray(_drawn(federation, method(0.1, 0.1, **options), keys))


@pytest.mark.parametrize("case", SETTINGS)
def test_draws_are_what_the_definition_allows_and_as_often_as_it_says(case):
    setting = Setting(**SETTINGS[case])
    assert follow(draws(setting), setting.outcomes())


@pytest.mark.parametrize("case", SETTINGS)
def test_their_mean_is_the_truncated_series_of_the_mean_hessian(case):
    """Of the definition, whose law the test above has compared with that of the draws."""
    setting = Setting(**SETTINGS[case])
    values, chances = setting.outcomes()
    assert chances.sum() == pytest.approx(1, abs=1e-13)
    assert np.max(np.abs(chances @ values - setting.truncated())) < 1e-13


def test_wrong_series_are_told_apart():
    """A product of means is no chain. Own products are some of the chains, but too few, with another mean."""
    setting = Setting(**SETTINGS["everyone"])
    rows, _ = kinds(*setting.outcomes())
    means = np.stack([setting.product_of_means(length) for length in range(setting.terms)])
    assert nearest(means, rows)[1].min() > 1e-3
    own = np.stack([setting.own(lengths) for lengths in itertools.product(range(2), repeat=2)])
    assert nearest(own.mean(axis=0)[None], rows)[1].min() > 1e-3
    assert np.max(np.abs(own.mean(axis=0) - setting.truncated())) > 1e-2

    local = draws(setting, fb.LFedNest, count=200)
    assert nearest(local, own)[1].max() <= 1e-12
    assert len(set(nearest(local, rows)[0])) == len(own) < len(rows)


# ------------------------------------------------------------------ clients that do not answer


def test_a_chain_outlives_a_silent_client():
    """Its vector stays, and nothing becomes zero; a start is the mean of those that came."""
    setting, dropout = Setting(2, 2, 2), 0.4
    values = draws(setting, count=4000, dropout=dropout)
    assert follow(values, setting.outcomes(dropout))
    assert nearest(values, setting.outcomes()[0])[1].max() > 1e-3


def test_a_factor_that_a_silent_client_left_out_comes_later():
    """If there is an exchange left. Clients are alike, so that only the numbers of factors are seen.

    The laws with and without differ by up to 0.053 standard deviations a draw: by ten for 40,000.
    """
    setting, dropout = Setting(2, 2, 3, alike=True), 0.4
    values = draws(setting, count=40_000, dropout=dropout)
    assert follow(values, setting.outcomes(dropout))
    assert not follow(values, setting.outcomes(dropout, later=False))


# ------------------------------------------------------------------ cost


@eqx.filter_jit
def _steps(federation, algorithm, keys):
    def one(key):
        with metering() as meter:
            _, info = algorithm.step(federation, Variables(X0, Y0), key)
        return info, as_arrays(meter.counts)

    return jax.vmap(one)(keys)


def steps(algorithm, count=60, clients=CLIENTS, **options):
    """What single steps report, and their ledgers."""
    federation = fb.Simulator().federation(problem(), clients_of(drawn(clients=clients), **options))
    keys = jax.random.split(jax.random.key(2), count)
    info, counts = jax.tree.map(np.asarray, _steps(federation, algorithm, keys))
    return info, [Ledger.from_counts({e: times[k] for e, times in counts.items()}) for k in range(count)]


def totals(ledger):
    assert not ledger.edge
    calls = {kind: times for kind, times in ledger.calls.items() if times}
    return ledger.rounds, sum(ledger.down.values()), sum(ledger.up.values()), calls, ledger.samples


def cost(size, products, T, newcomers=0):
    """What the docstring says, of a step with one local step on each level; newcomers download `(x, y)`."""
    down = (2 * DX + (2 * T + products + 2) * DY) * size + (DX + DY) * newcomers
    up = (2 * DX + (2 * T + products + 1) * DY) * size
    calls = {"g_y": 3 * T, "f_y": 1, "g_yy": products, "g_xy": 1, "f_x": 3}
    calls = {kind: times * size for kind, times in calls.items() if times}
    return 2 * T + products + 3, SCALAR * down, SCALAR * up, calls, SAMPLES * sum(calls.values())


def test_a_step_costs_what_the_docstring_says():
    """M is the longest of the chains: with two clients all of 0 .. N−1 are seen."""
    T, terms, lengths = 2, 3, set()
    algorithm = FedMBO(0.1, 0.1, terms=terms, smoothness=BOUND, lower_rounds=T)
    for ledger in steps(algorithm, clients=2)[1]:
        products = ledger.rounds - 2 * T - 3
        assert totals(ledger) == cost(2, products, T)
        lengths.add(products)
    assert lengths == set(range(terms))


def test_newcomers_downloads_are_billed():
    size, seen = 2, set()
    algorithm = FedMBO(0.1, 0.1, terms=2, smoothness=BOUND, cohort=size)
    for ledger in steps(algorithm)[1]:
        newcomers = ledger.down["x"] // (SCALAR * DX) - size
        assert totals(ledger) == cost(size, ledger.rounds - 5, 1, newcomers)
        seen.add(newcomers)
    assert seen == {0, 1, 2}


# ------------------------------------------------------------------ limits


def run(q, algorithm, steps):
    return np.asarray(Running(clients_of(q), algorithm).advance(steps).state.x)


def test_where_chains_do_not_differ_the_solution_is_reached():
    """One term is exact where `H = ℓI`, and who starts a chain does not matter where all J_i are alike."""
    q = drawn()
    alike = np.repeat(q.B[:1], CLIENTS, axis=0)
    q = eqx.tree_at(lambda q: (q.A, q.B), q, (np.repeat(2 * np.eye(DY)[None], CLIENTS, axis=0), alike))
    x = run(q, FedMBO(0.2, 0.3, terms=1, smoothness=2.0), 600)
    assert np.max(np.abs(x - q.solution())) < 1e-10


def test_with_steps_that_shrink_it_comes_near_the_solution():
    """Nearer than LFedNest, which has another limit."""
    q, shrinking = drawn(curvature=(1.0, 2.0)), lambda t: 0.3 / (1 + 0.02 * t)
    settings = {"terms": 8, "smoothness": 2.0, "lower_rounds": 4}
    chained = run(q, FedMBO(shrinking, 0.4, **settings), 2000)
    local = run(q, fb.LFedNestSVRG(shrinking, 0.4, **settings, series="sum"), 2000)
    best = np.asarray(q.solution())
    assert np.linalg.norm(chained - best) < np.linalg.norm(local - best) / 3


# ------------------------------------------------------------------ ℓ, and settings that make no sense


def test_growth_is_reported():
    """By a bound that is none; not by one that bounds every client's own Hessian, however they weigh."""
    weights = np.array([1.0, 5.0, 0.5, 0.1])
    for bound, grows in ((4.2, False), (1.0, True)):  # eigenvalues of one sample's A_i reach 4.2
        info, _ = steps(FedMBO(0.1, 0.1, terms=4, smoothness=bound), weights=weights)
        assert (info["adjoint_growth"].max() > 1) == grows


def test_auto_measures_a_bound_of_every_clients_own_hessian():
    clients, algorithm = clients_of(drawn()), FedMBO(0.01, 0.1)
    assert algorithm.inverts_own_hessians
    assert algorithm.needs_smoothness
    result = fb.solve(problem(), clients, algorithm, steps=2, every=2)
    assert result.smoothness >= max(np.linalg.eigvalsh(A).max() for A in drawn().A)
    assert result.notes == ()
    with pytest.warns(AdjointWarning, match="smoothness"):
        fb.solve(problem(), clients, FedMBO(0.0, 0.1, smoothness=0.5), steps=2, every=2)


@pytest.mark.parametrize(
    "wrong", [{"outer": "local"}, {"residual": True}, {"terms": 0}, {"smoothness": -1.0}], ids=str
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FedMBO(0.1, 0.1, **wrong)


def test_what_is_decided_is_not_offered():
    assert FedMBO.decided == {"series", "outer", "alternate", "residual"}
    with pytest.raises(ValueError, match="chains"):
        fb.LFedNest(0.1, 0.1, series="chains")


def test_compositional_problems_need_no_chains_and_have_the_right_weights():
    """Their Hessian is the identity: one exact exchange, as in FedNest, whatever clients weigh."""
    known = fb.Composition.random(jax.random.key(2), 4, 2, 3)
    clients = known.clients(weights=np.array([1.0, 1.0, 1.0, 5.0]))
    ours, theirs = (
        fb.solve(known.problem(), clients, make(0.1, 0.5), 4, every=4) for make in (FedMBO, fb.FedNest)
    )
    np.testing.assert_allclose(ours.x, theirs.x, rtol=0, atol=1e-13)
    assert ours.ledger == theirs.ledger
