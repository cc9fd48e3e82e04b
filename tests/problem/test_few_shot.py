"""Few-shot tasks: how they are drawn, what is minimised and measured, and a run that learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.data.dataset import Dataset
from fedbilevel.data.error import DataError
from fedbilevel.problem import few_shot
from fedbilevel.problem.base import ProblemError
from fedbilevel.problem.convolution import ConvNet
from fedbilevel.problem.few_shot import FewShot, Size, few_shot_tasks
from fedbilevel.problem.model import MLP, Linear
from fedbilevel.tree import size

SIZE = Size(ways=3, shots=2, queries=4)


def numbered(classes, each):
    """Samples whose inputs tell their row: `1000 label + number`, as images of 8 × 8 pixels."""
    labels = np.repeat(np.asarray(classes, np.int32), each)
    values = 1000 * labels + np.tile(np.arange(each), len(classes))
    inputs = np.broadcast_to(values[:, None, None, None], (len(labels), 8, 8, 1))
    return {"inputs": inputs.astype(np.float32), "labels": labels}


UNSEEN = Dataset("unseen", numbered(range(6), 7), numbered(range(6, 10), 7), tuple("abcdefghij"))
SAME = Dataset("same", numbered(range(10), 7), numbered(range(10), 7), tuple("abcdefghij"))


def values(part):
    """`(tasks, samples)`: what tells a row."""
    return part["inputs"][:, :, 0, 0, 0].astype(int)


@pytest.mark.parametrize("dataset", [UNSEEN, SAME], ids=lambda dataset: dataset.name)
def test_test_tasks_are_of_classes_that_no_training_task_has(dataset):
    train, test = few_shot_tasks(dataset, SIZE, (50, 30), 0.4, 0)
    seen, unseen = ({*(values(part) // 1000).ravel()} for part in (train.support, test.support))
    assert (seen, unseen) == (set(range(6)), set(range(6, 10)))


def test_a_task_has_its_own_labels_and_no_sample_twice():
    train, _ = few_shot_tasks(UNSEEN, SIZE, (40, 1), 0.4, 0)
    assert train.support["inputs"].shape == (40, 6, 8, 8, 1)
    assert train.queries["inputs"].shape == (40, 12, 8, 8, 1)
    for support, queries in zip(values(train.support), values(train.queries), strict=True):
        assert len({*support, *queries}) == 18, "all different"
        classes = support[::2] // 1000
        assert len({*classes}) == 3
        np.testing.assert_array_equal(support // 1000, classes[train.support["labels"][0]])
        np.testing.assert_array_equal(queries // 1000, classes[train.queries["labels"][0]])
    np.testing.assert_array_equal(train.support["labels"][7], [0, 0, 1, 1, 2, 2])
    assert len({tuple(row) for row in values(train.support)[:, ::2] // 1000}) > 20, "tasks differ"


def test_draws_are_reproducible_and_test_tasks_independent_of_the_number_of_clients():
    first, again, more, other = (
        few_shot_tasks(UNSEEN, SIZE, (count, 5), 0.4, seed)
        for count, seed in ((3, 0), (3, 0), (9, 0), (3, 1))
    )
    assert jax.tree.all(jax.tree.map(np.array_equal, first, again))
    assert jax.tree.all(jax.tree.map(np.array_equal, first[1], more[1]))
    assert not np.array_equal(values(first[0].support), values(other[0].support))
    assert not np.array_equal(values(first[1].support), values(other[1].support))


@pytest.fixture
def bars(monkeypatch):
    """Ten classes of 8 × 8 images: which rows are bright, under noise."""
    draw = np.random.default_rng(0)
    shapes = draw.uniform(size=(10, 8, 1, 1)) > 0.5

    def part(classes):
        labels = np.repeat(np.asarray(classes, np.int32), 12)
        noise = draw.normal(size=(len(labels), 8, 8, 1))
        return {"inputs": (2 * shapes[labels] + noise).astype(np.float32), "labels": labels}

    dataset = Dataset("bars", part(range(6)), part(range(6, 10)), tuple("abcdefghij"))
    monkeypatch.setattr(few_shot, "load", lambda name, dir: dataset)
    return dataset


def make(backbone, **options):
    settings = {"clients": 6, "ways": 3, "shots": 2, "queries": 4, "test_tasks": 5, "penalty": 0.1}
    return FewShot(backbone, **settings | options)


def by_hand(features, support, queries, labels, steps, lr, penalty):
    """The accuracy of a head of gradient descent on features, in plain numpy."""
    weight, bias = np.zeros((features(support).shape[1], 3)), np.zeros(3)
    own, hot = features(support), np.eye(3)[labels[0]]
    for _ in range(steps):
        odds = np.exp(own @ weight + bias)
        gap = (odds / odds.sum(1, keepdims=True) - hot) / len(own)
        weight, bias = (
            weight - lr * (own.T @ gap + penalty * weight),
            bias - lr * (gap.sum(0) + penalty * bias),
        )
    return np.mean(np.argmax(features(queries) @ weight + bias, 1) == labels[1])


@pytest.mark.usefixtures("float64", "bars")
def test_the_metric_is_the_accuracy_of_heads_trained_by_hand():
    backbone = MLP((5,), output_activation="tanh")
    problem, _ = make(backbone, adapt_steps=7, adapt_lr=0.3)
    _, test = few_shot_tasks(few_shot.load("", None), Size(3, 2, 4), (6, 5), 0.4, 0)

    def features(inputs):
        return np.asarray(backbone(problem.x0, jnp.asarray(inputs)))

    found = [
        by_hand(features, s, q, (sl, ql), 7, 0.3, 0.1)
        for s, sl, q, ql in zip(*test.support.values(), *test.queries.values(), strict=True)
    ]
    assert 1 / 3 < np.mean(found) < 1, "or the test would show nothing"
    metric = problem.metrics["adapted_accuracy"]
    assert float(metric(problem.x0, problem.y0)) == pytest.approx(np.mean(found), rel=1e-12)
    assert float(metric(problem.x0, None)) == pytest.approx(np.mean(found), rel=1e-12), "y plays no part"


@pytest.mark.usefixtures("bars")
def test_the_levels_have_their_data_and_the_head_starts_at_zero():
    problem, clients = make(ConvNet((4, 4)), batch_size=5)
    assert (clients.n, clients.lower.longest, clients.upper.longest) == (6, 6, 12)
    assert clients.lower.batch_size == 5
    assert problem.y0["weight"].shape == (16, 3)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(problem.y0))
    problem.check(clients)
    samples = jax.tree.map(lambda leaf: leaf[:12], clients.upper.flat)
    one = jax.tree.map(jnp.ones_like, problem.y0)
    lower, upper = (float(f(problem.x0, one, samples)) for f in (problem.lower, problem.upper))
    assert upper == pytest.approx(np.log(3), rel=1e-5), "equal logits"
    assert lower - upper == pytest.approx(0.1 / 2 * size(one), rel=1e-4)


@pytest.mark.usefixtures("bars")
def test_the_seed_draws_the_backbone_and_the_data_seed_the_tasks():
    backbone = MLP((4,), output_activation="relu")
    first, start, tasks = make(backbone), make(backbone, seed=1), make(backbone, data_seed=1)
    weights = [problem.x0[0]["weight"] for problem, _ in (first, start, tasks)]
    inputs = [clients.lower.flat["inputs"] for _, clients in (first, start, tasks)]
    assert not np.array_equal(weights[0], weights[1])
    assert np.array_equal(weights[0], weights[2])
    assert np.array_equal(inputs[0], inputs[1])
    assert not np.array_equal(inputs[0], inputs[2])


@pytest.mark.usefixtures("bars")
def test_a_trained_backbone_helps_on_unseen_classes_and_one_head_for_all_does_not():
    """Negative control: FedBiO with one head learns nothing of tasks whose labels are arbitrary."""
    backbone = MLP((8,), output_activation="tanh")
    problem, clients = make(backbone, clients=20, test_tasks=60, adapt_steps=10, adapt_lr=0.3)
    found = {}
    for kind in (fb.FedBiOLocal, fb.FedBiO):
        result = fb.solve(problem, clients, kind(0.3, 0.3, 0.3, sync_every=2), 100, every=100)
        found[kind] = [row["adapted_accuracy"] for row in result.history]
        own = result.history[-1]["query_accuracy_mean"]
        assert (own > 0.8) == (kind is fb.FedBiOLocal)
    before, after = found[fb.FedBiOLocal]
    assert after > before + 0.05
    assert after > found[fb.FedBiO][1] + 0.05


REFUSED = {
    "classes": ({"ways": 5}, DataError, "a task has 5 classes, but the test part of 'bars' has only 4"),
    "samples": (
        {"queries": 11},
        DataError,
        "takes 2 [+] 11 samples of a class, but class 0 of the training part of 'bars' has only 12",
    ),
    "no clients": ({"clients": 0}, ProblemError, "clients is 0; it must be a whole number of at least 1"),
    "no steps": ({"adapt_steps": 0}, ProblemError, "adapt_steps is 0; it must be a whole number"),
}


@pytest.mark.usefixtures("bars")
@pytest.mark.parametrize("case", REFUSED)
def test_tasks_that_cannot_be_drawn_are_refused_with_a_reason(case):
    options, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        make(Linear(4), **options)


@pytest.mark.parametrize("share", [0.0, 1.0, 40.0])
def test_held_out_must_be_a_share(share):
    with pytest.raises(ProblemError, match=r"held_out is .*; it must be a share of the classes"):
        few_shot_tasks(SAME, SIZE, (1, 1), share, 0)
