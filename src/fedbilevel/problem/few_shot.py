"""Few-shot learning: a backbone for all tasks, with a head of its own for each.

min_x  mean_i CE(head(y_i*(x), backbone(x, ·)); queries of task i)
y_i*(x) = argmin_y CE(head(y, backbone(x, ·)); support set of task i) + (penalty/2)‖y‖²

Every client is a task, and the lower level is local: the labels of a task are numbers that mean nothing to
another one, so a head for all tasks can learn nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpy.typing as npt

from fedbilevel.data.clients import Clients
from fedbilevel.data.dataset import Dataset, Table
from fedbilevel.data.error import DataError
from fedbilevel.data.source import load
from fedbilevel.number import check_count
from fedbilevel.problem.accuracy import Accuracy, CrossEntropy
from fedbilevel.problem.base import Problem, ProblemError
from fedbilevel.problem.loss_tuning import OfModel
from fedbilevel.problem.model import Linear, Model
from fedbilevel.problem.representation import Representation
from fedbilevel.tree import PyTree, step, zeros_like

Labels: TypeAlias = npt.NDArray[np.integer[Any]]


class Size(NamedTuple):
    """The size of a task: how many classes, and of each how many support and how many query samples."""

    ways: int
    shots: int
    queries: int


class Tasks(NamedTuple):
    """Samples of several tasks, as columns `inputs` and `labels` of shape `(tasks, samples, ...)`.

    Attributes:
        support: what a head learns from.
        queries: what it is judged by.
    """

    support: dict[str, Any]
    queries: dict[str, Any]


class AdaptedAccuracy(eqx.Module):
    """How good heads are that learn new tasks on the features of x: a metric that does not look at y.

    For every task a head starts at `start`, makes gradient steps on the support set, with the penalty of the
    lower level, and is judged by the queries; the value is the mean accuracy of the tasks.

    Attributes:
        backbone, head: the models.
        start: the head's parameters before the first step.
        tasks: with arrays of shape `(tasks, samples, ...)`.
        penalty: of the head's parameters.
        lr, steps: of the adaptation.
    """

    backbone: Model
    head: Model
    start: PyTree
    tasks: Tasks
    penalty: Any
    lr: Any
    steps: int = eqx.field(static=True)

    def __call__(self, x: PyTree, y: PyTree) -> jax.Array:
        # One task after another: the features of all samples of all tasks at once would need much memory.
        return jnp.mean(jax.lax.map(lambda task: self._of_task(x, task), self.tasks))

    def _of_task(self, x: PyTree, task: Tasks) -> jax.Array:
        # The backbone stays as it is, so that its features need to be computed only once.
        support, queries = (part | {"inputs": self.backbone(x, part["inputs"])} for part in task)
        slope = jax.grad(CrossEntropy(OfModel(self.head), self.penalty), argnums=1)

        def descend(_: Any, y: PyTree) -> PyTree:
            return step(y, self.lr, slope((), y, support))

        y = jax.lax.fori_loop(0, self.steps, descend, self.start)
        return Accuracy(OfModel(self.head))((), y, queries)


def FewShot(
    backbone: Model,
    *,
    clients: int,
    source: str = "omniglot",
    dir: str | None = None,
    ways: int = 5,
    shots: int = 5,
    queries: int = 15,
    test_tasks: int = 100,
    adapt_steps: int = 50,
    adapt_lr: float = 0.1,
    penalty: float = 0.01,
    held_out: float = 0.4,
    batch_size: int | None = None,
    seed: int = 0,
    data_seed: int = 0,
) -> tuple[Problem, Clients]:
    """Learn a backbone x with which a linear head y_i can learn a new task from a few samples.

    A client is a task: `ways` classes, drawn from the training classes, and of each `shots` support samples
    (lower level) and `queries` query samples (upper level), all different. Its labels are 0..ways−1 in the
    order of the draw. The head starts at zero, so that no label is favoured.

    The metric `adapted_accuracy` is measured on tasks of classes that no client has seen (`AdaptedAccuracy`);
    `query_accuracy`, a client metric, is that of the clients' own heads on their queries: training accuracy.

    Where the test part of a data set has classes of its own, as Omniglot's evaluation alphabets, training
    tasks come from one part and test tasks from the other. Where not, the classes are divided in their order:
    the first are for training, the last `held_out` of them for testing.

    Args:
        backbone: its parameters are x.
        clients: how many tasks to train on.
        source: name of the data set.
        dir: folder of its files; None: the usual places.
        ways, shots, queries: classes of a task, support samples and query samples of a class.
        test_tasks: how many tasks to test with.
        adapt_steps, adapt_lr: gradient steps of a head on a test task, and their size.
        penalty: of a head's parameters.
        held_out: share of the classes to test with, if the set has no unseen ones.
        batch_size: samples in a minibatch; None: all of a task's.
        seed: draws the backbone to start from.
        data_seed: draws the tasks.

    References: L. Franceschi et al., Bilevel programming for hyperparameter optimization and meta-learning,
    ICML 2018; J. Li, F. Huang, H. Huang, NeurIPS 2023 (federated, the tasks' heads local).

    Example:
        >>> from fedbilevel.problem.model import MLP
        >>> backbone = MLP((16,), output_activation="relu")
        >>> problem, tasks = FewShot(backbone, clients=7, source="mnist-mini", ways=3, shots=2, test_tasks=4)
        >>> tasks.n, problem.y0["weight"].shape, list(problem.metrics)
        (7, (16, 3), ['adapted_accuracy'])
    """
    size = Size(ways, shots, queries)
    _check_counts(clients=clients, test_tasks=test_tasks, adapt_steps=adapt_steps, **size._asdict())
    train, test = few_shot_tasks(load(source, dir), size, (clients, test_tasks), held_out, data_seed)
    test, head = jax.tree.map(jnp.asarray, test), Linear(ways)
    x0, features = backbone.init(jr.key(seed), train.support["inputs"].shape[2:])
    y0 = zeros_like(head.init(jr.key(seed), features)[0])
    classifier = Representation(backbone, head)
    problem = Problem(
        CrossEntropy(classifier),
        CrossEntropy(classifier, penalty),
        x0,
        y0,
        {"adapted_accuracy": AdaptedAccuracy(backbone, head, y0, test, penalty, adapt_lr, adapt_steps)},
        client_metrics={"query_accuracy": Accuracy(classifier)},
        classes=ways,
    )
    return problem, Clients(train.support, train.queries, batch_size=batch_size)


def few_shot_tasks(
    dataset: Dataset, size: Size, counts: tuple[int, int], held_out: float, seed: int
) -> tuple[Tasks, Tasks]:
    """Tasks to train on and tasks to test with, of different classes and samples.

    Args:
        dataset: where the samples come from.
        size: of a task.
        counts: how many tasks to train on, and to test with.
        held_out: see `FewShot`.
        seed: draws the tasks; those to test with do not depend on the number of the others.
    """
    parts = ("training", dataset.train), ("test", dataset.test)
    drawn = []
    for number, ((part, columns), classes) in enumerate(zip(parts, _divided(dataset, held_out), strict=True)):
        rows = _rows_of(columns["labels"], classes, size, f"the {part} part of {dataset.name!r}")
        draw = np.random.default_rng([seed, number])
        drawn.append(_tasks(columns, [_draw_task(rows, size, draw) for _ in range(counts[number])], size))
    return drawn[0], drawn[1]


def _divided(dataset: Dataset, held_out: float) -> tuple[Labels, Labels]:
    """The classes to train on, and those to test with."""
    train, test = (np.unique(columns["labels"]) for columns in (dataset.train, dataset.test))
    if not np.intersect1d(train, test).size:
        return train, test
    if not 0 < held_out < 1:
        raise ProblemError(f"held_out is {held_out!r}; it must be a share of the classes, between 0 and 1")
    classes = np.union1d(train, test)
    kept = round((1 - held_out) * len(classes))
    return classes[:kept], classes[kept:]


def _rows_of(labels: Labels, classes: Labels, size: Size, where: str) -> list[Labels]:
    """The rows of each class; an error that explains if they do not suffice for a task."""
    if len(classes) < size.ways:
        raise DataError(
            f"a task has {size.ways} classes, but {where} has only {len(classes)} to draw from; "
            "lower `ways`, or change `held_out` if the classes are divided"
        )
    rows: list[Labels] = [np.flatnonzero(labels == label) for label in classes]
    needed, (fewest, label) = size.shots + size.queries, min(zip(map(len, rows), classes, strict=True))
    if fewest < needed:
        raise DataError(
            f"a task takes {size.shots} + {size.queries} samples of a class, but class {label} of {where} "
            f"has only {fewest}; lower `shots` or `queries`"
        )
    return rows


def _draw_task(rows: list[Labels], size: Size, draw: np.random.Generator) -> Labels:
    """`(ways, shots + queries)`: different rows of different classes."""
    chosen = draw.choice(len(rows), size.ways, replace=False)
    return np.stack([draw.choice(rows[c], size.shots + size.queries, replace=False) for c in chosen])


def _tasks(columns: Table, drawn: list[Labels], size: Size) -> Tasks:
    """The samples of drawn rows, numbered anew in every task."""
    rows = np.stack(drawn)
    numbers = np.broadcast_to(np.arange(size.ways, dtype=np.int32)[:, None], rows.shape)
    parts = []
    for part in (np.s_[..., : size.shots], np.s_[..., size.shots :]):
        own, labels = (array[part].reshape(len(rows), -1) for array in (rows, numbers))
        parts.append({"inputs": columns["inputs"][own], "labels": labels})
    return Tasks(*parts)


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        check_count(name, count, error=ProblemError)
