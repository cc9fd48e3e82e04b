"""FedBiOAcc: its box in numpy, its limits, and the variance that its momenta are there to reduce."""

import itertools

import jax
import numpy as np
import pytest

import fedbilevel as fb
from algorithm.quadratics import (
    CLIENTS,
    DX,
    DY,
    GLOBAL,
    LOCAL,
    X0,
    Y0,
    Running,
    clients_of,
    distance,
    drawn,
    fedbioacc_round,
    global_field,
    local_field,
)

pytestmark = pytest.mark.usefixtures("float64")

STEPS = (0.06, 0.15, 0.1)
TERMS = 3
SETTINGS = {"delta": 1.2, "t0": 2.0, "c_upper": 0.3, "c_lower": 0.7, "c_adjoint": 0.5}
DECAY = (0.3, 0.7, 0.5)
UNEQUAL = (1, 3, 2, 4)
EVERYONE = tuple(range(CLIENTS))
STEADY = {"delta": 1000.0, "t0": 1e9}  # α is 1 and stays so


def alpha(t):
    """`α_t`, t from 1, of `SETTINGS`."""
    return 1.2 / (2.0 + t) ** (1 / 3)


class Box:
    """FedBiOAcc in numpy: first momenta local, or the average of all if cohorts are sampled."""

    def __init__(self, q, lower="global", sync_every=3, average_first=False):
        local = lower == "local"
        self.field = local_field(q, STEPS[2], TERMS) if local else global_field(q)
        self.shared = LOCAL if local else GLOBAL
        self.rows = [(X0, Y0) if local else (X0, Y0, np.zeros(DY))] * CLIENTS
        self.momenta = [self.field(i, row) for i, row in enumerate(self.rows)]
        if average_first:
            means = [np.mean([m[j] for m in self.momenta], axis=0) for j in range(len(self.shared))]
            self.momenta = [
                tuple(means[j] if s else m[j] for j, s in enumerate(self.shared)) for m in self.momenta
            ]
        self.counts, self.time = tuple(np.broadcast_to(sync_every, CLIENTS)), 1

    def round(self, members=EVERYONE, answering=None, decay=DECAY):
        """What the point and the momenta are after a round of these clients."""
        steps, decay = STEPS[: len(self.shared)], decay[: len(self.shared)]
        settings = (steps, decay, alpha, self.time, self.counts, members, answering)
        return fedbioacc_round(self.field, self.shared, self.rows, self.momenta, *settings)

    def take(self, outcome):
        self.rows, self.momenta = outcome
        self.time += max(self.counts)


def gap(running, outcome):
    return max(distance(running.z, outcome[0]), distance(running.momenta, outcome[1]))


# ------------------------------------------------------------------ trajectories


@pytest.mark.parametrize(
    ("lower", "sync_every"), [("global", 3), ("local", UNEQUAL)], ids=["global", "local"]
)
def test_every_iterate_is_that_of_the_box(lower, sync_every):
    for seed in (1, 2, 3):
        q = drawn(seed)
        method = fb.FedBiOAcc(*STEPS, **SETTINGS, sync_every=sync_every, lower=lower, terms=TERMS)
        running, box = Running(clients_of(q), method), Box(q, lower, sync_every)
        assert gap(running, (box.rows, box.momenta)) <= 1e-12
        for _ in range(6):
            other = box.round(decay=(0.31, 0.7, 0.5))
            box.take(box.round())
            assert gap(running.advance(), (box.rows, box.momenta)) <= 1e-12
        assert gap(running, other) > 1e-6


def test_first_momenta_are_every_clients_own():
    """With averaged ones the first round would end elsewhere."""
    q = drawn()
    running = Running(clients_of(q), fb.FedBiOAcc(*STEPS, **SETTINGS, sync_every=3, terms=TERMS)).advance()
    averaged = Box(q, average_first=True).round()
    assert gap(running, averaged) > 1e-3


@pytest.mark.parametrize(("first_batch", "samples"), [(None, 4), (3, 3), (1, 1)])
def test_the_first_batch_is_larger_than_the_others(first_batch, samples):
    """None: all samples, so that the first momenta are exact whatever the size of later batches is."""
    known, q = fb.Quadratic.random(jax.random.key(1), CLIENTS, DX, DY), drawn(1)
    data = known.clients(samples=4, noise=1.0, batch_size=1)
    running = Running(data, fb.FedBiOAcc(*STEPS, first_batch=first_batch))
    exact = gap(running, (running.z, Box(q).momenta)) <= 1e-12
    assert exact == (first_batch is None)
    assert running.start.samples == 5 * CLIENTS * samples


def test_full_batches_and_one_step_a_round_are_fedbio_on_schedules():
    q = drawn()
    fast = Running(clients_of(q), fb.FedBiOAcc(*STEPS, **SETTINGS))
    schedules = [lambda t, lr=lr: lr * alpha(t + 1) for lr in STEPS]  # t counts from 0 in a schedule
    plain = Running(clients_of(q), fb.FedBiO(*schedules))
    for _ in range(8):
        assert distance(fast.advance().z, plain.advance().z) <= 1e-12


# ------------------------------------------------------------------ limits


def test_the_limits_are_those_of_the_two_problems():
    """Without drift the momenta's fixed point is exact, global and local; they are different points."""
    q = drawn()
    ours, own = np.asarray(q.solution()), np.asarray(q.own_solution())
    assert np.max(np.abs(ours - own)) > 0.05
    found = Running(clients_of(q), fb.FedBiOAcc(0.1, 0.2, 0.2, **STEADY)).advance(1500)
    assert np.max(np.abs(found.z[0][0] - ours)) <= 1e-10
    found = Running(clients_of(q), fb.FedBiOAccLocal(0.1, 0.2, 0.2, terms=150, **STEADY)).advance(1500)
    assert np.max(np.abs(found.z[0][0] - own)) <= 1e-10
    best = q.own_lower_solutions(q.own_solution())
    np.testing.assert_allclose([row[1] for row in found.z], best, rtol=0, atol=1e-10)


# ------------------------------------------------------------------ who takes part


def only(found, outcomes):
    """The only possible outcome that is what was found."""
    fitting = [name for name, outcome in outcomes.items() if gap(found, outcome) <= 1e-12]
    assert len(fitting) == 1
    return fitting[0]


@pytest.mark.parametrize("lower", ["global", "local"])
def test_a_sampled_round_is_that_of_its_cohort(lower):
    """Whoever is not drawn keeps its own y, and its momentum, to the bit."""
    q, seen = drawn(), set()
    method = fb.FedBiOAcc(*STEPS, **SETTINGS, sync_every=3, lower=lower, terms=TERMS, cohort=2)
    running, box = Running(clients_of(q), method), Box(q, lower, average_first=True)
    assert gap(running, (box.rows, box.momenta)) <= 1e-12
    for _ in range(30):
        box.rows, box.momenta = running.z, running.momenta
        outcomes = {pair: box.round(pair) for pair in itertools.combinations(EVERYONE, 2)}
        pair = only(running.advance(), outcomes)
        seen.add(pair)
        box.time += 3
        if lower == "local":
            olds, news = (box.rows, box.momenta), (running.z, running.momenta)
            for old, new in zip(olds, news, strict=True):
                still = tuple(i for i in EVERYONE if np.array_equal(old[i][1], new[i][1]))
                assert sorted((*still, *pair)) == list(EVERYONE)
    assert len(seen) == 6


def test_a_round_with_dropout_is_that_of_those_who_answered():
    """Twice a round: some do not send their variables, and of the others some do not send their momenta."""
    q, seen = drawn(), set()
    method = fb.FedBiOAccLocal(*STEPS, **SETTINGS, sync_every=3, terms=TERMS)
    running, box = Running(clients_of(q), method, dropout=0.3), Box(q, "local")
    subsets = [s for size in range(1, CLIENTS + 1) for s in itertools.combinations(EVERYONE, size)]
    possible = [(all_, some) for all_ in subsets for some in subsets if set(some) <= set(all_)]
    for _ in range(12):
        box.rows, box.momenta = running.z, running.momenta
        seen.add(only(running.advance(), {pair: box.round(*pair) for pair in possible}))
        box.time += 3
    assert len(seen) >= 5
    assert any(all_ != some for all_, some in seen)


@pytest.mark.parametrize("settings", [{}, {"lower": "local", "terms": TERMS}], ids=["global", "local"])
def test_the_first_momenta_of_a_client_that_misses_the_start_are_zero(settings):
    q, missed = drawn(), 0
    method = fb.FedBiOAcc(*STEPS, sync_every=3, **settings)
    full = Running(clients_of(q), method).momenta
    for seed in range(3):
        momenta = Running(clients_of(q), method, seed, dropout=0.5).momenta
        absent = [i for i in EVERYONE if distance([momenta[i]], [full[i]]) > 1e-12]
        assert not any(np.any(part) for i in absent for part in momenta[i])
        missed += len(absent)
    assert 0 < missed < 3 * CLIENTS


# ------------------------------------------------------------------ noise


def gaps(q, z, found):
    """Squared distances of averaged directions, one for each variable, from the exact ones at z."""
    rows = [global_field(q)(i, z[i]) for i in EVERYONE]
    exact = [np.mean([row[j] for row in rows], axis=0) for j in range(3)]
    return [np.sum((m - d) ** 2) for m, d in zip(found, exact, strict=True)]


def of_momenta(q, data, settings, rounds, count):
    """The root mean square error of the momenta over `count` rounds after the first `rounds`."""
    running = Running(data, fb.FedBiOAcc(*STEPS, first_batch=1, **settings)).advance(rounds)
    found = [gaps(q, running.advance().z, running.momenta[0]) for _ in range(count)]
    return np.sqrt(np.mean(found, axis=0)), running.z


def of_minibatches(q, data, z, count):
    """The same of FedBiO's plain directions, all at z."""
    running, found = Running(data, fb.FedBiO(*STEPS)), []
    for _ in range(count):
        running.state = running.state._replace(shared=z[0])
        new = running.advance().z[0]
        directions = [(old - v) / rate for old, v, rate in zip(z[0], new, STEPS, strict=True)]
        found.append(gaps(q, z, directions))
    return np.sqrt(np.mean(found, axis=0))


def test_momenta_lose_their_noise_along_the_run():
    known, q = fb.Quadratic.random(jax.random.key(1), CLIENTS, DX, DY), drawn(1)
    data = known.clients(samples=16, noise=1.0, batch_size=1)
    early, _ = of_momenta(q, data, {}, 0, 10)
    late, z = of_momenta(q, data, {}, 2000, 40)
    plain = of_minibatches(q, data, z, 60)
    assert np.all(late < early / 4)
    assert np.all(late < plain / 6)
    # Where `c α² = 1` nothing is remembered, and the momenta are as noisy as plain directions.
    forgetful, _ = of_momenta(q, data, STEADY, 100, 60)
    np.testing.assert_allclose(forgetful, plain, rtol=0.25)


# ------------------------------------------------------------------ the theorem's constants

CONSTANTS = {"L": 4.0, "mu": 1.0, "sigma": 0.5, "clients": CLIENTS, "sync_every": 3, "batch": 2}


@pytest.mark.parametrize("L", [1.0, 4.0, 50.0])
@pytest.mark.parametrize("sigma", [1e-3, 0.5, 30.0])
@pytest.mark.parametrize("sync_every", [1, 3, 10])
def test_the_theorems_steps_are_as_small_as_it_asks(L, sigma, sync_every):
    mu = 0.5
    method = fb.FedBiOAcc.from_constants(L, mu, sigma, CLIENTS, sync_every, 2)
    smooth = L * np.sqrt(1 + (L / mu) ** 2)
    first = method.delta / (method.t0 + 1) ** (1 / 3)
    assert first <= 1 / (16 * sync_every**1.5 * smooth)
    assert max(method.c_upper, method.c_lower, method.c_adjoint) * first**2 <= 1  # and α_t only falls
    assert method.c_upper > method.c_lower == method.c_adjoint > 0
    expected = pytest.approx((mu / (36 * L**2), 1 / (2 * L), 1 / (2 * L)))
    assert (method.upper_lr, method.lower_lr, method.adjoint_lr) == expected


def test_the_theorems_steps_descend():
    q = drawn()
    running = Running(clients_of(q), fb.FedBiOAcc.from_constants(**CONSTANTS, terms=TERMS))
    best = np.asarray(q.solution())
    before = np.linalg.norm(running.z[0][1] - np.asarray(q.lower_solution(q.solution())))
    far = np.linalg.norm(X0 - best)
    x, y, _ = running.advance(4000).z[0]
    assert np.linalg.norm(x - best) < far
    assert np.linalg.norm(y - np.asarray(q.lower_solution(q.solution()))) < before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("L", 0.0),
        ("L", float("nan")),
        ("mu", -1.0),
        ("mu", 8.0),
        ("sigma", 0.0),
        ("clients", 0),
        ("sync_every", 0),
        ("batch", 0),
    ],
)
def test_impossible_constants_are_named(name, value):
    with pytest.raises(ValueError, match=rf"{name}\b.* is {value}"):
        fb.FedBiOAcc.from_constants(**CONSTANTS | {name: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sync_every": 0}, "sync_every is 0"),
        ({"sync_every": (1, 0, 2, 3)}, "sync_every of client 1 is 0"),
        ({"lower": "own"}, "lower is 'own'"),
        ({"upper": "global"}, "upper is 'global'"),
        ({"upper": "own", "lower": "local"}, "nothing in common"),
        ({"terms": 0}, "terms is 0"),
    ],
)
@pytest.mark.parametrize("method", [fb.FedBiO, fb.FedBiOAcc])
def test_mistyped_settings_are_explained(method, settings, message):
    with pytest.raises(ValueError, match=message):
        method(*STEPS, **settings)
