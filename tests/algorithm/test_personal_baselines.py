"""Methods that personalisation is compared with: against their recursions in numpy; costs and limits."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from algorithm.quadratics import CLIENTS, DX, DY, X0, Y0, clients_of, drawn, problem
from fedbilevel.algorithm.baseline.clustered import halved
from fedbilevel.fed.place import Kept
from fedbilevel.problem.personal import Mixture

pytestmark = pytest.mark.usefixtures("float64")

EVERYONE = range(CLIENTS)
WORD = 8  # bytes of a number
with jax.enable_x64(True):
    QUADRATIC = drawn()


def gradient(i, y):
    return QUADRATIC.A[i] @ y - QUADRATIC.B[i] @ X0 - QUADRATIC.b[i]


def descended(i, y, lr, steps):
    for _ in range(steps):
        y = y - lr * gradient(i, y)
    return y


def solved(method, steps, **data):
    """With room for many steps, so that fewer of them are no other program."""
    return fb.solve(problem(), clients_of(QUADRATIC, **data), method, steps, every=1024)


def close(found, expected, tolerance=1e-12):
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def spent(result, **expected):
    """All of a ledger but the samples; what is not named is zero."""
    columns = result.ledger.columns()
    del columns["samples"]
    assert columns == dict.fromkeys(columns, 0) | expected


# ------------------------------------------------------------------------ alone


def test_local_is_descent_at_every_client_and_says_nothing():
    result = solved(fb.Local(0.1, steps=(1, 2, 3, 4)), 5)
    close(result.y, [descended(i, Y0, 0.1, 5 * (i + 1)) for i in EVERYONE])
    close(result.x, [X0] * CLIENTS)
    spent(result, calls_g_y=5 * (1 + 2 + 3 + 4))


def test_local_passes_read_every_sample_once():
    result = solved(fb.Local(0.1, epochs=2), 3, batch_size=1)
    spent(result, calls_g_y=3 * CLIENTS * 2 * 2)
    assert result.ledger.samples == 3 * CLIENTS * 2 * 2


# ---------------------------------------------------------------------- FedProx


def test_fedprox_is_its_recursion():
    lr, mu, y = 0.1, 0.7, Y0
    for _ in range(4):
        rows = []
        for i in EVERYONE:
            z = y
            for _ in range(3):
                z = z - lr * (gradient(i, z) + mu * (z - y))
            rows.append(z)
        y = np.mean(rows, axis=0)
    result = solved(fb.FedProx(lr, mu, steps=3), 4)
    close(result.y, y)
    close(result.x, X0)
    each = 4 * CLIENTS * WORD
    spent(result, rounds=4, bytes_down=each * (DX + DY), bytes_up=each * DY, calls_g_y=4 * CLIENTS * 3)


def test_fedprox_without_its_penalty_is_fedavg_and_with_it_is_not():
    options = {"steps": 3, "cohort": 2}
    average = solved(fb.FedAvg(0.1, level="lower", **options), 5, batch_size=1)
    same, drawn_back = (solved(fb.FedProx(0.1, mu, **options), 5, batch_size=1) for mu in (0.0, 1.0))
    close(same.y, average.y)
    assert same.ledger == average.ledger
    assert np.max(np.abs(drawn_back.y - average.y)) > 1e-3


# ------------------------------------------------------------------ FedAvg, tuned


@pytest.mark.parametrize("steps", [3, 4])
def test_fedavg_plus_keeps_the_tuned_copies_of_the_last_average_that_was_due(steps):
    lr, tune_lr, y, own = 0.1, 0.05, Y0, [Y0] * CLIENTS
    for time in range(1, steps + 1):
        y = np.mean([descended(i, y, lr, 2) for i in EVERYONE], axis=0)
        if time % 2 == 0:
            own = [descended(i, y, tune_lr, 3) for i in EVERYONE]
    result = solved(fb.FedAvgPlus(lr, 2, tune_steps=3, tune_lr=tune_lr, tune_every=2), steps)
    close(result.y, own)
    close(result.state.y, y)
    tunings, each = steps // 2, CLIENTS * DY * WORD
    calls = CLIENTS * (2 * steps + 3 * tunings)
    spent(
        result,
        rounds=steps,
        bytes_down=each * (steps + tunings),
        bytes_up=each * steps,
        calls_g_y=calls,
    )


def test_fedavg_plus_tunes_also_who_was_not_asked():
    result = solved(fb.FedAvgPlus(0.1, 2, tune_steps=1, cohort=2), 3)
    close(result.y, [descended(i, np.asarray(result.state.y), 0.1, 1) for i in EVERYONE])


# ----------------------------------------------------------------------- pFedMe


def test_pfedme_is_its_recursion():
    lr, lam, eta, beta, w = 0.05, 2.0, 0.3, 1.2, Y0
    for _ in range(3):
        theta, ends = [None] * CLIENTS, []
        for i in EVERYONE:
            own = near = w
            for _ in range(2):
                for _ in range(4):
                    near = near - lr * (gradient(i, near) + lam * (near - own))
                own = own - eta * lam * (own - near)
            theta[i] = near
            ends.append(own)
        w = (1 - beta) * w + beta * np.mean(ends, axis=0)
    result = solved(fb.PFedMe(lr, lam, 4, eta, beta, steps=2), 3)
    close(result.y, theta)
    close(result.state.w, w)
    each = 3 * CLIENTS * DY * WORD
    spent(result, rounds=3, bytes_down=each, bytes_up=each, calls_g_y=3 * CLIENTS * 2 * 4)


def test_the_limit_of_pfedme_minimises_the_mean_envelope():
    lam, eye = 3.0, np.eye(DY)
    right = [QUADRATIC.B[i] @ X0 + QUADRATIC.b[i] for i in EVERYONE]
    inverse = [np.linalg.inv(QUADRATIC.A[i] + lam * eye) for i in EVERYONE]
    # The envelope's gradient is λ(w − θ_i), θ_i = (A_i + λ)⁻¹(c_i + λw).
    left = np.mean([eye - lam * inv for inv in inverse], axis=0)
    w = np.linalg.solve(left, np.mean([inv @ c for inv, c in zip(inverse, right, strict=True)], axis=0))
    theta = [inv @ (c + lam * w) for inv, c in zip(inverse, right, strict=True)]
    result = solved(fb.PFedMe(0.1, lam, 100, 0.3), 300)
    close(result.state.w, w, 1e-9)
    close(result.y, theta, 1e-9)
    own = [np.linalg.solve(QUADRATIC.A[i], right[i]) for i in EVERYONE]
    assert np.linalg.norm(result.y - np.array(own)) > 0.1, "neither alone,"
    assert np.linalg.norm(result.y - w) > 0.1, "nor all the same"


# --------------------------------------------------------------------- clusters


def pull(x, y, samples):
    return jnp.mean(jnp.sum((y - samples) ** 2, axis=-1)) / 2


PLACES = np.array([[1.0, 0.2], [-1.0, 0.1], [1.1, -0.2], [-0.9, -0.1], [1.0, 0.0]])


def two_groups(method, steps):
    plain = fb.Problem(pull, pull, jnp.zeros(1), jnp.array([0.5, 0.0]))
    return fb.solve(plain, fb.Clients(PLACES[:, None]), method, steps, every=1)


def test_clusters_part_clients_that_pull_opposite_ways():
    lr, y, cluster = 0.5, np.tile([0.5, 0.0], (5, 1)), np.zeros(5, int)
    for _ in range(12):
        updates = lr * (PLACES - y)
        for name in set(cluster):
            members = np.flatnonzero(cluster == name)
            mean = np.linalg.norm(updates[members].mean(0))
            if mean < 0.02 and np.linalg.norm(updates[members], axis=1).max() > 0.2:
                cluster = divided(updates, cluster, members)
        for name in set(cluster):
            y[cluster == name] += updates[cluster == name].mean(0)
    result = two_groups(fb.ClusteredFL(lr, 0.02, 0.2), 12)
    assert result.state.cluster.tolist() == cluster.tolist() == [0, 1, 0, 1, 0]
    close(result.y, y)
    close(result.y[::2], [PLACES[::2].mean(0)] * 3, 1e-2)
    numbers = [row["clusters"] for row in result.history if "clusters" in row]
    assert (numbers[0], numbers[-1]) == (1, 2)
    each = 12 * 5 * 2 * WORD
    spent(result, rounds=12, bytes_down=each, bytes_up=each, calls_g_y=12 * 5)


def divided(updates, cluster, members):
    """The halving of some clients that has the least largest similarity across, by trying all."""
    lengths = np.linalg.norm(updates, axis=1)
    similar = updates @ updates.T / np.outer(lengths, lengths)
    first, rest = members[0], members[1:]
    halvings = [leaving for size in range(1, len(rest) + 1) for leaving in itertools.combinations(rest, size)]

    def across(leaving):
        staying = [i for i in members if i not in leaving]
        return similar[np.ix_(staying, leaving)].max()

    best = min(halvings, key=across)
    assert first not in best
    cluster = cluster.copy()
    cluster[list(best)] = min(best)
    return cluster


@pytest.mark.parametrize("seed", range(5))
def test_a_halving_is_the_best_of_all(seed):
    updates = np.random.default_rng(seed).normal(size=(7, 3))
    cluster = np.array([0, 1, 0, 0, 1, 0, 0])
    lengths = np.linalg.norm(updates, axis=1)
    similar = jnp.asarray(updates @ updates.T / np.outer(lengths, lengths))
    found = halved(similar, jnp.asarray(cluster), jnp.asarray(cluster == 0))
    assert found.tolist() == divided(updates, cluster, np.flatnonzero(cluster == 0)).tolist()
    whole = halved(similar, jnp.asarray(cluster), jnp.zeros(7, bool))
    assert whole.tolist() == cluster.tolist()


def test_federated_averaging_of_a_variable_that_is_not_there_is_refused():
    no_x = fb.Problem(pull, pull, (), jnp.zeros(2))
    with pytest.raises(ValueError, match=r"the method tunes x, and this problem has none.*level="):
        fb.solve(no_x, fb.Clients(PLACES[:, None]), fb.FedAvg(0.1), 1)
    no_y = fb.single_level(lambda x, samples: jnp.sum(x**2), jnp.zeros(2))
    with pytest.raises(ValueError, match=r"the method learns y, and this problem .* has none"):
        fb.solve(no_y, fb.Clients(PLACES[:, None]), fb.FedAvg(0.1, level="lower"), 1)


def test_one_cluster_is_fedavg():
    average = solved(fb.FedAvg(0.1, level="lower", steps=2), 5)
    together = solved(fb.ClusteredFL(0.1, 0.0, 0.0, steps=2), 5)
    close(together.y, [average.y] * CLIENTS)


def test_a_client_that_missed_an_update_has_its_clusters_model_again():
    """Sums of updates would leave it behind for good."""
    plain = fb.Problem(pull, pull, jnp.zeros(1), jnp.array([0.5, 0.0]))
    engine = fb.Simulator(dropout=0.4)
    result = fb.solve(plain, fb.Clients(PLACES[:, None]), fb.ClusteredFL(0.5, 0.0, 0.0), 6, engine=engine)
    assert result.ledger.up["update"] < 6 * 5 * 2 * WORD, "some did not answer"
    close(result.y, np.tile(result.y[:1], (5, 1)))
    assert np.abs(result.y[0] - np.array([0.5, 0.0])).max() > 0.01


def test_a_client_alone_is_not_divided():
    result = two_groups(fb.ClusteredFL(0.5, 10.0, 0.0), 12)
    assert result.state.cluster.tolist() == [0, 1, 2, 3, 4]
    close(result.y, PLACES, 1e-2)


# ------------------------------------------------------------------------ FedEM

SIZES, MODELS, CLASSES, INPUTS, PENALTY = (4, 6, 3, 5), 2, 3, 2, 0.1


@pytest.fixture(scope="module")
def mixture():
    """Clients of unequal size, in numpy and as the library has them."""
    draw = np.random.default_rng(3)
    rows = [
        {"inputs": draw.normal(size=(size, INPUTS)), "labels": draw.integers(CLASSES, size=size)}
        for size in SIZES
    ]
    with jax.enable_x64(True):
        options = {"inputs": (INPUTS,), "classes": CLASSES, "models": MODELS, "penalty": PENALTY}
        flat = {name: np.concatenate([own[name] for own in rows]) for name in rows[0]}
        ends = np.cumsum(SIZES)
        where = [range(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
        problem = Mixture(fb.Linear(CLASSES), **options, client_metrics={})
        yield problem, fb.Clients.indexed(flat, where), rows


def probabilities(y, own):
    """`(models, samples, classes)`."""
    scores = np.einsum("si,kic->ksc", own["inputs"], y["weight"]) + y["bias"][:, None]
    parts = np.exp(scores - scores.max(-1, keepdims=True))
    return parts / parts.sum(-1, keepdims=True)


def expected(weights, y, own):
    """q, `(models, samples)`."""
    samples = np.arange(len(own["labels"]))
    joint = weights[:, None] * probabilities(y, own)[:, samples, own["labels"]]
    return joint / joint.sum(0)


def maximised(q, y, own, lr, steps):
    size = len(own["labels"])
    for _ in range(steps):
        gap = q[..., None] * (probabilities(y, own) - np.eye(CLASSES)[own["labels"]]) / size
        slope = {"weight": np.einsum("si,ksc->kic", own["inputs"], gap), "bias": gap.sum(1)}
        y = {name: leaf - lr * (slope[name] + PENALTY * leaf) for name, leaf in y.items()}
    return y


def em(mixture, lr, local_steps, rounds, mix, counts=(1, 1, 1, 1)):
    """FedEM in numpy: weights and models, one of each a client; what a client learns counts so often."""
    problem, _, rows = mixture
    start = {name: np.asarray(leaf) for name, leaf in problem.y0.items()}
    weights, models = [np.full(MODELS, 1 / MODELS)] * len(rows), [start] * len(rows)
    for _ in range(rounds):
        q = [expected(*each) for each in zip(weights, models, rows, strict=True)]
        weights = [each.mean(1) for each in q]
        new = [maximised(*each, lr, local_steps) for each in zip(q, models, rows, strict=True)]
        sent = [
            {name: old[name] + times * (y[name] - old[name]) for name in y}
            for old, y, times in zip(models, new, counts, strict=True)
        ]
        models = [{name: np.tensordot(row, [y[name] for y in sent], 1) for name in sent[0]} for row in mix]
    return np.array(weights), {name: np.stack([y[name] for y in models]) for name in models[0]}


def test_fedem_is_expectation_and_maximisation(mixture):
    problem, clients, _ = mixture
    result = fb.solve(problem, clients, fb.FedEM(0.5, steps=3), 3)
    weights, models = em(mixture, 0.5, 3, 3, np.full((4, 4), 1 / 4))
    close(np.exp(result.x), weights)
    for name, leaf in result.y.items():
        close(leaf, models[name][0])
    size = WORD * MODELS * CLASSES * (INPUTS + 1)
    spent(result, rounds=3, bytes_down=12 * size, bytes_up=12 * size, calls_g=12, calls_g_y=12 * 3)
    assert result.ledger.samples == 3 * (1 + 3) * sum(SIZES)


def test_the_first_step_of_fedem_on_the_models_is_one_along_the_gradient_of_the_mixture(mixture):
    problem, clients, _ = mixture
    methods = fb.FedEM(0.5), fb.FedAvg(0.5, level="lower")
    found, expected = (fb.solve(problem, clients, method, 1).y for method in methods)
    jax.tree.map(close, found, expected)


COUNTS = (1.5, 0.5, 1.2, 0.8)


def test_fedem_over_links_mixes_with_neighbours(mixture):
    """By the clients' weights; where all hear all, that is the weighted mean of a server (first assertion).

    Negative control: as if all counted alike, the models are others.
    """
    whole, alike = np.full((4, 4), 1 / 4), (1, 1, 1, 1)
    served, mixed = em(mixture, 0.5, 3, 3, whole * COUNTS), em(mixture, 0.5, 3, 3, whole, COUNTS)
    jax.tree.map(close, served, mixed)
    problem, clients, _ = mixture
    clients = eqx.tree_at(
        lambda c: c.weights, clients, 3 * np.array(COUNTS), is_leaf=lambda leaf: leaf is None
    )
    result = fb.solve(problem, clients, fb.FedEM(0.5, steps=3, links=fb.links.Ring()), 3)
    ring = (np.eye(4) + np.roll(np.eye(4), 1, 0) + np.roll(np.eye(4), -1, 0)) / 3
    weights, models = em(mixture, 0.5, 3, 3, ring, COUNTS)
    close(np.exp(result.x), weights)
    jax.tree.map(close, result.y, models)
    assert np.abs(models["weight"] - em(mixture, 0.5, 3, 3, ring, alike)[1]["weight"]).max() > 0.01
    spent(
        result,
        rounds=3,
        bytes_edge=3 * 8 * WORD * MODELS * CLASSES * (INPUTS + 1),
        calls_g=12,
        calls_g_y=12 * 3,
    )


def test_fedem_over_links_refuses_silent_clients_whose_models_would_be_lost(mixture):
    problem, clients, _ = mixture
    with pytest.raises(ValueError, match=r"dropout is 0\.1, but where clients mix with their neighbours"):
        fb.solve(problem, clients, fb.FedEM(0.5, links=fb.links.Ring()), 1, engine=fb.Simulator(dropout=0.1))


def test_fedem_leaves_the_weights_of_a_client_that_was_not_asked(mixture):
    problem, clients, _ = mixture
    result = fb.solve(problem, clients, fb.FedEM(0.5, cohort=1), 1)
    assert sorted(np.any(result.x != 0, axis=1)) == [False, False, False, True]


def test_a_model_without_any_share_is_no_overflow(mixture):
    problem, _, _ = mixture
    never = {"weight": np.zeros((2, INPUTS, CLASSES)), "bias": np.zeros((2, CLASSES))}
    never["bias"][1] = [1e4, -1e4, -1e4]
    only = fb.Clients.indexed(
        {"inputs": np.zeros((4, INPUTS)), "labels": np.full(4, 1)}, [range(2), range(2, 4)]
    )
    result = fb.solve(problem.at(problem.x0, never), only, fb.FedEM(0.1), 2)
    assert not result.diverged
    close(np.exp(result.x[:, 0]), 1)


def test_fedem_refuses_other_problems():
    with pytest.raises(ValueError, match="FedEM trains a mixture of models"):
        solved(fb.FedEM(0.1), 1)
    data = fb.Clients([{"inputs": np.zeros((2, INPUTS)), "labels": np.arange(2)}] * 2)
    scaled = fb.WeightedMixture(fb.Linear(CLASSES), inputs=(INPUTS,), classes=CLASSES, of="logits")
    with pytest.raises(ValueError, match="FedEM trains a mixture of models"):
        fb.solve(scaled, data, fb.FedEM(0.1), 1)


# ------------------------------------------------------------------------ links

METHODS = {
    "FedAvg": lambda links: fb.FedAvg(0.1, level="lower", links=links),
    "FedProx": lambda links: fb.FedProx(0.1, 0.1, links=links),
    "FedAvgPlus": lambda links: fb.FedAvgPlus(0.1, links=links),
    "PFedMe": lambda links: fb.PFedMe(0.1, links=links),
    "ClusteredFL": lambda links: fb.ClusteredFL(0.1, 0.1, 0.1, links=links),
}
UNSERVED = [
    fb.links.Ring(),
    fb.links.Stochastic(probability=0.9),
    fb.links.ErdosRenyi(0.5),
    fb.links.Given(0.1 + 0.4 * np.eye(6)),  # everybody hears everybody, but no server takes such a mean
]


@pytest.mark.parametrize("name", METHODS)
def test_without_a_server_they_say_that_they_cannot_run(name):
    for links in UNSERVED:
        with pytest.raises(fb.CannotRunError, match=f"^{name} needs a server, which only complete links"):
            METHODS[name](links).among(6)
    with pytest.raises(TypeError, match="links is 'Ring'; it must say who hears whom"):
        METHODS[name]("Ring").among(6)
    served = METHODS[name](fb.links.Given(np.full((6, 6), 1 / 6)))
    assert isinstance(served.among(6).links, fb.links.Complete)


def test_a_run_says_so_too():
    with pytest.raises(fb.CannotRunError, match="PFedMe needs a server"):
        solved(fb.PFedMe(0.1, links=fb.links.Ring()), 1)


def test_fedem_needs_weights_that_are_known_and_doubly_stochastic():
    for links in (fb.links.ErdosRenyi(0.5), fb.links.Ring(), fb.links.Ring(directed=True)):
        assert not isinstance(fb.FedEM(0.1, links=links).among(6).links, fb.links.Complete)
    assert isinstance(fb.FedEM(0.1).among(6).links, fb.links.Complete)
    for balanced in (False, True):
        links = fb.links.Stochastic(directed=False, balanced=balanced)
        with pytest.raises(fb.CannotRunError, match="these links come and go"):
            fb.FedEM(0.1, links=links).among(6)
    one_sided = np.array([[0.5, 0.5, 0.5], [0.5, 0.25, 0.0], [0.0, 0.25, 0.5]])
    with pytest.raises(fb.CannotRunError, match=r"rows and columns of these sum to 0\.75\.\.1\.5"):
        fb.FedEM(0.1, links=fb.links.Given(one_sided)).among(3)
    with pytest.raises(ValueError, match="no server that could choose one"):
        fb.FedEM(0.1, cohort=2, links=fb.links.Ring())


# --------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: fb.FedProx(0.1, -1.0), r"mu is -1\.0; it must be a number of at least 0"),
        (lambda: fb.PFedMe(0.1, -2.0), r"lam is -2\.0"),
        (lambda: fb.PFedMe(0.1, inner_steps=0), "inner_steps is 0"),
        (lambda: fb.ClusteredFL(0.1, -0.1, 0.1), r"mean_below is -0\.1"),
        (lambda: fb.FedAvgPlus(0.1, tune_every=0), "tune_every is 0"),
        (lambda: fb.FedAvgPlus(0.1, tune_lr=-1.0), "a step size is -1"),
        (lambda: fb.Local(0.1, steps=0), "steps is 0"),
    ],
)
def test_wrong_settings_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_personal_models_are_kept_at_the_clients():
    """One at the server would be no client's own in `client_metrics`."""
    methods = [fb.Local(0.1), fb.FedAvgPlus(0.1), fb.PFedMe(0.1), fb.ClusteredFL(0.1, 0.1, 0.1)]
    fed = fb.Simulator().federation(problem(), clients_of(QUADRATIC))
    for method in methods:
        x, y = method.solution(method.init(fed, jax.random.key(0)))
        assert isinstance(x, Kept)
        assert isinstance(y, Kept)
