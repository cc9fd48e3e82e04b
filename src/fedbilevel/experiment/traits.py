"""What a method asks of a federation, found by watching one step of it on a small problem."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import typing
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from fedbilevel.algorithm.base import Algorithm
from fedbilevel.data.clients import Clients
from fedbilevel.engine.simulated_cohort import SimulatedCohort
from fedbilevel.engine.simulator import SimulatedFederation
from fedbilevel.experiment.registry import Factory, parameters
from fedbilevel.fed.codec import Codec
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.ledger import ORACLES, metering
from fedbilevel.fed.links import Complete
from fedbilevel.fed.place import At, map_kept
from fedbilevel.local.decode import GradientDecoder
from fedbilevel.local.optimizer import SGD
from fedbilevel.problem.accuracy import CrossEntropy
from fedbilevel.problem.base import Problem, single_level
from fedbilevel.problem.cnn4 import FourLayerCNN
from fedbilevel.problem.loss_tuning import OfModel
from fedbilevel.problem.model import Linear
from fedbilevel.problem.personal import Mixture
from fedbilevel.problem.quadratic import Quadratic
from fedbilevel.problem.structured import Saddle
from fedbilevel.tree import PyTree


@dataclasses.dataclass(frozen=True)
class Traits:
    """What a method needs.

    Attributes:
        oracles: the kinds of oracle call that clients answer.
        keeps_state: clients keep something between rounds.
        reads_individuals: the server sees single clients' values, not only means of them.
        second_derivatives: products with second derivatives of g are taken.
        strongly_convex: it inverts the Hessian of g in y, or puts a penalty on g, so g must be strongly
            convex in y (or damped).
    """

    oracles: tuple[str, ...]
    keeps_state: bool
    reads_individuals: bool
    second_derivatives: bool
    strongly_convex: bool

    def __str__(self) -> str:
        def answer(is_so: bool) -> str:
            return "yes" if is_so else "no"

        return "\n".join(
            (
                f"state kept at clients           {answer(self.keeps_state)}",
                f"single clients' values read     {answer(self.reads_individuals)}",
                f"second derivatives of g         {answer(self.second_derivatives)}",
                f"g strongly convex in y          {answer(self.strongly_convex)}",
                f"oracles                         {', '.join(self.oracles)}",
            )
        )


def traits(factory: Factory) -> Traits:
    """The traits of a method with its default settings, what it measures before the first step included."""
    method = _example(factory)
    for problem, clients in _small_problems():
        try:
            found = _watch(method, problem, clients)
            individuals = found.reads_individuals or _measures_each(factory, method)
            return dataclasses.replace(found, reads_individuals=individuals)
        except Exception:  # a method for problems of another structure, or for none of these
            continue
    raise ValueError(f"{method} could not be run on any of the small problems that it was tried on")


def _measures_each(factory: Factory, method: Any) -> bool:
    """Whether every client says how smooth its own g is (`OwnCurvatureProbe`), unless a number is given."""
    smoothness = parameters(factory).get("smoothness")
    measured = smoothness is not None and smoothness.default == "auto"
    return measured and method.inverts_own_hessians


def _example(factory: Factory) -> Algorithm[Any]:
    """A method with something simple for every setting that has no default: 0.1 for a number."""
    settings = parameters(factory)
    needed = [name for name, p in settings.items() if p.default is inspect.Parameter.empty]
    # What may be left out only where something else is said in its place.
    either = [
        name
        for name in ("smoothness", "terms")
        if name in settings and settings[name].default in (None, "auto")
    ]
    return factory(**{name: _SIMPLE.get(name, 0.1) for name in (*needed, *either)})


_IMAGE = (12, 12, 1)
"""What the small model that can be sliced sees."""

_SIMPLE: dict[str, Any] = {
    "links": Complete(),
    "upper": SGD(0.1),
    "learn": SGD(0.1),
    "distil": SGD(0.1),
    "public": np.ones((2, *_IMAGE), np.float32),
    "decoder": GradientDecoder(0.1, 2, 2),
    "smoothness": 4.0,
    **dict.fromkeys(("lower_steps", "learn_steps", "terms", "rows", "columns", "k"), 2),
}


def _small_problems() -> Iterator[tuple[Problem, Any]]:
    """One of every structure; each is made only if the method did not run on those before it."""
    quadratic = Quadratic.random(jr.key(0), 2, 2, 2)
    yield quadratic.problem(), quadratic.clients()
    saddle = Saddle.random(jr.key(0), 2, 2)
    yield saddle.problem(), saddle.clients()
    yield single_level(_square, jnp.ones(2)), quadratic.clients()
    labels = jnp.zeros((2, 1), int)
    yield (
        Mixture(Linear(2), inputs=(2,), classes=2),
        Clients({"inputs": jnp.ones((2, 1, 2)), "labels": labels}),
    )
    yield _sliced(), Clients({"inputs": jnp.ones((2, 1, *_IMAGE)), "labels": labels})


def _sliced() -> Problem:
    """A model of which clients can hold parts: enough kernels that a part is smaller than the whole."""
    model = FourLayerCNN(2, filters=64, pooled=2)
    loss = CrossEntropy(OfModel(model))
    return Problem(loss, loss, (), model.init(jr.key(0), _IMAGE)[0])


def _square(x: Any, samples: Any) -> Any:
    return jnp.sum(x**2)


def _watch(method: Algorithm[Any], problem: Problem, clients: Any) -> Traits:
    """Trace one step; nothing is computed."""
    seen: set[str] = set()
    fed = _WatchedFederation(problem, clients, seen=seen)

    def walk(key: jax.Array) -> Any:
        with metering() as meter:
            state = method.init(fed, key)
            out = method.step(fed, state, key)
        map_kept(lambda kept: seen.add("kept"), state)
        seen.update(entry.label for entry in meter.counts if entry.kind == "call")
        return jax.tree.leaves(out)

    jax.eval_shape(walk, jr.key(0))
    oracles = tuple(kind for kind in ORACLES if kind in seen)
    second = bool({"g_yy", "g_xy"} & seen)
    # Who differentiates g in x wants it at the minimiser of g in y, which must be one point.
    convex = bool({"g_yy", "g_x"} & seen)
    return Traits(oracles, "kept" in seen, "gathered" in seen, second, convex)


class _WatchedCohort(SimulatedCohort):
    """Notes whether the server reads single values."""

    def gather(
        self, value: At, label: str, *, codec: Codec | None = None, key: jax.Array | None = None
    ) -> tuple[PyTree, jax.Array]:
        self.fed.seen.add("gathered")  # type: ignore[attr-defined]
        return super().gather(value, label, codec=codec, key=key)


class _WatchedFederation(SimulatedFederation):
    """A simulated federation that notes what is done in it."""

    seen: set[str] = eqx.field(static=True, kw_only=True)

    def _cohort(self, ids: jax.Array, token: str, weights: Any) -> Cohort:
        return _WatchedCohort(self, ids, token, weights)


def documented(factory: Factory) -> tuple[str, dict[str, str]]:
    """A docstring without its arguments, and what it says of each argument.

    A function that makes a class with some settings decided speaks of these only; what the class says of
    the others is added.

    Example:
        >>> from fedbilevel.algorithm import FedAvg
        >>> documented(FedAvg)[1]["cohort"]
        'clients in a round; None: all.'
    """
    text, fields = _sections(inspect.getdoc(factory) or "")
    made = None if inspect.isclass(factory) else typing.get_type_hints(factory).get("return")
    inherited = _sections(inspect.getdoc(made) or "")[1] if inspect.isclass(made) else {}
    return text, {**inherited, **fields}


def _sections(text: str) -> tuple[str, dict[str, str]]:
    """All but the arguments, and the arguments one by one."""
    before, _, rest = f"{text}\n".partition("\nArgs:\n")
    inside = list(itertools.takewhile(lambda line: not line.strip() or line[0] == " ", rest.splitlines()))
    after = "\n".join(rest.splitlines()[len(inside) :])
    depth = len(inside[0]) - len(inside[0].lstrip()) if inside else 0
    entry = rf"^ {{{depth}}}(\w[\w, *]*): ?(.*(?:\n {{{depth + 1},}}.*)*)"
    entries = re.findall(entry, "\n".join(inside), re.MULTILINE)
    fields = {
        name.strip(" *"): " ".join(said.split()) for names, said in entries for name in names.split(",")
    }
    return f"{before.rstrip()}\n\n{after.strip()}".strip(), fields
