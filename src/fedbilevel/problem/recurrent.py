"""A recurrent network for text: which character comes next."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Integer

from fedbilevel.number import check_count
from fedbilevel.problem.base import ProblemError
from fedbilevel.problem.model import Dense, Model, Shape
from fedbilevel.tree import PyTree


class CharLSTM(Model):
    """Layers of long short-term memory, and a head that sees the last state of the last layer.

    Inputs are codes of characters, `(samples, length)` whole numbers of 0..vocabulary−1; outputs are the
    logits of the character that follows, `(samples, vocabulary)`. A layer goes from left to right, with gates
    i, f, o, candidate c̃, state h and memory c, both zero at first:

        (i, f, c̃, o) = (σ, σ, tanh, σ)(input · W + h · R + b)
        c ← f ⊙ c + i ⊙ c̃,   h ← o ⊙ tanh(c)

    Parameters: `{"embedding": (vocabulary, embedding), "layers", "head": {"weight", "bias"}}`; layers is a
    tuple of `{"input": (in, 4 hidden), "recurrent": (hidden, 4 hidden), "bias"}`, gates in the order above.

    Weights start as those of `Dense`, of the embedding as standard normal numbers. The biases start at zero,
    but those of f at one: what is in the memory stays there until a layer has learnt to forget.

    Args:
        vocabulary: how many characters there are. A code beyond them is nobody's: it is embedded as zeros.
        embedding: numbers that a character becomes.
        hidden: length of the state of a layer.
        layers: how many.

    References: S. Hochreiter, J. Schmidhuber, Neural Computation 1997; R. Jozefowicz, W. Zaremba,
    I. Sutskever, ICML 2015 (the forget gate's bias); S. Caldas et al., LEAF, 2018 (these sizes).

    Example:
        >>> model = CharLSTM(vocabulary=5, hidden=16)
        >>> parameters, shape = model.init(jr.key(0), (80,))
        >>> shape, jax.eval_shape(model, parameters, jnp.zeros((2, 80), int)).shape
        ((5,), (2, 5))
    """

    vocabulary: int = eqx.field(static=True, default=80)
    embedding: int = eqx.field(static=True, default=8)
    hidden: int = eqx.field(static=True, default=256)
    layers: int = eqx.field(static=True, default=2)

    def __check_init__(self) -> None:
        for name in ("vocabulary", "embedding", "hidden", "layers"):
            check_count(name, getattr(self, name))

    def init(self, key: jax.Array, input_shape: Shape) -> tuple[PyTree, Shape]:
        if len(input_shape) != 1:
            raise ProblemError(f"a sample has the shape {input_shape}; a CharLSTM needs codes (length,)")
        k_embedding, k_head, *k_layers = jr.split(key, 2 + self.layers)
        widths = [self.embedding, *[self.hidden] * (self.layers - 1)]
        head, outputs = Dense(self.vocabulary).init(k_head, (self.hidden,))
        parameters = {
            "embedding": jr.normal(k_embedding, (self.vocabulary, self.embedding)),
            "layers": tuple(map(self._first_layer, k_layers, widths)),
            "head": head,
        }
        return parameters, outputs

    def __call__(self, parameters: PyTree, inputs: Integer[Array, "samples length"]) -> jax.Array:
        embedding = parameters["embedding"]
        # A product with one-hot rows in the place of a gather, whose derivatives are slow scatters.
        chosen = jax.nn.one_hot(inputs.T, self.vocabulary, dtype=embedding.dtype)
        states = chosen @ embedding
        for own in parameters["layers"]:
            states = lstm(own, states)
        return Dense(self.vocabulary)(parameters["head"], states[-1])

    def _first_layer(self, key: jax.Array, width: int) -> dict[str, jax.Array]:
        """The parameters that a layer starts with; the bias of the forget gates is the second quarter."""
        gates, (k_input, k_recurrent) = Dense(4 * self.hidden), jr.split(key)
        own = gates.init(k_input, (width,))[0]
        bias = own["bias"].at[self.hidden : 2 * self.hidden].set(1.0)
        recurrent = gates.init(k_recurrent, (self.hidden,))[0]["weight"]
        return {"input": own["weight"], "recurrent": recurrent, "bias": bias}


def lstm(
    parameters: dict[str, jax.Array], inputs: Float[Array, "length samples width"]
) -> Float[Array, "length samples hidden"]:
    """One layer of `CharLSTM`: its states after every step; time comes first."""
    hidden = parameters["recurrent"].shape[0]
    start = jnp.zeros((inputs.shape[1], hidden), inputs.dtype)
    # All steps' inputs at once: only the product that needs the last state is left for the loop.
    seen = inputs @ parameters["input"] + parameters["bias"]

    def advance(carry: tuple[jax.Array, jax.Array], part: jax.Array) -> tuple[PyTree, jax.Array]:
        state, memory = carry
        gate_in, forget, candidate, gate_out = jnp.split(part + state @ parameters["recurrent"], 4, axis=-1)
        memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(gate_in) * jnp.tanh(candidate)
        state = jax.nn.sigmoid(gate_out) * jnp.tanh(memory)
        return (state, memory), state

    return jax.lax.scan(advance, (start, start), seen)[1]
