"""What is solved: `min_x mean_i f_i(x, y*(x))` with `y*(x) = argmin_y mean_i g_i(x, y)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.data.batches import Batch, Samples, weighted
from fedbilevel.data.clients import LEVELS, Clients
from fedbilevel.number import whole
from fedbilevel.problem.constraint import Anywhere
from fedbilevel.problem.objective import HalfDistance, Negative, Nothing, Objective, OfLower, OfUpper, is_mean
from fedbilevel.tree import PyTree

Structure: TypeAlias = Literal["bilevel", "minimax", "compositional", "single_level"]
Metrics: TypeAlias = Mapping[str, Callable[[PyTree, PyTree], Any]]
ClientMetrics: TypeAlias = Mapping[str, Objective]


_FEW = 8
"""How many samples tell a mean from a sum."""


class ProblemError(ValueError):
    """The problem's functions do not fit its variables or data."""


class Problem(eqx.Module):
    """A bilevel problem over clients' data.

    Args:
        upper: `f(x, y, samples) -> scalar`, the mean over the samples of the upper-level data.
        lower: `g(x, y, samples) -> scalar`, likewise over the lower-level data.
        x0, y0: where x and y start; any pytrees of arrays.
        metrics: name -> function of `(x, y)`, evaluated on the server for the history.
        constraint: projection of x onto a convex set (`Simplex`, `Box`, `Positive` or a function).
        structure: what is known of the problem; set by `minimax`, `compositional`, `single_level`.
        client_metrics: name -> function of `(x, y, samples)`, the mean over the samples, evaluated at every
            client on its own test data; the history has their mean, worst and 10 % percentile.
        block: how many samples a client looks at at once: gradients and products on larger batches are summed
            over blocks of them. That bounds memory, and where a sample needs much, as in a convolution, it
            is faster too: 8 images of a batch fit into a processor's cache, 32 do not. With the simulator,
            `chunk=1` belongs to it. An objective that says that it is no mean over samples is not
            divided; one with statistics of the batch must not be. None: all of a batch.
        classes: how many there are, where samples have a column `labels`: other labels, of which a
            cross-entropy would take no notice, are then refused.

    Where clients differ in size, a batch is padded, and an objective is evaluated sample by sample and summed
    with weights. One that is not a mean over samples, such as a power of a mean, needs a method
    `on_weighted(x, y, samples, weight)`: its value on samples that weigh `weight`, `(samples,)`, summing to
    one, some of them zero. On a minibatch such an objective is a biased estimate. An objective that sees x
    through features of the samples may say so (`Separable`): local steps on y then compute them once.

    Example:
        >>> import jax.numpy as jnp
        >>> def loss(x, y, samples):
        ...     return jnp.mean((samples - y) ** 2)
        >>> def penalised(x, y, samples):
        ...     return loss(x, y, samples) + jnp.exp(x) * y**2
        >>> problem = Problem(upper=loss, lower=penalised, x0=0.0, y0=0.0)
        >>> problem.structure
        'bilevel'
    """

    upper: Objective
    lower: Objective
    x0: PyTree
    y0: PyTree
    metrics: Metrics
    constraint: Callable[[PyTree], PyTree]
    structure: Structure = eqx.field(static=True)
    client_metrics: ClientMetrics
    block: int | None = eqx.field(static=True)
    classes: int | None = eqx.field(static=True)

    def __init__(
        self,
        upper: Objective,
        lower: Objective,
        x0: PyTree,
        y0: PyTree,
        metrics: Metrics | None = None,
        constraint: Callable[[PyTree], PyTree] | None = None,
        structure: Structure = "bilevel",
        client_metrics: ClientMetrics | None = None,
        block: int | None = None,
        classes: int | None = None,
    ) -> None:
        for name, function in (("upper", upper), ("lower", lower)):
            if not callable(function):
                raise ProblemError(f"{name} is {function!r}; it must be a function of (x, y, samples)")
        self.upper, self.lower = upper, lower
        self.x0, self.y0 = jax.tree.map(_float_array, (x0, y0))
        if structure not in get_args(Structure):
            raise ProblemError(f"structure is {structure!r}; it must be one of {get_args(Structure)}")
        self.metrics = dict(metrics or {})
        self.constraint = Anywhere() if constraint is None else constraint
        self.structure = structure
        self.client_metrics = dict(client_metrics or {})
        self.block = _count_or_none("block", block, "samples, or None for all of a batch")
        self.classes = _count_or_none("classes", classes, "classes, or None if there are none")

    def block_of(self, level: str) -> int | None:
        """How many samples an oracle of f (`"upper"`) or g (`"lower"`) looks at at once; None: all."""
        return self.block if is_mean(getattr(self, level)) else None

    def at(self, x: PyTree, y: PyTree) -> Problem:
        """The same problem, started elsewhere."""
        return dataclasses.replace(self, x0=x, y0=y)

    def check(self, clients: Clients) -> None:
        """Raise an error that explains if f or g gives no scalar on these data, or a label is no class."""
        self.check_labels(clients)
        self._check_objective("upper objective", self.upper, clients.upper)
        self._check_objective("lower objective", self.lower, clients.lower)
        for name, metric in self.client_metrics.items():
            self._check_objective(f"client metric {name!r}", metric, clients.test)

    def check_labels(self, clients: Clients) -> None:
        """Raise an error that explains if a label is none of the `classes`, where these are known."""
        for level in LEVELS:
            samples = getattr(clients, level)
            if self.classes is not None and isinstance(samples.flat, Mapping) and "labels" in samples.flat:
                labels = np.asarray(samples.flat["labels"])
                # A table may hold rows that are nobody's, or of another level.
                check_labels(labels if samples.rows is None else labels[samples.rows], self.classes, level)

    def no_means(self, clients: Clients) -> tuple[str, ...]:
        """Which of f ("upper") and g ("lower") change where all samples come twice: mostly sums."""
        levels = {"upper": (self.upper, clients.upper), "lower": (self.lower, clients.lower)}
        return tuple(
            level
            for level, (function, samples) in levels.items()
            if is_mean(function) and self._depends_on_count(function, samples)
        )

    def _depends_on_count(self, function: Objective, samples: Samples) -> bool:
        # A few samples: a problem with blocks may have no room for more.
        once = jax.tree.map(lambda leaf: leaf[:_FEW], samples.batch(0, jax.random.key(0)).samples)
        twice = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), once)
        value, again = (function(self.x0, self.y0, rows) for rows in (once, twice))
        return not bool(jnp.allclose(value, again, rtol=1e-3, equal_nan=True))

    def _check_objective(self, what: str, function: Objective, samples: Samples) -> None:
        batch = samples.batch(0, jax.random.key(0)).samples
        try:
            value = jax.eval_shape(function, self.x0, self.y0, batch)
        except Exception as error:  # whatever the user's function raises
            shapes = ", ".join(
                f"{name} {jax.tree.map(jnp.shape, tree)}"
                for name, tree in (("x", self.x0), ("y", self.y0), ("samples", batch))
            )
            raise ProblemError(
                f"the {what} failed on a batch of its data: {type(error).__name__}: "
                f"{error}\nIt was called with (x, y, samples) of the shapes {shapes}. Check that x0, "
                "y0 and the data have the structure that it expects."
            ) from error
        if getattr(value, "shape", None) != () or not jnp.issubdtype(value.dtype, jnp.floating):
            raise ProblemError(
                f"the {what} must return one real number, the mean over the samples; "
                f"it returned {value}. Did you forget `jnp.mean`?"
            )


def check_labels(labels: Any, classes: int, level: str) -> None:
    """Raise an error that explains unless labels are class numbers: any other has no logit, and loss zero."""
    labels, needed = np.asarray(labels), f"whole numbers 0..{classes - 1}, one a sample"
    if labels.ndim != 1 or not np.issubdtype(np.result_type(labels), np.number):
        raise ProblemError(f"the {level} labels have the shape {labels.shape}; they must be {needed}")
    if not np.all((labels >= 0) & (labels < classes) & (labels == np.floor(labels))):
        found = f"{labels.min()}..{labels.max()}"
        raise ProblemError(f"the {level} labels are {found}; with {classes} classes they must be {needed}")


def minimax(f: Objective, x0: PyTree, y0: PyTree, **options: Any) -> Problem:
    """`min_x max_y mean_i f_i(x, y)`: bilevel with `g = −f`, whose hypergradient is `∇_x f` alone."""
    return Problem(f, Negative(f), x0, y0, structure="minimax", **options)


def compositional(
    f: Callable[[PyTree, PyTree], jax.Array],
    r: Callable[[PyTree, PyTree], PyTree],
    x0: PyTree,
    y0: PyTree,
    **options: Any,
) -> Problem:
    """`min_x mean_i f_i(mean_j r_j(x))`: bilevel with `g_i = ½‖y − r_i(x)‖²`.

    Args:
        f: `f(y, samples) -> scalar`, over upper-level data.
        r: `r(x, samples) -> tree like y`, the mean over lower-level samples.
        x0, y0: where x and y start.
        **options: as for `Problem`.
    """
    return Problem(OfLower(f), HalfDistance(r), x0, y0, structure="compositional", **options)


def single_level(f: Callable[[PyTree, PyTree], jax.Array], x0: PyTree, **options: Any) -> Problem:
    """`min_x mean_i f_i(x)`, with `f(x, samples) -> scalar`; y is the empty tree `()`."""
    return Problem(OfUpper(f), Nothing(), x0, (), structure="single_level", **options)


def objective(problem: Problem, level: str, x: PyTree, y: PyTree, batch: Batch) -> jax.Array:
    """The value of f (`level="upper"`) or g (`"lower"`) on a batch; not counted."""
    function = problem.upper if level == "upper" else problem.lower
    return weighted(function)(x, y, batch)


def _count_or_none(name: str, value: Any, what: str) -> int | None:
    count = whole(value)
    if count is not None and (type(count) is not int or count < 1):
        raise ProblemError(f"{name} is {value!r}; it must be a number of {what}")
    return count


def _float_array(leaf: Any) -> jax.Array:
    """A real array of a fixed type: a weak one would turn into another after the first step."""
    try:
        dtype = jnp.result_type(leaf)
        return jnp.asarray(leaf, dtype if jnp.issubdtype(dtype, jnp.inexact) else float)
    except (TypeError, ValueError):
        raise ProblemError(
            f"x0 and y0 must be pytrees of numbers; one leaf is {leaf!r}. Separate the arrays of a model "
            "from its functions first, for example with `equinox.partition(model, equinox.is_inexact_array)`."
        ) from None
