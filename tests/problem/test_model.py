"""Models: their shapes, their functions, and how they start."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel.problem.model import MLP, Chain, Dense, Linear
from fedbilevel.tree import size

KEY = jr.key(0)
IMAGES = np.random.default_rng(0).uniform(size=(5, 4, 3, 2))


def relu(z):
    return np.maximum(z, 0)


def test_sizes_are_those_of_the_papers_networks() -> None:
    backbone, features = MLP((200,), output_activation="relu").init(KEY, (28, 28, 1))
    head, outputs = Linear(10).init(KEY, features)
    assert (size(backbone), size(head)) == (157_000, 2_010)
    assert (features, outputs) == ((200,), (10,))
    whole, _ = MLP((200, 100, 10)).init(KEY, (784,))
    assert size(whole) == 785 * 200 + 201 * 100 + 101 * 10


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("last", ["identity", "relu"])
def test_mlp_is_the_product_of_its_layers(last: str) -> None:
    """The last layer is activated only if asked for."""
    model = MLP((7, 6), activation="tanh", output_activation=last)
    parameters, _ = model.init(KEY, IMAGES.shape[1:])
    parameters = jax.tree.map(lambda leaf: leaf - 0.2, parameters)  # so that the biases are seen
    first, second = jax.tree.map(np.asarray, parameters)
    hidden = np.tanh(IMAGES.reshape(5, -1) @ first["weight"] + first["bias"])
    expected = hidden @ second["weight"] + second["bias"]
    assert np.any(expected < 0)
    found = model(parameters, jnp.asarray(IMAGES))
    np.testing.assert_allclose(found, relu(expected) if last == "relu" else expected, rtol=1e-12)


def test_a_chain_is_made_of_models_with_a_key_each() -> None:
    model = Chain((Dense(3, "relu"), Dense(3, "relu")))
    parameters, shape = model.init(KEY, (3,))
    assert shape == (3,)
    assert not np.allclose(parameters[0]["weight"], parameters[1]["weight"])
    inputs = jnp.ones((2, 3))
    step_by_step = model.models[1](parameters[1], model.models[0](parameters[0], inputs))
    np.testing.assert_array_equal(model(parameters, inputs), step_by_step)


@pytest.mark.parametrize(("activation", "variance"), [("relu", 2 / 400), ("identity", 2 / (400 + 300))])
def test_weights_start_as_the_docstring_says(activation: str, variance: float) -> None:
    """120,000 draws: their variance is within 2 % of the law's (five standard deviations)."""
    parameters, _ = Dense(300, activation).init(KEY, (20, 20))
    assert np.var(parameters["weight"]) == pytest.approx(variance, rel=0.02)
    assert not np.any(parameters["bias"])


def test_the_same_key_gives_the_same_parameters_and_another_key_others() -> None:
    model = MLP((4, 3))
    first, again, other = (model.init(key, (5,))[0] for key in (KEY, jr.key(0), jr.key(1)))
    assert jax.tree.all(jax.tree.map(np.array_equal, first, again))
    assert not np.array_equal(first[0]["weight"], other[0]["weight"])


REFUSED = {
    "no layers": (lambda: MLP(()), "sizes is empty"),
    "width 0": (lambda: MLP((200, 0)), "width of a layer is 0; it must be a whole number of at least 1"),
    "width True": (lambda: Linear(True), "width of a layer is True"),
    "near name": (lambda: Dense(3, "relo"), "activation is 'relo'; it must be .*did you mean 'relu'"),
    "unknown name": (lambda: MLP((3,), output_activation="cube"), "it must be one of 'identity', 'relu'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_make_no_model_are_refused(case: str) -> None:
    build, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        build()
