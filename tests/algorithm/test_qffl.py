"""q-FFL: against its formula, against FedAvg, and its cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb

CENTRES = np.array([[0.0, 1.0], [4.0, -1.0], [1.0, 2.0]])


def lower(x, y, samples):
    return jnp.mean(jnp.sum((y - samples) ** 2, axis=-1)) / 2 + 0.1


def make(**data):
    draw = np.random.default_rng(0)
    points = [centre + draw.normal(size=(size, 2)) for centre, size in zip(CENTRES, (4, 6, 9), strict=True)]
    clients = fb.Clients(points, **data)
    return fb.Problem(lower, lower, x0=jnp.zeros(3), y0=jnp.array([2.0, 2.0])), clients, points


def loss(y, points):
    return np.mean(np.sum((y - points) ** 2, axis=1)) / 2 + 0.1


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("q", [0.5, 1.0, 3.0])
def test_a_round_is_the_formula_of_the_paper(q):
    problem, clients, points = make()
    lr, steps, y = 0.2, 3, np.array([2.0, 2.0])
    deltas, curvatures = [], []
    for own in points:
        after = own.mean(0) + (1 - lr) ** steps * (y - own.mean(0))
        moved, value = (y - after) / lr, loss(y, own)
        deltas.append(value**q * moved)
        curvatures.append(q * value ** (q - 1) * np.sum(moved**2) + value**q / lr)
    expected = y - np.sum(deltas, axis=0) / np.sum(curvatures)
    found = fb.solve(problem, clients, fb.QFFL(lr, q, steps=steps), 1).y
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("options", [{}, {"cohort": 2}])
def test_without_pressure_it_is_fedavg_and_with_it_is_not(options):
    problem, clients, _ = make(batch_size=2)
    average = fb.solve(problem, clients, fb.FedAvg(0.1, level="lower", steps=4, **options), 5).y
    same, fair = (fb.solve(problem, clients, fb.QFFL(0.1, q, steps=4, **options), 5).y for q in (0.0, 2.0))
    np.testing.assert_allclose(same, average, rtol=1e-12)
    assert np.max(np.abs(fair - average)) > 0.01


@pytest.mark.usefixtures("float64")
def test_its_limit_is_the_minimiser_of_the_mean_power():
    problem, clients, points = make()
    y = jnp.asarray(fb.solve(problem, clients, fb.QFFL(0.5, 2.0), 300).y)
    slope = jax.grad(lambda y: sum(lower((), y, jnp.asarray(own)) ** 3 / 3 for own in points))(y)
    np.testing.assert_allclose(slope, 0, atol=1e-6)
    average = np.mean([own.mean(0) for own in points], axis=0)
    worst = [max(loss(point, own) for own in points) for point in (np.asarray(y), average)]
    assert worst[0] < worst[1] - 0.1, "the farthest client gains"


def test_a_step_costs_one_exchange_and_one_value_of_the_loss():
    problem, clients, points = make()
    ledger = fb.solve(problem, clients, fb.QFFL(0.1, 1.0, steps=3), 2).ledger.columns()
    assert ledger["rounds"] == 2
    assert ledger["bytes_down"] == 2 * 3 * 4 * (3 + 2)
    assert ledger["bytes_up"] == 2 * 3 * 4 * (2 + 1)
    assert ledger["calls_g_y"] == 2 * 3 * 3
    assert ledger["calls_g"] == 2 * 3
    assert ledger["samples"] == 2 * (3 + 1) * sum(len(own) for own in points)


def test_a_negative_exponent_is_refused():
    with pytest.raises(ValueError, match=r"q is -1\.0; it must be at least 0"):
        fb.QFFL(0.1, -1.0)
