"""Optimisers of clients: those of optax, by name; what travels and what does not."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import fedbilevel as fb
from fedbilevel.local.optimizer import Optimizer, PerBlock, Raw, optimizer
from fedbilevel.portable import PortableError, imported, pack, unpack

pytestmark = pytest.mark.usefixtures("float64")

START = {"a": np.array([1.0, -2.0]), "b": np.array(3.0)}


def gradient(point: Any, time: int) -> Any:
    return jax.tree.map(lambda leaf: jnp.sin(leaf) + time, point)


def followed(rule: Optimizer, steps: int = 4) -> Any:
    """Where some steps lead."""
    point, memory = START, rule.init(START)
    for time in range(steps):
        point, memory = rule.step(point, gradient(point, time), memory)
    return point


def followed_by_optax(rule: Any, penalty: float = 0.0, steps: int = 4) -> Any:
    point, memory = START, rule.init(START)
    for time in range(steps):
        slope = jax.tree.map(lambda g, p: g + penalty * p, gradient(point, time), point)
        updates, memory = rule.update(slope, memory, point)
        point = optax.apply_updates(point, updates)
    return point


def close(a: Any, b: Any) -> None:
    jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=1e-12), a, b)


@pytest.mark.parametrize(
    ("ours", "theirs", "penalty"),
    [
        (fb.SGD(0.1), optax.sgd(0.1), 0.0),
        (fb.SGD(0.1, momentum=0.8), optax.sgd(0.1, momentum=0.8), 0.0),
        (fb.SGD(0.1, penalty=0.3), optax.sgd(0.1), 0.3),
        (fb.Adam(0.1), optax.adam(0.1), 0.0),
        (fb.Adam(0.1, b1=0.5, b2=0.9, eps=1e-3, penalty=0.3), optax.adam(0.1, 0.5, 0.9, 1e-3), 0.3),
        (optimizer(optax.rmsprop(0.1)), optax.rmsprop(0.1), 0.0),
    ],
    ids=["SGD", "momentum", "penalty", "Adam", "Adam's settings", "optax"],
)
def test_steps_are_those_of_optax(ours: Optimizer, theirs: Any, penalty: float) -> None:
    close(followed(ours), followed_by_optax(theirs, penalty))


def test_the_penalty_is_the_gradient_of_a_square() -> None:
    point, _ = fb.SGD(0.1, penalty=0.5).step(START, jax.tree.map(jnp.zeros_like, START), ())
    close(point, jax.tree.map(lambda leaf: leaf * (1 - 0.1 * 0.5), START))


def test_blocks_follow_rules_of_their_own() -> None:
    found = followed(optimizer({"a": fb.Adam(0.1), "b": optax.sgd(0.2)}))
    close(found["a"], followed_by_optax(optax.adam(0.1))["a"])
    close(found["b"], followed_by_optax(optax.sgd(0.2))["b"])


def test_memory_is_plain_arrays() -> None:
    for rule in (fb.Adam(0.1), PerBlock({"a": fb.Adam(0.1), "b": fb.SGD(0.1)}), fb.SGD(0.1)):
        memory = rule.init(START)
        assert isinstance(memory, tuple)
        assert all(isinstance(leaf, jax.Array) for leaf in memory)
    assert fb.SGD(0.1).init(START) == ()


def test_other_numbers_are_leaves_and_compile_nothing_new() -> None:
    traced = []

    @jax.jit
    def step(rule: Optimizer, memory: Any) -> Any:
        traced.append(1)
        return rule.step(START, gradient(START, 1), memory)

    for lr, penalty in ((0.1, 0.0), (0.5, 0.2)):
        rule = fb.Adam(lr, penalty=penalty)
        close(step(rule, rule.init(START))[0], rule.step(START, gradient(START, 1), rule.init(START))[0])
    assert len(traced) == 1


def test_named_optimisers_travel_and_transformations_of_optax_do_not() -> None:
    rule = PerBlock({"a": fb.Adam(0.1), "b": fb.SGD(0.2, momentum=0.5)})
    close(followed(unpack(*pack(rule), imported)), followed(rule))
    with pytest.raises(PortableError, match=r"closure.*use fedbilevel\.Adam\(\.\.\.\)"):
        pack(Raw(optax.adam(0.1)))


@pytest.mark.parametrize(("given", "error"), [(0.1, TypeError), ("adam", TypeError)])
def test_what_is_no_optimiser_is_refused(given: Any, error: Any) -> None:
    with pytest.raises(error, match=r"an optimiser is .*; give one such as fedbilevel\.Adam\(0\.1\)"):
        optimizer(given)


@pytest.mark.parametrize(
    ("point", "found"), [({"a": np.ones(1)}, r"the blocks \['a'\]"), (np.ones(2), "no blocks")]
)
def test_blocks_must_be_those_of_the_variable(point: Any, found: str) -> None:
    with pytest.raises(
        ValueError, match=rf"optimisers for the blocks \['a', 'b'\], but the variable has {found}"
    ):
        PerBlock({"a": fb.SGD(0.1), "b": fb.SGD(0.1)}).init(point)


# ------------------------------------------------------------------------------ in a run


def quadratic() -> fb.Quadratic:
    return fb.Quadratic.random(jr.key(0), 3, 2, 3)


def pdbo(upper: Any) -> fb.PDBO:
    return fb.PDBO(fb.links.Ring(), 0.1, 2, upper, 2, alpha=None, beta=None)


def test_a_transformation_of_optax_runs_in_the_simulator() -> None:
    """The first step of Adam is as long as its step size, in every coordinate."""
    q = quadratic()
    x = fb.solve(q.problem(metrics={}), q.clients(), pdbo(optax.adam(0.1)), 1).x
    np.testing.assert_allclose(np.abs(x - 1), 0.1, rtol=1e-5)


def stops(step: Any) -> Any:
    """A schedule: a tenth at first, nothing from the second step on."""
    return jnp.where(step < 1, 0.1, 0.0)


def test_a_schedule_counts_the_steps_of_the_algorithm() -> None:
    """Negative control: with a constant step size the second and third step move x."""
    q = quadratic()
    for rule, moves in ((fb.SGD(stops), False), (fb.SGD(0.1), True)):
        seen: list[Any] = []
        fb.solve(q.problem(metrics={}), q.clients(), pdbo(rule), 2, every=1, callback=seen.append)
        assert not np.array_equal(seen[0].x, seen[1].x)
        assert np.array_equal(seen[1].x, seen[2].x) != moves


def test_in_clients_processes_the_error_says_what_to_use() -> None:
    q = quadratic()
    with pytest.raises(PortableError, match=r"closure.*use fedbilevel\.Adam\(\.\.\.\)"):
        fb.solve(q.problem(metrics={}), q.clients(), pdbo(optax.adam(0.1)), 1, engine=fb.Process())


def test_default_optimisers_say_what_they_are() -> None:
    pdbo = fb.PDBO(fb.links.Ring(), 0.1, 2, terms=2)
    assert repr(pdbo.upper) == "adam(learning_rate=0.1, b1=0.9, b2=0.999, eps=1e-08, penalty=0.0)"
    assert repr(fb.FedSep(fb.LinearSketch(2)).learn) == "sgd(learning_rate=0.1, penalty=0.0)"
