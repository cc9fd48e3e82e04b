"""Fair federated learning: a power of a mean, weights of clients, and who gains by them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.data.batches import weighted
from fedbilevel.portable import imported, pack, unpack
from fedbilevel.problem.accuracy import cross_entropy
from fedbilevel.problem.base import ProblemError, objective
from fedbilevel.problem.fairness import AgnosticClients, FairClients
from fedbilevel.problem.model import Linear

CLASSES, INPUTS, SIZES = 3, 4, (3, 5, 8)
DRAW = np.random.default_rng(2)


def crowd(client, count, draw=DRAW):
    labels = draw.integers(0, CLASSES, count)
    inputs = np.eye(INPUTS)[labels] + draw.normal(size=(count, INPUTS))
    return {"inputs": inputs, "labels": labels, "client": np.full(count, client, np.int32)}


OWN = [crowd(client, size) for client, size in enumerate(SIZES)]


def make(kind=FairClients, **options):
    settings = {"inputs": (INPUTS,), "classes": CLASSES, "clients": len(SIZES), "penalty": 0.1} | options
    return kind(Linear(CLASSES), **settings)


def mean_loss(parameters, samples):
    logits = Linear(CLASSES)(parameters, jnp.asarray(samples["inputs"]))
    return float(jnp.mean(cross_entropy(logits, jnp.asarray(samples["labels"]))))


def batches(clients, level):
    return [getattr(clients, level).batch(client, jax.random.key(0)) for client in range(clients.n)]


# -------------------------------------------------------------------- the upper objective


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("q", [0.0, 1.0, 2.5])
def test_the_upper_objective_of_unequal_clients_is_a_power_of_their_mean_loss(q):
    """All clients' batches are as long as the largest one's: padded samples must not count."""
    clients, problem = fb.Clients(OWN), make(q=q)
    for own, batch in zip(OWN, batches(clients, "upper"), strict=True):
        assert batch.weight is not None
        value = objective(problem, "upper", problem.x0, problem.y0, batch)
        loss = mean_loss(problem.y0, own)
        np.testing.assert_allclose(value, loss ** (q + 1) / (q + 1), rtol=1e-13)
        alone = problem.upper(problem.x0, problem.y0, jax.tree.map(jnp.asarray, own))
        np.testing.assert_allclose(value, alone, rtol=1e-13)


@pytest.mark.usefixtures("float64")
def test_the_gradient_of_the_power_is_that_of_the_mean_times_the_loss():
    clients, problem, plain = fb.Clients(OWN), make(q=1.0), make(q=0.0)
    batch = batches(clients, "upper")[0]
    slope, of_mean = (
        jax.grad(lambda y, p=p: objective(p, "upper", p.x0, y, batch))(problem.y0) for p in (problem, plain)
    )
    loss = mean_loss(problem.y0, OWN[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, loss * b, rtol=1e-11), slope, of_mean)
    by_sample = weighted(problem.upper.__call__)(problem.x0, problem.y0, batch)
    assert abs(float(by_sample) - loss**2 / 2) > 1e-3, "the mean of powers is another number"


@pytest.mark.usefixtures("float64")
def test_wrapped_objectives_keep_their_say_on_weighted_samples():
    """The negative, and functions of one variable, as the structures wrap them."""
    clients = fb.Clients(OWN)
    problem, batch = make(q=2.0), batches(fb.Clients(OWN), "upper")[1]
    twisted = fb.minimax(problem.upper, problem.x0, problem.y0)
    exact = mean_loss(problem.y0, OWN[1]) ** 3 / 3
    assert float(objective(twisted, "lower", problem.x0, problem.y0, batch)) == pytest.approx(-exact)
    alone = fb.single_level(SquareOfMean(), 0.5)
    own = np.mean(OWN[1]["inputs"]) - 0.5
    assert float(objective(alone, "upper", 0.5, (), batch)) == pytest.approx(own**2)
    composed = fb.compositional(SquareOfMean(), lambda x, samples: x, 0.5, 0.5)
    assert float(objective(composed, "upper", 0.0, 0.5, batch)) == pytest.approx(own**2)
    assert clients.n == 3


class SquareOfMean:
    """`(mean inputs − z)²`."""

    def __call__(self, z, samples):
        return jnp.mean(samples["inputs"] - z) ** 2

    def on_weighted(self, z, samples, weight):
        return (weight @ jnp.mean(samples["inputs"] - z, axis=1)) ** 2


# -------------------------------------------------------------------- the clients' weights


@pytest.mark.usefixtures("float64")
def test_the_lower_objective_is_the_weighted_sum_of_the_clients_losses():
    clients, problem = fb.Clients(OWN), make()
    x = jnp.array([0.5, -1.0, 0.2])
    share = np.exp(x) / np.exp(x).sum()
    square = sum(np.sum(np.asarray(leaf) ** 2) for leaf in jax.tree.leaves(problem.y0))
    expected = sum(s * mean_loss(problem.y0, own) for s, own in zip(share, OWN, strict=True)) + 0.05 * square
    values = [objective(problem, "lower", x, problem.y0, batch) for batch in batches(clients, "lower")]
    np.testing.assert_allclose(np.mean(values), expected, rtol=1e-13)
    even = [objective(problem, "lower", problem.x0, problem.y0, batch) for batch in batches(clients, "lower")]
    losses = [mean_loss(problem.y0, own) + 0.05 * square for own in OWN]
    np.testing.assert_allclose(even, losses, rtol=1e-13)


@pytest.mark.usefixtures("float64")
def test_the_agnostic_problem_weighs_the_model_of_x_by_y():
    clients, problem = fb.Clients(OWN), make(AgnosticClients, concavity=0.3)
    y = jnp.array([0.5, -1.0, 0.2])
    share = np.exp(y) / np.exp(y).sum()
    square = sum(np.sum(np.asarray(leaf) ** 2) for leaf in jax.tree.leaves(problem.x0))
    loss = sum(s * mean_loss(problem.x0, own) for s, own in zip(share, OWN, strict=True))
    values = [objective(problem, "upper", problem.x0, y, batch) for batch in batches(clients, "upper")]
    np.testing.assert_allclose(np.mean(values), loss + 0.05 * square - 0.15 * np.sum(y**2), rtol=1e-13)
    assert problem.structure == "minimax"


# ------------------------------------------------------------------------- who gains by it


CROWD = 8


def minority():
    """Seven clients agree on the sides of two classes, which are swapped for the last.

    The second coordinate tells the classes at every client, so that one model can serve all.
    """
    draw, levels = np.random.default_rng(4), ([], [])
    for client in range(CROWD):
        for level in levels:
            labels = draw.integers(0, 2, 100)
            sign = 2.0 * labels - 1
            first = 1.5 * sign if client < CROWD - 1 else -1.5 * sign
            inputs = np.stack([first, sign], axis=1) + draw.normal(size=(100, 2))
            level.append({"inputs": inputs, "labels": labels, "client": np.full(100, client, np.int32)})
    return fb.Clients(*levels)


def solved(problem, method, steps=80):
    result = fb.solve(problem, minority(), method, steps, every=steps)
    return result, result.history[-1]["accuracy_worst"]


SMALL = {"inputs": (2,), "classes": 2, "clients": CROWD, "penalty": 0.01}


def test_fairness_lifts_the_worst_client_and_without_pressure_it_does_not():
    method = fb.FedNest(2.0, 0.5, series="cg", terms=6, lower_steps=2)
    fair, worst = solved(FairClients(Linear(2), q=5.0, **SMALL), method)
    plain, without = solved(FairClients(Linear(2), q=0.0, **SMALL), method)
    _, average = solved(FairClients(Linear(2), **SMALL), fb.FedAvg(0.5, level="lower", steps=2))
    assert np.argmax(fair.x) == CROWD - 1, "the minority weighs most"
    assert worst > average + 0.1
    assert abs(without - average) < 0.05
    assert np.max(np.abs(plain.x)) < np.max(np.abs(fair.x)) / 2


def test_the_agnostic_model_lifts_the_worst_client_too():
    method = fb.FedNest(0.5, 1.0, upper_steps=2)
    agnostic, worst = solved(AgnosticClients(Linear(2), concavity=0.1, **SMALL), method)
    _, average = solved(FairClients(Linear(2), **SMALL), fb.FedAvg(0.5, level="lower", steps=2))
    assert np.argmax(agnostic.y) == CROWD - 1
    assert worst > average + 0.1


# ------------------------------------------------------------------------------------ edges


def test_metrics_are_those_of_the_test_samples():
    for kind in (FairClients, AgnosticClients):
        problem = make(kind, test=OWN[2])
        parameters = problem.y0 if kind is FairClients else problem.x0
        logits = np.asarray(Linear(CLASSES)(parameters, jnp.asarray(OWN[2]["inputs"])))
        right = np.mean(logits.argmax(1) == OWN[2]["labels"])
        assert float(problem.metrics["test_accuracy"](problem.x0, problem.y0)) == pytest.approx(right)
        assert sorted(problem.client_metrics) == ["accuracy"]


@pytest.mark.parametrize("kind", [FairClients, AgnosticClients])
def test_it_can_be_named_and_made_again_elsewhere(kind):
    problem = make(kind)
    again, own = unpack(*pack(problem), imported), jax.tree.map(jnp.asarray, OWN[0])
    for level in ("upper", "lower"):
        first, second = (getattr(p, level)(problem.x0, problem.y0, own) for p in (problem, again))
        assert float(first) == float(second)


def test_what_does_not_fit_is_refused_with_a_reason():
    with pytest.raises(ProblemError, match=r"q is -1\.0; it must be at least 0"):
        make(q=-1.0)
    with pytest.raises(ProblemError, match=r"model gives outputs of shape \(3,\)"):
        make(classes=4)
