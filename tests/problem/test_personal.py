"""Personalisation problems: losses and derivatives worked out by hand, and clients that profit."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fedbilevel as fb
from fedbilevel.data.batches import weighted
from fedbilevel.portable import imported, pack, unpack
from fedbilevel.problem.base import ProblemError
from fedbilevel.problem.model import MLP, Linear
from fedbilevel.problem.oracle import Client
from fedbilevel.problem.personal import (
    ClassWeights,
    Interpolation,
    Mixture,
    PersonalLayers,
    WeightedMixture,
)
from fedbilevel.problem.personal_loss import mixed
from fedbilevel.tree import row

CLASSES, INPUTS, MODELS, PENALTY = 3, 4, 2, 0.1
DRAW = np.random.default_rng(3)
SAMPLES = {"inputs": DRAW.normal(size=(8, INPUTS)), "labels": np.array([0, 0, 0, 1, 1, 2, 0, 1])}
TEST = {"inputs": DRAW.normal(size=(5, INPUTS)), "labels": np.array([0, 2, 1, 1, 2])}
SETTINGS = {"inputs": (INPUTS,), "classes": CLASSES, "penalty": PENALTY}

MAKERS = {
    "ClassWeights": lambda **o: ClassWeights(Linear(CLASSES), **SETTINGS | o),
    "ClassWeights of logits": lambda **o: ClassWeights(Linear(CLASSES), of="logits", **SETTINGS | o),
    "Mixture": lambda **o: Mixture(Linear(CLASSES), **{"models": MODELS} | SETTINGS | o),
    "WeightedMixture": lambda **o: WeightedMixture(Linear(CLASSES), **{"models": MODELS} | SETTINGS | o),
    "WeightedMixture of logits": lambda **o: WeightedMixture(
        Linear(CLASSES), of="logits", **{"models": MODELS} | SETTINGS | o
    ),
    "PersonalLayers": lambda **o: PersonalLayers(
        MLP((5,), output_activation="tanh"), Linear(CLASSES), **SETTINGS | o
    ),
    "Interpolation": lambda **o: Interpolation(Linear(CLASSES), **SETTINGS | o),
}
every_problem = pytest.mark.parametrize("name", MAKERS)
float64 = pytest.mark.usefixtures("float64")


def arrays(samples=SAMPLES):
    """Samples as a client has them, in the precision of the test."""
    return jax.tree.map(jnp.asarray, samples)


def elsewhere(tree, scale=0.7):
    """A point away from zeros and symmetries."""
    flat, back = ravel_pytree(tree)
    return back(flat + scale * jnp.asarray(np.random.default_rng(7).normal(size=flat.shape)))


def point(problem):
    return elsewhere(problem.x0), elsewhere(problem.y0, 0.3)


def softmax(scores):
    odds = np.exp(scores - scores.max(-1, keepdims=True))
    return odds / odds.sum(-1, keepdims=True)


def probabilities(y):
    """Of a linear model, `(..., samples, classes)`."""
    return softmax(SAMPLES["inputs"] @ np.asarray(y["weight"]) + np.asarray(y["bias"])[..., None, :])


def square(tree):
    return float(np.sum(np.asarray(ravel_pytree(tree)[0]) ** 2))


def slopes(objective, x, y):
    """The gradients in x and y on all samples."""
    return jax.jit(jax.grad(objective, (0, 1)))(x, y, arrays())


def products(problem, x, y, v):
    """`(J v, H v)` as a client computes them."""
    client = Client(problem, fb.Clients([SAMPLES]), 0, 0, jax.random.key(0))
    return jax.jit(lambda *z: client.g_xy_and_yy(*z, client.batch("lower", client.key)))(x, y, v)


HOT = np.eye(CLASSES)[SAMPLES["labels"]]


# ------------------------------------------------------------------ own class weights


@float64
def test_the_class_weighted_loss_and_all_its_derivatives_are_those_worked_out_by_hand():
    """w = C s, s = softmax(x): dw/dx = C (diag s − ssᵀ); a softmax's curvature is diag p − ppᵀ."""
    problem = MAKERS["ClassWeights"]()
    (x, y), n = point(problem), len(HOT)
    s, p = softmax(np.asarray(x)), probabilities(y)
    weight, losses = CLASSES * s[SAMPLES["labels"]], -np.log(np.sum(p * HOT, axis=1))
    value = problem.lower(x, y, arrays())
    np.testing.assert_allclose(value, np.mean(weight * losses) + PENALTY / 2 * square(y), rtol=1e-13)

    turn = CLASSES * (np.diag(s) - np.outer(s, s))
    x_slope, y_slope = slopes(problem.lower, x, y)
    np.testing.assert_allclose(x_slope, turn @ HOT.T @ losses / n, atol=1e-14)
    gap = weight[:, None] * (p - HOT) / n
    np.testing.assert_allclose(
        y_slope["weight"], SAMPLES["inputs"].T @ gap + PENALTY * y["weight"], atol=1e-13
    )
    np.testing.assert_allclose(y_slope["bias"], gap.sum(0) + PENALTY * y["bias"], atol=1e-13)

    v = elsewhere(problem.y0, 1.0)
    along = SAMPLES["inputs"] @ np.asarray(v["weight"]) + np.asarray(v["bias"])  # of the logits
    cross, curve = products(problem, x, y, v)
    np.testing.assert_allclose(cross, turn @ HOT.T @ np.sum((p - HOT) * along, axis=1) / n, atol=1e-13)
    bent = weight[:, None] * (p * along - p * np.sum(p * along, axis=1, keepdims=True)) / n
    np.testing.assert_allclose(
        curve["weight"], SAMPLES["inputs"].T @ bent + PENALTY * v["weight"], atol=1e-13
    )
    np.testing.assert_allclose(curve["bias"], bent.sum(0) + PENALTY * v["bias"], atol=1e-13)


@float64
def test_the_upper_objective_of_class_weights_is_plain_but_for_its_penalty():
    problem, penalised = MAKERS["ClassWeights"](), MAKERS["ClassWeights"](upper_penalty=0.4)
    x, y = point(problem)
    plain = -np.mean(np.log(np.sum(probabilities(y) * HOT, axis=1)))
    np.testing.assert_allclose(problem.upper(x, y, arrays()), plain, rtol=1e-13)
    np.testing.assert_allclose(penalised.upper(x, y, arrays()), plain + 0.2 * square(x), rtol=1e-13)
    assert not np.any(jax.grad(problem.upper)(x, y, arrays())), "x acts through y alone"


@float64
def test_weights_of_the_logits_and_their_derivatives_are_those_worked_out_by_hand():
    """w = C softmax(x), z = w ⊙ logits: dl/dlogits = w ⊙ (p − e), dl/dx = (dw/dx)ᵀ Σ (p − e) ⊙ logits."""
    problem = MAKERS["ClassWeights of logits"](upper_penalty=0.4)
    (x, y), n = point(problem), len(HOT)
    s = softmax(np.asarray(x))
    logits = SAMPLES["inputs"] @ np.asarray(y["weight"]) + np.asarray(y["bias"])
    p = softmax(CLASSES * s * logits)
    loss = -np.mean(np.log(np.sum(p * HOT, axis=1)))
    np.testing.assert_allclose(problem.upper(x, y, arrays()), loss + 0.2 * square(x), rtol=1e-13)
    np.testing.assert_allclose(problem.lower(x, y, arrays()), loss + PENALTY / 2 * square(y), rtol=1e-13)
    turn = CLASSES * (np.diag(s) - np.outer(s, s))
    x_slope, y_slope = slopes(problem.lower, x, y)
    np.testing.assert_allclose(x_slope, turn @ np.sum((p - HOT) * logits, axis=0) / n, atol=1e-14)
    gap = CLASSES * s * (p - HOT) / n
    np.testing.assert_allclose(y_slope["bias"], gap.sum(0) + PENALTY * y["bias"], atol=1e-13)
    accuracy = problem.client_metrics["accuracy"](x, y, arrays())
    assert accuracy == np.mean((CLASSES * s * logits).argmax(1) == SAMPLES["labels"])
    assert accuracy != np.mean(logits.argmax(1) == SAMPLES["labels"]), "else it shows nothing"


# ------------------------------------------------------------------------- mixtures


@float64
def test_the_mixture_and_its_derivatives_are_those_worked_out_by_hand():
    """With model k's share r_k in a label's probability: dl/dx = s − mean r, dl/dlogits_k = r_k (p_k − e)."""
    problem = MAKERS["Mixture"]()
    x, y = point(problem)
    s, p = softmax(np.asarray(x)), probabilities(y)
    of_label = s[:, None] * np.sum(p * HOT, axis=2)
    loss, share = -np.mean(np.log(of_label.sum(0))), of_label / of_label.sum(0)
    for objective, penalty in ((problem.lower, PENALTY * square(y)), (problem.upper, 0.01 * square(x))):
        np.testing.assert_allclose(objective(x, y, arrays()), loss + penalty / 2, rtol=1e-13)
    x_slope, y_slope = slopes(problem.upper, x, y)
    np.testing.assert_allclose(x_slope, s - share.mean(1) + 0.01 * np.asarray(x), atol=1e-14)
    gap = share[..., None] * (p - HOT) / len(HOT)
    np.testing.assert_allclose(
        y_slope["weight"], np.einsum("ni,knc->kic", SAMPLES["inputs"], gap), atol=1e-14
    )
    np.testing.assert_allclose(y_slope["bias"], gap.sum(1), atol=1e-14)


@float64
@pytest.mark.parametrize(
    "name", ["ClassWeights of logits", "WeightedMixture", "WeightedMixture of logits", "PersonalLayers"]
)
def test_products_with_second_derivatives_agree_with_differences_of_gradients(name):
    problem = MAKERS[name]()
    x, y = point(problem)
    v, size = elsewhere(problem.y0, 1.0), 1e-6
    cross, curve = products(problem, x, y, v)
    moved = [jax.tree.map(lambda a, b, s=s: a + s * b, y, v) for s in (size, -size)]
    ahead, behind = (slopes(problem.lower, x, near) for near in moved)
    found = jax.tree.map(lambda a, b: (a - b) / (2 * size), ahead, behind)
    for exact, difference in ((cross, found[0]), (curve, found[1])):
        np.testing.assert_allclose(ravel_pytree(exact)[0], ravel_pytree(difference)[0], atol=1e-8)


@float64
def test_a_mixture_of_equal_models_is_one_model_whatever_the_weights():
    alone, mixture = MAKERS["ClassWeights"](), MAKERS["Mixture"](upper_penalty=0.0)
    same = jax.tree.map(lambda leaf: jnp.stack([leaf] * MODELS), alone.y0)
    for x in (mixture.x0, elsewhere(mixture.x0, 3.0)):
        found = mixture.upper(x, same, arrays())
        np.testing.assert_allclose(found, alone.upper(alone.x0, alone.y0, arrays()), rtol=1e-13)


@float64
def test_a_mixture_averages_probabilities_and_survives_certainty():
    logits = jnp.asarray([[[800.0, 0.0]], [[0.0, 800.0]]])
    found = mixed(jnp.log(jnp.asarray([0.25, 0.75])), logits)
    np.testing.assert_allclose(np.exp(found), [[0.25, 0.75]], rtol=1e-12)
    slope = jax.grad(lambda z: mixed(jnp.log(jnp.asarray([0.25, 0.75])), z)[0, 0])(logits)
    assert np.all(np.isfinite(slope))


def test_the_models_of_a_mixture_start_apart_and_the_seed_draws_them():
    first, second = (MAKERS["Mixture"](seed=seed).y0["weight"] for seed in (0, 1))
    assert np.abs(first[0] - first[1]).max() > 0.1
    assert np.abs(first - second).max() > 0.1


@float64
def test_the_weighted_mixture_is_both_at_once():
    both, mixture, classes = (MAKERS[name]() for name in ("WeightedMixture", "Mixture", "ClassWeights"))
    x, y = point(both)
    flat = x | {"classes": jnp.zeros(CLASSES)}
    np.testing.assert_allclose(
        both.lower(flat, y, arrays()), mixture.lower(x["mixture"], y, arrays()), rtol=1e-13
    )
    same = jax.tree.map(lambda leaf: jnp.stack([leaf] * MODELS), elsewhere(classes.y0))
    one = jax.tree.map(lambda leaf: leaf[0], same)
    wanted = classes.lower(x["classes"], one, arrays()) + PENALTY / 2 * (MODELS - 1) * square(one)
    np.testing.assert_allclose(both.lower(x, same, arrays()), wanted, rtol=1e-13)
    penalty = 0.0005 / 2 * square(x["classes"]) + 0.01 / 2 * square(x["mixture"])
    bare = MAKERS["WeightedMixture"](class_penalty=0.0, mixture_penalty=0.0).upper(x, y, arrays())
    np.testing.assert_allclose(both.upper(x, y, arrays()) - bare, penalty, rtol=1e-9)


@float64
def test_the_mixture_of_weighted_logits_is_both_at_once():
    both, classes = MAKERS["WeightedMixture of logits"](), MAKERS["ClassWeights of logits"]()
    x, y = point(both)
    each = [jnp.exp(-classes.upper(x["classes"], row(y, k), arrays(one))) for k, one in by_model()]
    of_models = np.asarray(each).reshape(MODELS, -1)
    loss = -np.mean(np.log(softmax(np.asarray(x["mixture"])) @ of_models))
    own = 0.0005 * square(x["classes"]) + 0.01 * square(x["mixture"])
    np.testing.assert_allclose(both.lower(x, y, arrays()), loss + PENALTY / 2 * square(y), rtol=1e-12)
    np.testing.assert_allclose(both.upper(x, y, arrays()), loss + own / 2, rtol=1e-12)
    np.testing.assert_allclose(both.client_metrics["loss"](x, y, arrays()), loss, rtol=1e-12)


def by_model():
    """Every model with every sample alone."""
    places = range(len(SAMPLES["labels"]))
    alone = [{key: column[[i]] for key, column in SAMPLES.items()} for i in places]
    return [(k, one) for k in range(MODELS) for one in alone]


# ------------------------------------------------------------------- own parameters


@float64
def test_personal_layers_are_a_representation_with_the_levels_exchanged():
    backbone = MLP((5,), output_activation="tanh")
    problem = MAKERS["PersonalLayers"](upper_penalty=0.3)
    plain = fb.HyperRepresentation(backbone, Linear(CLASSES), **SETTINGS | {"penalty": 0.0})
    x, y = point(problem)
    loss = plain.lower(y, x, arrays())
    np.testing.assert_allclose(problem.lower(x, y, arrays()), loss + PENALTY / 2 * square(y), rtol=1e-13)
    np.testing.assert_allclose(problem.upper(x, y, arrays()), loss + 0.15 * square(x), rtol=1e-13)


@float64
def test_an_interpolation_is_a_mean_of_probabilities_between_own_and_global():
    problem = MAKERS["Interpolation"](upper_penalty=0.0)
    x, y = point(problem)
    weight = 1 / (1 + np.exp(-float(x["weight"])))
    mean = weight * probabilities(x["model"]) + (1 - weight) * probabilities(y)
    np.testing.assert_allclose(
        problem.upper(x, y, arrays()), -np.mean(np.log(np.sum(mean * HOT, axis=1))), rtol=1e-13
    )
    for logit, only in ((60.0, x["model"]), (-60.0, y)):
        alone = -np.mean(np.log(np.sum(probabilities(only) * HOT, axis=1)))
        np.testing.assert_allclose(
            problem.upper(x | {"weight": jnp.asarray(logit)}, y, arrays()), alone, rtol=1e-12
        )
    assert not np.any(ravel_pytree(jax.grad(problem.lower)(x, y, arrays()))[0]), "g does not see x"


# -------------------------------------------------------------------------- all of them


@float64
@every_problem
def test_at_the_start_nothing_is_weighted(name):
    """g is the plain cross-entropy of the classifier there; so is f, but for the penalty of own models."""
    problem = MAKERS[name]()
    x, y = problem.x0, problem.y0
    plain, own = problem.client_metrics["loss"](x, y, arrays()), 0.001 / 2 * square(x)
    np.testing.assert_allclose(problem.upper(x, y, arrays()), plain + own, rtol=1e-13)
    np.testing.assert_allclose(problem.lower(x, y, arrays()), plain + PENALTY / 2 * square(y), rtol=1e-13)


@float64
@every_problem
def test_padding_changes_no_objective_and_no_metric(name):
    problem = MAKERS[name]()
    x, y = point(problem)
    own = [{key: column[rows] for key, column in SAMPLES.items()} for rows in ([0, 3, 5], [1, 2, 4, 6, 7])]
    functions = (problem.lower, problem.upper, *problem.client_metrics.values())
    batch = fb.Clients(own).lower.batch(0, jax.random.key(0))
    assert batch.weight is not None
    padded = jax.jit(lambda: [weighted(function)(x, y, batch) for function in functions])()
    plain = jax.jit(lambda: [function(x, y, arrays(own[0])) for function in functions])()
    np.testing.assert_allclose(padded, plain, rtol=1e-12)


@every_problem
def test_they_can_be_named_and_made_again_elsewhere(name):
    problem = MAKERS[name](test=TEST)
    again = unpack(*pack(problem), imported)
    x, y = point(problem)
    values = eqx.filter_jit(lambda p: (p.upper(x, y, arrays()), p.lower(x, y, arrays())))
    np.testing.assert_array_equal(values(problem), values(again))


@every_problem
def test_the_test_accuracy_is_the_mean_over_clients_where_they_have_their_own(name):
    problem = MAKERS[name](test=TEST)
    own = [(elsewhere(problem.x0, scale), elsewhere(problem.y0, scale)) for scale in (0.0, 1.0, 3.0)]
    metric, accuracy = problem.metrics["test_accuracy"], problem.client_metrics["accuracy"]
    values = [float(accuracy(x, y, arrays(TEST))) for x, y in own]
    assert [float(metric(x, y)) for x, y in own] == pytest.approx(values)
    xs, ys = (jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees) for trees in zip(*own, strict=True))
    assert float(metric(xs, ys)) == pytest.approx(np.mean(values))
    mixed_up = [float(accuracy(x, own[1][1], arrays(TEST))) for x, _ in own]
    assert float(metric(xs, own[1][1])) == pytest.approx(np.mean(mixed_up))


REFUSED = {
    "classes": (lambda: ClassWeights(Linear(4), **SETTINGS), r"model gives outputs of shape \(4,\)"),
    "of": (lambda: ClassWeights(Linear(3), of="logit", **SETTINGS), "of is 'logit'.*did you mean 'logits'"),
    "head": (lambda: PersonalLayers(Linear(5), Linear(4), **SETTINGS), r"head gives outputs of shape \(4,\)"),
    "models": (lambda: MAKERS["Mixture"](models=0), "models is 0; it must be a whole number of at least 1"),
    "test": (lambda: MAKERS["Mixture"](test={"inputs": TEST["inputs"]}), r"they need \['labels'\] too"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_explained(case):
    build, message = REFUSED[case]
    with pytest.raises(ProblemError, match=message):
        build()


# --------------------------------------------------------------------------- runs


def opposed(draw, count=40):
    """Two clients of the same inputs and opposite labels: what is right for one is wrong for the other."""
    inputs = draw.normal(size=(count, 2)).astype(np.float32)
    labels = (inputs[:, 0] > 0).astype(np.int32)
    return [{"inputs": inputs, "labels": labels}, {"inputs": inputs, "labels": 1 - labels}]


def test_clients_that_disagree_profit_from_mixtures_of_their_own():
    """Any one classifier for both has accuracies that add up to one, so the worst is at most a half."""
    clients = fb.Clients(opposed(np.random.default_rng(0)))
    problem = Mixture(Linear(2), inputs=(2,), classes=2, penalty=0.01)
    result = fb.solve(problem, clients, fb.FedBiO(4.0, 1.0, 0.2, upper="own"), 150, every=150)
    assert result.history[0]["accuracy_worst"] <= 0.5
    assert result.history[-1]["accuracy_worst"] > 0.9
    assert result.x[0].argmax() != result.x[1].argmax()


def mean_cost(problem, clients, x, y):
    """`mean f_i(x_i, y_i)` on all samples."""
    each = [problem.upper(row(x, i), row(y, i), arrays(samples)) for i, samples in enumerate(clients)]
    return float(np.mean(each))


@every_problem
def test_pdbo_lowers_the_outer_cost_of_each(name):
    """Nodes that have other classes; f is looked at on samples of its own, before and after."""
    draw = np.random.default_rng(5)
    lower, upper = ([own_classes(draw, first) for first in range(3)] for _ in range(2))
    problem = MAKERS[name](penalty=0.01)
    algorithm = fb.PDBO(fb.links.Complete(), 0.3, 40, fb.Adam(0.1), 10, alpha=None, beta=None)
    clients = fb.Clients(lower, upper)
    start, end = (fb.solve(problem, clients, algorithm, steps, every=max(steps, 1)) for steps in (0, 8))
    before, after = (mean_cost(problem, upper, found.x, found.y) for found in (start, end))
    assert not end.notes
    assert after < before - 0.01


def own_classes(draw, first, count=30):
    """Samples of which most are of one class, told by two of their numbers."""
    labels = draw.choice(CLASSES, size=count, p=np.roll([0.8, 0.1, 0.1], first)).astype(np.int32)
    inputs = draw.normal(size=(count, INPUTS)) + 1.5 * np.eye(CLASSES, INPUTS)[labels]
    return {"inputs": inputs.astype(np.float32), "labels": labels}
