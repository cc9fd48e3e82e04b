"""The recurrent network against a plain loop, how it starts, and derivatives through time."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel.problem.base import ProblemError
from fedbilevel.problem.recurrent import CharLSTM
from fedbilevel.tree import all_finite, normal_like, size
from problem.second_order import check_clients_apart, check_second_derivatives

KEY = jr.key(0)
TINY = CharLSTM(vocabulary=5, embedding=3, hidden=4, layers=2)
CODES = jr.randint(jr.key(9), (3, 6), 0, 5)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def plain(parameters, codes):
    """One sample, one step, one layer at a time."""
    logits = []
    for text in np.asarray(codes):
        sequence = [parameters["embedding"][code] for code in text]
        for own in parameters["layers"]:
            hidden = len(own["recurrent"])
            state, memory, states = np.zeros(hidden), np.zeros(hidden), []
            for seen in sequence:
                z = seen @ own["input"] + state @ own["recurrent"] + own["bias"]
                enter, forget, candidate, leave = z.reshape(4, hidden)
                memory = sigmoid(forget) * memory + sigmoid(enter) * np.tanh(candidate)
                state = sigmoid(leave) * np.tanh(memory)
                states.append(state)
            sequence = states
        logits.append(sequence[-1] @ parameters["head"]["weight"] + parameters["head"]["bias"])
    return np.stack(logits)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_it_is_a_loop_over_samples_layers_and_steps(layers):
    model = CharLSTM(vocabulary=5, embedding=3, hidden=4, layers=layers)
    parameters = normal_like(jr.key(1), model.init(KEY, (6,))[0])
    expected = plain(jax.tree.map(np.asarray, parameters), CODES)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(jax.jit(model)(parameters, CODES), expected, atol=1e-12)


def test_the_usual_size():
    """An embedding of 80 · 8, layers of 4 · 256 gates, and a head."""
    parameters = jax.eval_shape(lambda key: CharLSTM().init(key, (80,))[0], KEY)
    layers = (8 + 256 + 1) * 1024 + (256 + 256 + 1) * 1024
    assert size(parameters) == 80 * 8 + layers + 257 * 80 == 817_872
    assert CharLSTM().init(KEY, (80,))[1] == (80,)


def test_the_start():
    parameters, _ = CharLSTM(hidden=64).init(KEY, (80,))
    for own in parameters["layers"]:
        enter, forget, candidate, leave = own["bias"].reshape(4, 64)
        assert np.all(forget == 1)
        assert not np.any([enter, candidate, leave])
        assert np.var(own["recurrent"]) == pytest.approx(2 / (64 + 256), rel=0.05)
    first, second = parameters["layers"]
    assert np.var(first["input"]) == pytest.approx(2 / (8 + 256), rel=0.1)
    assert np.var(parameters["embedding"]) == pytest.approx(1, rel=0.2)
    assert not np.allclose(first["recurrent"], second["recurrent"])
    assert not np.allclose(second["input"], second["recurrent"])


def test_long_texts_have_finite_logits_and_gradients_at_the_start():
    model = CharLSTM(hidden=16)
    parameters, _ = model.init(KEY, (200,))
    codes = jr.randint(KEY, (2, 200), 0, 80)
    value, slope = jax.jit(jax.value_and_grad(lambda p: jnp.sum(model(p, codes) ** 2)))(parameters)
    assert all_finite((value, slope))
    assert np.any(slope["embedding"])


def test_only_the_codes_seen_move_their_embeddings():
    parameters, _ = TINY.init(KEY, (2,))
    slope = jax.jit(jax.grad(lambda p: jnp.sum(TINY(p, jnp.array([[1, 3]])) ** 2)))(parameters)["embedding"]
    assert np.any(slope, axis=1).tolist() == [False, True, False, True, False]


@pytest.mark.usefixtures("float64")
def test_second_derivatives_go_through_time():
    check_second_derivatives(TINY, CODES)


@pytest.mark.usefixtures("float64")
def test_clients_with_weights_of_their_own_are_computed_apart():
    """All codes at each client, so that every row of the embedding counts."""
    codes = jr.randint(jr.key(9), (2, 4, 8), 0, 5)
    assert all(len(np.unique(own)) == 5 for own in codes)
    check_clients_apart(TINY, codes)


@pytest.mark.parametrize("name", ["vocabulary", "embedding", "hidden", "layers"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0; it must be a whole number of at least 1"):
        CharLSTM(**{name: 0})


def test_what_is_no_text_is_refused():
    with pytest.raises(ProblemError, match=r"shape \(28, 28, 1\); a CharLSTM needs codes \(length,\)"):
        CharLSTM().init(KEY, (28, 28, 1))
