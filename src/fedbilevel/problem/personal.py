"""Personalisation: x_i is client i's own, y is what the clients learn together.

    min_{x_1..x_n}  mean_i f_i(x_i, y*)        y* = argmin_y mean_i g_i(x_i, y)

What a client predicts depends on both variables; g is its training loss, f the loss by which its x_i is
chosen. Any algorithm can solve these problems; one with a single x for all clients finds the best x for all.

The first three are those of the paper that brings PDBO: Personalized decentralized bilevel optimization over
random directed networks, section 6 and table 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.name import check_choice
from fedbilevel.number import check_count
from fedbilevel.problem.accuracy import Accuracy, Classifier, CrossEntropy, check_classes, table
from fedbilevel.problem.base import Problem, ProblemError
from fedbilevel.problem.loss_tuning import OfModel
from fedbilevel.problem.model import Chain, Model, Shape
from fedbilevel.problem.objective import Objective
from fedbilevel.problem.personal_loss import (
    ClassWeightedLoss,
    MixtureOfModels,
    OnTableOfAll,
    OwnAndGlobal,
    OwnHead,
    OwnLoss,
    Part,
    ScaledLogits,
)
from fedbilevel.tree import PyTree


def ClassWeights(
    model: Model,
    *,
    inputs: tuple[int, ...],
    classes: int,
    of: str = "losses",
    penalty: float = 0.001,
    upper_penalty: float = 0.0,
    test: Mapping[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> Problem:
    """Own weights of the classes (PDBO-DA): clients choose what the shared model learns of their losses.

        g_i = mean_j C softmax(x_i)_label(j) CE_j(y) + (penalty/2)‖y‖²
        f_i = mean_j CE_j(y) + (upper_penalty/2)‖x_i‖²

    The classifier is the model y; x acts through `y*` alone, so that clients who agree on y predict alike.
    With `of="logits"` a client multiplies the logits instead, in training and when it predicts, and
    predictions are its own:

        l_i = mean_j CE(C softmax(x_i) ⊙ model(y, inputs_j), label_j)
        g_i = l_i + (penalty/2)‖y‖²,   f_i = l_i + (upper_penalty/2)‖x_i‖²

    x starts at zero: all weights are one. Samples are dicts
    `{"inputs": (samples, *inputs), "labels": (samples,)}`.

    Args:
        model: its parameters are y; one logit a class.
        inputs: the shape of one sample's inputs.
        classes: C, how many labels there are.
        of: what the weights are of, the "losses", as in the paper, or the "logits", as in a later revision
            of its authors' program.
        penalty: of the model's parameters.
        upper_penalty: of x; the paper has 0.
        test: columns `inputs` and `labels`: gives the metric `test_accuracy`, where clients have variables of
            their own as the mean over the clients, each of them on all test samples.
        seed: draws the parameters to start from.
        **options: as for `Problem`; `client_metrics` are `accuracy` and `loss` of each client's own
            classifier unless given.

    References: PDBO, section 6 (the bilevel problem); M. Duan et al., Astraea: self-balancing federated
    learning, ICCD 2019 (augmentation against imbalance).

    Example:
        >>> from fedbilevel.problem.model import Linear
        >>> ClassWeights(Linear(10), inputs=(28, 28, 1), classes=10).x0.shape
        (10,)
    """
    y0 = _drawn(model, inputs, classes, seed)
    classifier = _predicted(model, Part(), of)
    lower, upper = _trained(classifier, Part(), of, penalty), OwnLoss(classifier, upper_penalty)
    return _problem(upper, lower, (jnp.zeros(classes), y0), (inputs, classes, test), options)


def Mixture(
    model: Model,
    *,
    inputs: tuple[int, ...],
    classes: int,
    models: int = 3,
    penalty: float = 0.001,
    upper_penalty: float = 0.01,
    test: Mapping[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> Problem:
    """Own mixtures of shared models (PDBO-MTL): the mean of their probabilities, with weights `softmax(x_i)`.

        l_i = mean_j −log Σ_k softmax(x_i)_k softmax(model(y_k, inputs_j))_label(j)
        g_i = l_i + (penalty/2)‖y‖²,   f_i = l_i + (upper_penalty/2)‖x_i‖²

    x starts at zero: equal weights.

    Args:
        model: y holds `models` sets of its parameters, stacked; one logit a class.
        inputs, classes, test, seed, **options: as for `ClassWeights`. The models start at different draws.
        models: K, how many.
        penalty: of the models' parameters.
        upper_penalty: of x; the paper's is 0.01.

    References: PDBO, section 6; O. Marfoq et al., Federated multi-task learning under a mixture of
    distributions, NeurIPS 2021 (the models and their mixture).

    Example:
        >>> from fedbilevel.problem.model import Linear
        >>> problem = Mixture(Linear(10), inputs=(4,), classes=10)
        >>> problem.x0.shape, problem.y0["weight"].shape
        ((3,), (3, 4, 10))
    """
    y0 = _stacked(model, inputs, classes, models, seed)
    classifier = MixtureOfModels(OfModel(model), Part())
    lower, upper = CrossEntropy(classifier, penalty), OwnLoss(classifier, upper_penalty)
    return _problem(upper, lower, (jnp.zeros(models), y0), (inputs, classes, test), options)


def WeightedMixture(
    model: Model,
    *,
    inputs: tuple[int, ...],
    classes: int,
    models: int = 3,
    of: str = "losses",
    penalty: float = 0.001,
    class_penalty: float = 0.0005,
    mixture_penalty: float = 0.01,
    test: Mapping[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> Problem:
    """Own mixtures of shared models and own weights of the classes (PDBO-MTL&DA).

    x is `{"classes": (C,), "mixture": (K,)}`, at the start zero: see `ClassWeights` and `Mixture`.

    Args:
        model, inputs, classes, models, penalty, test, seed, **options: as for `Mixture`.
        of: as for `ClassWeights`; weights of the logits are those of every model.
        class_penalty, mixture_penalty: of the two parts of x; the paper's are 0.0005 and 0.01.

    Reference: PDBO, section 6.

    Example:
        >>> from fedbilevel.problem.model import Linear
        >>> problem = WeightedMixture(Linear(10), inputs=(4,), classes=10)
        >>> {name: part.shape for name, part in problem.x0.items()}
        {'classes': (10,), 'mixture': (3,)}
    """
    x0 = {"classes": jnp.zeros(classes), "mixture": jnp.zeros(models)}
    y0 = _stacked(model, inputs, classes, models, seed)
    classifier = MixtureOfModels(_predicted(model, Part("classes"), of), Part("mixture"))
    upper = OwnLoss(classifier, {"classes": class_penalty, "mixture": mixture_penalty})
    lower = _trained(classifier, Part("classes"), of, penalty)
    return _problem(upper, lower, (x0, y0), (inputs, classes, test), options)


def PersonalLayers(
    backbone: Model,
    head: Model,
    *,
    inputs: tuple[int, ...],
    classes: int,
    penalty: float = 0.001,
    upper_penalty: float = 0.001,
    test: Mapping[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> Problem:
    """Own heads x_i on a shared backbone y: `head(x_i, backbone(y, inputs))`.

        g_i = CE + (penalty/2)‖y‖²,   f_i = CE + (upper_penalty/2)‖x_i‖²

    Args:
        backbone: its parameters are y.
        head: its parameters are x; one logit a class. All clients start with the same one.
        inputs, classes, test, seed, **options: as for `ClassWeights`.
        penalty: of the backbone's parameters.
        upper_penalty: of the head's.

    Reference: M. G. Arivazhagan et al., Federated learning with personalization layers, arXiv:1912.00818,
    2019.

    Example:
        >>> from fedbilevel.problem.model import MLP, Linear
        >>> from fedbilevel.tree import size
        >>> backbone = MLP((200,), output_activation="relu")
        >>> problem = PersonalLayers(backbone, Linear(10), inputs=(28, 28, 1), classes=10)
        >>> size(problem.x0), size(problem.y0)
        (2010, 157000)
    """
    (y0, x0), outputs = Chain((backbone, head)).init(jr.key(seed), inputs)
    check_classes(outputs, classes, "head")
    classifier = OwnHead(backbone, head)
    lower, upper = CrossEntropy(classifier, penalty), OwnLoss(classifier, upper_penalty)
    return _problem(upper, lower, (x0, y0), (inputs, classes, test), options)


def Interpolation(
    model: Model,
    *,
    inputs: tuple[int, ...],
    classes: int,
    penalty: float = 0.001,
    upper_penalty: float = 0.001,
    test: Mapping[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> Problem:
    """An own model beside the global one y: the mean of their PROBABILITIES, with own weights σ(w), 1 − σ(w).

        g_i = CE(model(y)) + (penalty/2)‖y‖²
        f_i = CE(σ(w_i) softmax(model(own_i)) + (1 − σ(w_i)) softmax(model(y))) + (upper_penalty/2)‖own_i‖²

    x is `{"weight": w, "model": own}`. Outputs are interpolated, not parameters as in APFL (Deng et al.).
    g does not see x, so `y*` does not depend on it and the hypergradient is `∇_x f` alone, the direct one: a
    bilevel method computes its adjoint in vain here.

    Args:
        model: y and x["model"] are its parameters; both start at the same draw, with w = 0.
        inputs, classes, test, seed, **options: as for `ClassWeights`.
        penalty: of the global model's parameters.
        upper_penalty: of the own model's parameters; w has none.

    References: Y. Mansour et al., Three approaches for personalization with applications to federated
    learning, arXiv:2002.10619, 2020; Y. Deng, M. M. Kamani, M. Mahdavi, Adaptive personalized federated
    learning, arXiv:2003.13461, 2020.

    Example:
        >>> from fedbilevel.problem.model import Linear
        >>> sorted(Interpolation(Linear(10), inputs=(4,), classes=10).x0)
        ['model', 'weight']
    """
    y0 = _drawn(model, inputs, classes, seed)
    x0 = {"weight": jnp.zeros(()), "model": y0}
    lower = CrossEntropy(OfModel(model), penalty)
    upper = OwnLoss(OwnAndGlobal(model), {"model": upper_penalty})
    return _problem(upper, lower, (x0, y0), (inputs, classes, test), options)


# ------------------------------------------------------------- what they share


def _predicted(model: Model, weights: Part, of: str) -> Classifier:
    """What a model predicts, which has own weights where these are of the logits."""
    check_choice("of", of, ("losses", "logits"), ProblemError)
    return ScaledLogits(model, weights) if of == "logits" else OfModel(model)


def _trained(classifier: Classifier, weights: Part, of: str, penalty: float) -> Objective:
    """The training loss, which has own weights where these are of the losses."""
    if of == "losses":
        return ClassWeightedLoss(classifier, weights, penalty)
    return CrossEntropy(classifier, penalty)


def _drawn(model: Model, inputs: Shape, classes: int, seed: int) -> PyTree:
    parameters, outputs = model.init(jr.key(seed), inputs)
    check_classes(outputs, classes, "model")
    return parameters


def _stacked(model: Model, inputs: Shape, classes: int, models: int, seed: int) -> PyTree:
    """Parameters of several models, each drawn for itself, with a leading axis of models."""
    check_count("models", models, error=ProblemError)
    drawn = [model.init(key, inputs) for key in jr.split(jr.key(seed), models)]
    check_classes(drawn[0][1], classes, "model")
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(parameters for parameters, _ in drawn))


def _problem(
    upper: OwnLoss,
    lower: Objective,
    start: tuple[PyTree, PyTree],
    samples: tuple[Shape, int, Mapping[str, Any] | None],
    options: dict[str, Any],
) -> Problem:
    """The problem, with every client's own accuracy and loss, and the accuracy on all test samples.

    Args:
        upper: its classifier is what a client predicts with.
        lower: the training loss.
        start: x0 and y0.
        samples: the shape of their inputs, how many classes they have, and the test samples, if any.
        options: of `Problem`, in the place of these measures too.
    """
    inputs, classes, test = samples
    classifier = upper.classifier
    own: dict[str, Objective] = {"accuracy": Accuracy(classifier), "loss": CrossEntropy(classifier)}
    measures: dict[str, Any] = {"metrics": {}, "client_metrics": own}
    if test is not None:
        ranks = tuple(jnp.ndim(jax.tree.leaves(variable)[0]) for variable in start)
        whole = OnTableOfAll(own["accuracy"], table(test, inputs, classes), (ranks[0], ranks[1]))
        measures["metrics"] = {"test_accuracy": whole}
    return Problem(upper, lower, *start, classes=classes, **measures | options)
