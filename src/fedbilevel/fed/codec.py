"""Codecs: how a value is written for the wire. The ledger bills what `encode` returns."""

from __future__ import annotations

import abc
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.fed.program import Program
from fedbilevel.tree import PyTree, add, sub


class Codec(eqx.Module):
    """A pair of pure functions: `decode(encode(value))` approximates `value`."""

    @abc.abstractmethod
    def encode(self, value: PyTree) -> PyTree:
        """The message for a value: a pytree of arrays whose bytes are billed."""

    @abc.abstractmethod
    def decode(self, message: PyTree) -> PyTree:
        """The value that the receiver makes of a message."""


class RandomCodec(Codec):
    """A codec that draws: what it writes depends on a key, too. Verbs then need one: `mean(..., key=)`."""

    @abc.abstractmethod
    def encode_with(self, key: jax.Array, value: PyTree) -> PyTree:
        """The message for a value."""

    def encode(self, value: PyTree) -> PyTree:
        name = type(self).__name__
        raise TypeError(f"{name} draws what it writes: give it a key, `encode_with(key, value)`")


def written(codec: Codec, me: Any, value: PyTree) -> PyTree:
    """The message of a client for a value; a codec that draws does so with the client's key."""
    return codec.encode_with(me.key, value) if isinstance(codec, RandomCodec) else codec.encode(value)


class Dense(Codec):
    """The value itself, every scalar in its own dtype."""

    def encode(self, value: PyTree) -> PyTree:
        return value

    def decode(self, message: PyTree) -> PyTree:
        return message


class Form(eqx.Module):
    """The form of a tree of arrays, and the way to one vector of all its entries and back.

    Attributes:
        shapes, dtypes: of the leaves.
        structure: of the tree.
    """

    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    dtypes: tuple[str, ...] = eqx.field(static=True)
    structure: Any = eqx.field(static=True)

    @classmethod
    def of(cls, tree: PyTree) -> Form:
        """That of this tree."""
        leaves, structure = jax.tree.flatten(tree)
        shapes = tuple(jnp.shape(leaf) for leaf in leaves)
        return cls(shapes, tuple(jnp.result_type(leaf).name for leaf in leaves), structure)

    @property
    def sizes(self) -> list[int]:
        """The numbers of entries of the leaves."""
        return [math.prod(shape) for shape in self.shapes]

    def flat(self, tree: PyTree) -> jax.Array:
        """All entries of a tree, in one dtype that holds them all."""
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)])

    def tree(self, flat: jax.Array) -> PyTree:
        """The tree of a vector of all entries."""
        sizes = self.sizes
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        cut = zip(self.shapes, sizes, starts, self.dtypes, strict=True)
        leaves = [flat[at : at + size].reshape(shape).astype(dtype) for shape, size, at, dtype in cut]
        return jax.tree.unflatten(self.structure, leaves)

    def entries(self, k: int | float) -> int:
        """How many entries k stands for: a number of them, or a share of all below 1."""
        check_entries(k)
        total = sum(self.sizes)
        # Rounded first: 0.07 of 100 entries are 7, though the product is a little more.
        count = max(1, math.ceil(round(float(k) * total, 6))) if k < 1 else int(k)
        if not 1 <= count <= total:
            raise ValueError(f"k is {k}, but there are {total} entries: it must be between 1 and {total}")
        return count


def check_entries(k: Any) -> None:
    """Raise an error that explains unless k is a number of entries, or a share of them."""
    is_number = isinstance(k, int | float | np.integer | np.floating) and not isinstance(k, bool)
    whole = is_number and isinstance(k, int | np.integer) and k >= 1
    if not whole and not (is_number and 0 < k < 1):
        raise ValueError(f"k is {k!r}; it must be a whole number of at least 1, or a share in (0, 1)")


class TopK(Codec):
    """The k entries of largest magnitude, over all leaves, as values and 32-bit positions.

    `decode` puts zeros elsewhere. Make one with `TopK.like(tree, k)`, since a message alone does not tell
    the shape of what it stands for.

    Attributes:
        k: how many entries are sent.
        form: of the tree.

    Example:
        >>> codec = TopK.like({"a": jnp.zeros(3), "b": jnp.zeros(())}, k=2)
        >>> sent = codec.encode({"a": jnp.array([1.0, -5.0, 2.0]), "b": jnp.array(3.0)})
        >>> codec.decode(sent)["a"].tolist()
        [0.0, -5.0, 0.0]
    """

    k: int = eqx.field(static=True)
    form: Form

    @classmethod
    def like(cls, tree: PyTree, k: int | float) -> TopK:
        """For trees of this form; `k` is a number of entries, or a share of all of them below 1."""
        form = Form.of(tree)
        return cls(form.entries(k), form)

    def encode(self, value: PyTree) -> PyTree:
        flat = self.form.flat(value)
        _, places = jax.lax.top_k(jnp.abs(flat), self.k)
        return flat[places], places.astype(jnp.int32)

    def decode(self, message: PyTree) -> PyTree:
        values, places = message
        return self.form.tree(jnp.zeros(sum(self.form.sizes), values.dtype).at[places].set(values))


class Partial(Codec):
    """The value itself, of which every client holds a part of its own; billed by the bytes of that part.

    Rows of one shape are what engines compute with: the rest of a row must be zero, and is not billed.

    Attributes:
        bytes: of the message of every client of the federation, by its id: its part, and, unless both ends
            know already which part that is, what tells it, such as one bit for each kernel of a model.
    """

    bytes: tuple[int, ...] = eqx.field(static=True)

    def encode(self, value: PyTree) -> PyTree:
        return value

    def decode(self, message: PyTree) -> PyTree:
        return message


def message_size(codec: Codec | None, whole: int, ids: Any) -> Any:
    """The bytes of a message: one number, or `(size,)` where the codec says that clients have parts."""
    return jnp.asarray(codec.bytes)[ids] if isinstance(codec, Partial) else whole


def messages(codec: Codec | None, whole: int, ids: Any, who: Any) -> list[tuple[int, Any]]:
    """The sizes of a cohort's messages in bytes, and how many there are of each.

    Args:
        codec: how they are written.
        whole: bytes of a message, unless the codec says that clients have parts.
        ids: `(size,)` ids of the cohort.
        who: `(size,)` bool, who has one.
    """
    if not isinstance(codec, Partial):
        return [(whole, jnp.sum(who).astype(jnp.int32))]
    sizes = sorted(set(codec.bytes))
    kinds = jnp.asarray([sizes.index(own) for own in codec.bytes], jnp.int32)[ids]
    return [(own, jnp.sum(who & (kinds == kind)).astype(jnp.int32)) for kind, own in enumerate(sizes)]


class Feedback(Program):
    """A message for `value + memory`, and what it leaves out, to be remembered for the next one.

    So nothing is lost: the sum of all that was sent, and the memory, is the sum of all values.

    Reference: S. U. Stich, J.-B. Cordonnier, M. Jaggi, Sparsified SGD with memory, NeurIPS 2018.
    """

    codec: Codec

    def __call__(self, me: Any, *values: Any) -> PyTree:
        total = add(*values)
        message = written(self.codec, me, total)
        return message, sub(total, self.codec.decode(message))


class Encode(Program):
    """The local program that writes a client's value with a codec."""

    codec: Codec

    def __call__(self, me: Any, *values: Any) -> PyTree:
        return written(self.codec, me, values[0])
