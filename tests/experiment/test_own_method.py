"""Mistakes in a method of one's own: what its step returns, keeps and reports, what its programs ask for."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithm import TwoVariables
from fedbilevel.engine import StepError
from fedbilevel.fed import Program

KNOWN = fb.Quadratic.random(jr.key(0), 3, 2, 4)


class Own(TwoVariables):
    """A method whose step is one of `STEPS`."""

    case: str = eqx.field(static=True)

    def step(self, fed: Any, state: Any, key: Any) -> Any:
        return STEPS[self.case][0](fed, state)


def solved(method: TwoVariables, engine: Any = "simulator", **options: Any) -> fb.Result:
    return fb.solve(KNOWN.problem(), KNOWN.clients(), method, 2, every=1, engine=engine, **options)


class Other(NamedTuple):
    """What looks like the state, and is none."""

    x: Any
    y: Any


def kept_by_too_few(fed: Any, state: Any) -> Any:
    fed.keep(jnp.zeros((2, 4)))
    return state, {}


def asked(fed: Any, state: Any, key: Any, case: str = "is right", **how: Any) -> Any:
    clients = fed.everyone
    own = clients.run(Asks(case), clients.send(state.x, "x"), clients.send(state.y, "y"), key=key)
    return state, {"answer": clients.mean(own, "answer", **how)}


STEPS: dict[str, tuple[Any, type[Exception], str]] = {
    "is right": (lambda fed, state: (state, {"seen": jnp.sum(state.x)}), Exception, ""),
    "forgets the report": (
        lambda fed, state: state,
        StepError,
        r"Own.step must return \(state, info\), where info is a dict.*it returned Variables",
    ),
    "reports nothing": (
        lambda fed, state: (state, None),
        StepError,
        r"must return \(state, info\).*it returned \(Variables, NoneType\)",
    ),
    "returns another kind of state": (
        lambda fed, state: (Other(*state), {}),
        StepError,
        r"a state like the one it got, .*Variables.*; it returned .*Other",
    ),
    "returns x alone": (
        lambda fed, state: (state.x, {}),
        StepError,
        r"state\.x was float32\[2\] and is not there",
    ),
    "exchanges x and y": (
        lambda fed, state: (state._replace(x=state.y, y=state.x), {}),
        StepError,
        r"a state like the one it got: state\.x was float32\[2\] and is float32\[4\]",
    ),
    "changes the type": (
        lambda fed, state: (state._replace(y=state.y.astype(jnp.float16)), {}),
        StepError,
        r"state\.y was float32\[4\] and is float16\[4\]",
    ),
    "adds to the state": (
        lambda fed, state: (state._replace(y=(state.y, state.x)), {}),
        StepError,
        r"state\.y was float32\[4\] and is not there",
    ),
    "reports a vector": (
        lambda fed, state: (state, {"slope": state.y}),
        ValueError,
        r"Own reports 'slope' of shape \(4,\): it must be a number",
    ),
    "reports a column of its own name": (
        lambda fed, state: (state, {"rounds": jnp.zeros(())}),
        ValueError,
        "Own reports 'rounds', which every history has already",
    ),
    "draws with numbers": (
        lambda fed, state: asked(fed, state, jnp.zeros(2)),
        TypeError,
        r"`run` needs one random key.*got float32\[2\]",
    ),
    "draws with several keys": (
        lambda fed, state: asked(fed, state, jr.split(jr.key(0))),
        TypeError,
        r"`run` needs one random key.*got key<fry>\[2\]",
    ),
    "weighs too few": (
        lambda fed, state: asked(fed, state, jr.key(0), weight=jnp.ones(2)),
        ValueError,
        r"`mean` needs one weight for each of the 3 clients; they have shape \(2,\)",
    ),
    "keeps a row too few": (
        kept_by_too_few,
        ValueError,
        r"`keep` needs one row for each of the 3 clients; a leaf has shape \(2, 4\)",
    ),
}


@pytest.mark.parametrize("case", [case for case in STEPS if case != "is right"])
def test_a_step_that_goes_wrong_is_explained(case: str) -> None:
    _, kind, words = STEPS[case]
    with pytest.raises(kind, match=words):
        solved(Own(case))


@pytest.mark.parametrize("case", ["forgets the report", "changes the type", "keeps a row too few"])
def test_it_is_explained_by_other_engines_too(case: str, processes: fb.Process) -> None:
    _, kind, words = STEPS[case]
    with pytest.raises(kind, match=words):
        solved(Own(case), processes)


def test_a_step_that_is_right_is_let_through() -> None:
    assert solved(Own("is right")).history[-1]["seen"] == 2.0


class Alone(Own):
    def solution(self, state: Any) -> Any:
        return state.x


def test_the_solution_is_x_and_y() -> None:
    with pytest.raises(TypeError, match=r"Alone.solution must return \(x, y\); it returned one"):
        solved(Alone("is right"))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"seed": 1.5}, "seed is 1.5; it must be a whole"), ({"best": "error"}, "best is 'error'")],
)
def test_options_of_another_kind(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        solved(Own("is right"), **options)


# ------------------------------------------------------------------------- programs


class Asks(Program):
    """A program that is one of `PROGRAMS`."""

    case: str = eqx.field(static=True)

    def __call__(self, me: Any, *values: Any) -> Any:
        return PROGRAMS[self.case][0](me, *values)


class Asking(TwoVariables):
    """A method that asks all clients, and reports the mean of their answers."""

    case: str = eqx.field(static=True)

    def step(self, fed: Any, state: Any, key: Any) -> Any:
        return asked(fed, state, key, case=self.case)


def changes(me: Any, x: Any, y: Any) -> Any:
    """Three values of g, for the price of one of g and one of its slope."""
    batch = me.batch("lower", me.key)
    me.count(batch, "g_x", "g")
    return jnp.sum(jax.vmap(lambda scale: me.value("lower", scale * x, y, batch))(jnp.arange(3.0)))


PROGRAMS: dict[str, tuple[Any, type[Exception], str]] = {
    "is right": (changes, Exception, ""),
    "samples in the place of a batch": (
        lambda me, x, y: me.count(me.batch("lower", me.key).samples, "g"),
        TypeError,
        "called with dict in the place of a batch; it needs the `Batch`",
    ),
    "a level that is none": (
        lambda me, x, y: me.g(x, y, me.batch("lowr", me.key)),
        ValueError,
        "no level 'lowr'; there are lower, upper, test, validation",
    ),
    "an oracle that is none": (
        lambda me, x, y: me.count(me.batch("lower", me.key), "g_z"),
        ValueError,
        "no kind of oracle call 'g_z'; there are f, f_x",
    ),
}


@pytest.mark.parametrize("case", [case for case in PROGRAMS if case != "is right"])
def test_a_program_that_goes_wrong_is_explained(case: str) -> None:
    _, kind, words = PROGRAMS[case]
    with pytest.raises(kind, match=words):
        solved(Asking(case))


def test_an_oracle_of_ones_own_is_counted_as_it_says() -> None:
    result = solved(Asking("is right"))
    assert (result.ledger.calls, result.ledger.samples) == ({"g_x": 6, "g": 6}, 6)
    assert np.isfinite(result.history[-1]["answer"])
