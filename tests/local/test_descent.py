"""Local descent: features of a fixed x are computed once, and nothing else changes."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.fed.ledger import metering
from fedbilevel.local.descent import Descent
from fedbilevel.local.work import Work

pytestmark = pytest.mark.usefixtures("float64")
CLIENTS, SAMPLES, INPUTS = 3, 7, 5


class Plain(eqx.Module):
    """An objective that does not say what it sees of x."""

    loss: Any

    def __call__(self, x: Any, y: Any, samples: Any) -> jax.Array:
        return self.loss(x, y, samples)


def clients() -> fb.Clients:
    draws = np.random.default_rng(0)
    inputs = draws.normal(size=(CLIENTS, SAMPLES, INPUTS))
    return fb.Clients({"inputs": inputs, "labels": draws.integers(3, size=inputs.shape[:2])}, batch_size=4)


def problem() -> fb.Problem:
    backbone = fb.MLP((4,), output_activation="tanh")
    made = fb.HyperRepresentation(backbone, fb.Linear(3), inputs=(INPUTS,), classes=3, penalty=0.1)
    return made.at(*jax.tree.map(lambda leaf: leaf.astype(float), (made.x0, made.y0)))


def descended(problem: fb.Problem, work: Work, anchored: bool) -> tuple[Any, Any]:
    """The mean of the clients' last iterates, and the bill."""
    fed = fb.Simulator().federation(problem, clients())

    @jax.jit
    def run(x: Any, y: Any) -> Any:
        with metering() as meter:
            everyone = fed.everyone
            there = [everyone.send(x, "x"), everyone.send(y, "y")]
            there += [everyone.send(y if work.level == "lower" else x, "q")] if anchored else []
            found = everyone.mean(everyone.run(Descent(0.3, work), *there, key=jr.key(1)), "z")
        return found, {str(entry): jnp.asarray(times) for entry, times in meter.counts.items()}

    return run(problem.x0, problem.y0)


@pytest.mark.parametrize("anchored", [False, True])
def test_features_once_give_the_same_iterates_and_the_same_bill(anchored: bool) -> None:
    separable = problem()
    plain = eqx.tree_at(lambda problem: problem.lower, separable, Plain(separable.lower))
    work = Work("lower", epochs=2)
    found, expected = descended(separable, work, anchored), descended(plain, work, anchored)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), found, expected)


def test_features_are_computed_for_all_samples_of_a_client_and_not_for_every_batch() -> None:
    seen: list[int] = []

    class Watched(type(problem().lower)):  # type: ignore[misc]
        def features(self, x: Any, samples: Any) -> Any:
            seen.append(samples["inputs"].shape[0])
            return super().features(x, samples)

    lower = problem().lower
    watched = Watched(lower.representation, lower.penalty)
    descended(eqx.tree_at(lambda problem: problem.lower, problem(), watched), Work("lower", epochs=2), True)
    assert set(seen) == {SAMPLES}
    seen.clear()
    descended(eqx.tree_at(lambda problem: problem.lower, problem(), watched), Work("lower", steps=1), False)
    assert set(seen) == {4}, "one step does not read them all"


@pytest.mark.parametrize("level", ["lower", "upper"])
def test_a_single_anchored_step_goes_along_the_anchor_and_is_billed_as_any_other(level: str) -> None:
    made = problem()
    found, bill = descended(made, Work(level), True)
    start = made.y0 if level == "lower" else made.x0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 0.7 * b, atol=1e-14), found, start)
    twice = descended(made, Work(level, steps=2), True)
    assert any(np.any(np.abs(a - 0.49 * b) > 1e-6) for a, b in _pairs(twice[0], start)), (
        "the next one does not"
    )
    kind = "g_y" if level == "lower" else "f_x"
    calls = [int(times) for entry, times in bill.items() if f"'{kind}'" in entry]
    assert calls == [2 * CLIENTS]


def _pairs(a: Any, b: Any) -> Any:
    return zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
