"""Loss tuning: the vector-scaling loss, class balance, and a run on imbalanced data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fedbilevel as fb
from fedbilevel.portable import imported, pack, unpack
from fedbilevel.problem.accuracy import BalancedAccuracy, cross_entropy
from fedbilevel.problem.base import ProblemError
from fedbilevel.problem.loss_tuning import TUNABLE, LossTuning, VectorScalingLoss, class_weights, scaling
from fedbilevel.problem.model import MLP, Linear

DRAW = np.random.default_rng(5)
CLASSES = 3
SAMPLES = {"inputs": DRAW.normal(size=(8, 4)), "labels": np.array([0, 0, 0, 0, 0, 1, 1, 2])}


def arrays():
    """The samples as a client has them, in the precision of the test."""
    return jax.tree.map(jnp.asarray, SAMPLES)


def make(**options):
    settings = {"inputs": (4,), "classes": CLASSES, "penalty": 0.1} | options
    return LossTuning(MLP((5, CLASSES), "tanh"), **settings)


class Given:
    """A classifier whose inputs are the logits."""

    def __call__(self, x, y, inputs):
        return inputs


# --------------------------------------------------------------- the training loss


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("tune", [TUNABLE, ("delta",), ("log_gamma", "log_weight")])
def test_at_the_start_it_is_cross_entropy_and_elsewhere_it_is_not(tune):
    problem = make(tune=tune, penalty=0.0)
    logits = MLP((5, CLASSES), "tanh")(problem.y0, jnp.asarray(SAMPLES["inputs"]))
    plain = jnp.mean(cross_entropy(logits, jnp.asarray(SAMPLES["labels"])))
    np.testing.assert_allclose(problem.lower(problem.x0, problem.y0, arrays()), plain, rtol=1e-14)
    for name in tune:
        moved = problem.x0 | {name: jnp.array([0.5, 0.0, -0.5])}
        assert abs(problem.lower(moved, problem.y0, arrays()) - plain) > 1e-3


@pytest.mark.usefixtures("float64")
def test_value_and_derivatives_on_one_sample_are_those_worked_out_by_hand():
    """With r = w_c(softmax(γz + Δ) − e_c) and label c: ∂/∂Δ = r, ∂/∂log γ = rγz, ∂/∂log w_c = loss."""
    z, c = np.array([0.3, -1.0, 0.7]), 1
    x = {name: jnp.asarray(DRAW.normal(size=CLASSES)) for name in TUNABLE}
    delta, gamma, weight = np.asarray(x["delta"]), np.exp(x["log_gamma"]), np.exp(x["log_weight"])
    odds = np.exp(gamma * z + delta)
    gap = odds / odds.sum() - np.eye(CLASSES)[c]
    loss = -weight[c] * np.log(odds[c] / odds.sum())

    one = {"inputs": jnp.asarray(z)[None], "labels": jnp.array([c])}
    value, slope = jax.value_and_grad(VectorScalingLoss(Given(), 0.0))(x, (), one)
    np.testing.assert_allclose(value, loss, rtol=1e-13)
    np.testing.assert_allclose(slope["delta"], weight[c] * gap, atol=1e-14)
    np.testing.assert_allclose(slope["log_gamma"], weight[c] * gap * gamma * z, atol=1e-14)
    np.testing.assert_allclose(slope["log_weight"], loss * np.eye(CLASSES)[c], atol=1e-14)


def test_gamma_and_weight_are_positive_wherever_x_goes():
    delta, gamma, weight = scaling({name: jnp.array([-9.0, 0.0, 9.0]) for name in TUNABLE})
    assert np.all(np.asarray(gamma) > 0)
    assert np.all(np.asarray(weight) > 0)
    np.testing.assert_array_equal(delta, [-9, 0, 9])


@pytest.mark.usefixtures("float64")
def test_the_penalty_is_of_the_model_and_the_validation_loss_does_not_see_x():
    problem = make(tune=TUNABLE)
    x, y = problem.x0, problem.y0
    square = sum(np.sum(np.asarray(leaf) ** 2) for leaf in jax.tree.leaves(y))
    without = make(tune=TUNABLE, penalty=0.0).lower(x, y, arrays())
    np.testing.assert_allclose(problem.lower(x, y, arrays()), without + 0.05 * square, rtol=1e-13)
    direct, through = jax.grad(problem.upper, (0, 1))(x, y, arrays())
    assert not np.any(ravel_pytree(direct)[0])
    assert np.all(np.abs(ravel_pytree(through)[0]) > 0)


# ------------------------------------------------------------------ class balance


def split(bounds):
    parts = np.split(np.arange(8), bounds)
    return [{name: column[rows] for name, column in SAMPLES.items()} for rows in parts]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("bounds", "weights"), [([4], "uniform"), ([3], "size"), ([3, 6], "size"), ([], "uniform")]
)
def test_the_balanced_loss_is_the_mean_of_the_classes_mean_losses(bounds, weights):
    """However the samples are divided, where every sample weighs the same."""
    clients = fb.Clients(split(bounds), weights=weights)
    problem = make(balance=class_weights(clients, CLASSES))
    logits = MLP((5, CLASSES), "tanh")(problem.y0, jnp.asarray(SAMPLES["inputs"]))
    losses = np.asarray(cross_entropy(logits, jnp.asarray(SAMPLES["labels"])))
    of_classes = [losses[SAMPLES["labels"] == c].mean() for c in range(CLASSES)]
    np.testing.assert_allclose(
        problem.upper(problem.x0, problem.y0, arrays()), np.mean(of_classes), rtol=1e-12
    )
    assert abs(np.mean(of_classes) - losses.mean()) > 0.01, "the unbalanced mean is another number"


@pytest.mark.usefixtures("float64")
def test_class_weights_follow_the_average_over_clients():
    """Clients of unequal size, each of weight one: their shares are averaged, not their samples."""
    clients = fb.Clients(split([2]))
    first, second = np.array([1, 0, 0]), np.array([3, 2, 1]) / 6
    np.testing.assert_allclose(class_weights(clients, CLASSES), 1 / (3 * (first + second) / 2))


@pytest.mark.usefixtures("float64")
def test_class_weights_read_the_upper_level_through_its_index():
    pool = {"labels": np.array([0, 1, 2, 1])}
    clients = fb.Clients.indexed(pool, [[0, 2], [2]], [[1, 3, 0, 1]] * 2)
    np.testing.assert_allclose(class_weights(clients, CLASSES), [1 / (2 * 0.25), 1 / (2 * 0.75), 0])


def test_balanced_accuracy_of_a_confusion_made_by_hand():
    """Recalls 3/4, 1/2, 0 of three classes; a fourth has no sample. The plain accuracy is 4/7."""
    labels, found = np.array([0, 0, 0, 0, 1, 1, 2]), np.array([0, 0, 0, 3, 1, 0, 1])
    table = {"inputs": jnp.eye(4)[found], "labels": jnp.asarray(labels)}
    assert float(BalancedAccuracy(Given(), 4)((), (), table)) == pytest.approx((3 / 4 + 1 / 2 + 0) / 3)


def test_metrics_are_those_of_the_test_samples():
    problem = make(test=SAMPLES)
    logits = MLP((5, CLASSES), "tanh")(problem.y0, jnp.asarray(SAMPLES["inputs"], jnp.float32))
    right = np.asarray(logits).argmax(1) == SAMPLES["labels"]
    recalls = [right[SAMPLES["labels"] == c].mean() for c in range(CLASSES)]
    found = {name: float(metric(problem.x0, problem.y0)) for name, metric in problem.metrics.items()}
    assert found == pytest.approx({"balanced_accuracy": np.mean(recalls), "test_accuracy": right.mean()})
    assert float(problem.client_metrics["accuracy"](problem.x0, problem.y0, arrays())) == pytest.approx(
        right.mean()
    )


# --------------------------------------------------------------------------- a run


def crowd(draw, sizes):
    """So many overlapping points of each class: a rare class is swallowed by its neighbour."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return {"inputs": 1.5 * np.eye(4)[labels] + draw.normal(size=(len(labels), 4)), "labels": labels}


def test_tuning_raises_the_balanced_accuracy():
    """Logits of a rare class are lowered while training, as logit adjustment does; untuned, it is lost."""
    draw = np.random.default_rng(1)
    train, validation = ([crowd(draw, sizes) for _ in range(3)] for sizes in ((60, 10, 4), (30, 5, 2)))
    clients = fb.Clients(train, validation)
    problem = LossTuning(
        Linear(3),
        inputs=(4,),
        classes=3,
        balance=class_weights(clients, 3),
        penalty=0.02,
        test=crowd(draw, (400, 400, 400)),
        client_metrics=None,
    )
    found = {}
    for upper_lr in (0.0, 3.0):
        method = fb.FedNest(upper_lr, 1.0, series="cg", terms=6, lower_steps=3)
        found[upper_lr] = fb.solve(problem, clients, method, 60, every=60)
    tuned, untuned = (found[lr].history[-1]["balanced_accuracy"] for lr in (3.0, 0.0))
    assert tuned > untuned + 0.1
    delta = found[3.0].x["delta"]
    assert delta[0] > delta[1] > delta[2]


def test_it_can_be_named_and_made_again_elsewhere():
    problem = make(test=SAMPLES, balance=np.array([1.0, 2.0, 3.0]))
    again = unpack(*pack(problem), imported)
    assert float(again.upper(problem.x0, problem.y0, arrays())) == float(
        problem.upper(problem.x0, problem.y0, arrays())
    )


REFUSED = {
    "near name": (lambda: make(tune=["delts"]), "a name in tune is 'delts'; .*did you mean 'delta'"),
    "a string": (lambda: make(tune="delta"), "tune is 'delta'; it must be a list of some of delta"),
    "nothing": (lambda: make(tune=()), "it must be a list of some of"),
    "balance shape": (lambda: make(balance=[1.0, 2.0]), "for each of the 3 classes"),
    "negative balance": (lambda: make(balance=[1.0, 2.0, -1.0]), "finite non-negative"),
    "classes": (lambda: make(classes=4), r"model gives outputs of shape \(3,\)"),
    "labels": (
        lambda: class_weights(fb.Clients([SAMPLES]), 2),
        r"upper-level labels are 0\.\.2; with 2 classes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_do_not_fit_are_refused_with_a_reason(case):
    build, message = REFUSED[case]
    with pytest.raises(ProblemError, match=message):
        build()
