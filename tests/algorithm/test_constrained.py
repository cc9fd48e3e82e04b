"""Where x is confined: every point is in its set, and exact methods come to the best one there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb

pytestmark = pytest.mark.usefixtures("float64")

LOW, HIGH = -0.2, 0.1
THREE = (0.05, 0.1, 0.1)
EXACT = {
    "SimFBO": lambda: fb.SimFBO(*THREE),
    "ShroFBO": lambda: fb.ShroFBO(*THREE),
    "FedMSA": lambda: fb.FedMSA(*THREE, renew=0.5),
    "FedNest": lambda: fb.FedNest(0.1, 0.2, lower_rounds=5, terms=4, series="cg"),
}
OTHERS = {
    "F2SA": lambda: fb.F2SA(0.02, 0.1, 10.0, sync_every=3),
    "AggITD": lambda: fb.AggITD(0.1, 0.2, 0.2, upper_steps=2, lower_rounds=3),
    "FedMBO": lambda: fb.FedMBO(0.1, 0.2, upper_steps=2, terms=3, smoothness=4.0),
    "FedMSA, local steps": lambda: fb.FedMSA(*THREE, sync_every=3),
    "SimFBO, local steps": lambda: fb.SimFBO(*THREE, sync_every=3, local_lr=0.5),
}


def confined():
    """A quadratic whose solution is outside of the box, and the best point inside, by projected descent."""
    known = fb.Quadratic.random(jax.random.key(0), 3, 3, 4)
    x = np.zeros(3)
    for _ in range(400):
        x = np.clip(x - 0.1 * np.asarray(known.hypergradient(jnp.asarray(x))), LOW, HIGH)
    return known, x


def solved(known, algorithm, steps):
    problem = known.problem(constraint=fb.Box(LOW, HIGH))
    return np.asarray(fb.solve(problem, known.clients(), algorithm, steps, every=steps).x)


@pytest.mark.parametrize("name", EXACT)
def test_exact_methods_come_to_the_best_point_of_the_set(name):
    known, best = confined()
    assert np.max(np.abs(best - np.asarray(known.solution()))) > 0.1, "the set must matter"
    np.testing.assert_allclose(solved(known, EXACT[name](), 1500), best, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", OTHERS)
def test_no_method_leaves_the_set(name):
    x = solved(confined()[0], OTHERS[name](), 25)
    assert np.all((x >= LOW) & (x <= HIGH))
    assert np.any((x == LOW) | (x == HIGH)), "the set must matter"
