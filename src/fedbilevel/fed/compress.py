"""Codecs that draw what they write: random entries, and few bits an entry."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.fed.codec import Form, RandomCodec
from fedbilevel.tree import PyTree


class RandomK(RandomCodec):
    """k entries at random places, over all leaves, as values and one 32-bit seed.

    The places are drawn anew for every message, without repetition, from the seed in it: both ends make
    them, so that they need not travel. `decode` puts zeros elsewhere. Every entry is as likely as any other,
    so that with the values times `d/k` the mean of all messages is the value itself, with `d/k − 1` times
    its square as variance.

    Attributes:
        k: how many entries are sent.
        form: of the tree.
        unbiased: values times `d/k`. Without, a message is nearer to the value than zero is, as error
            feedback needs: what was scaled up would come back larger and larger.

    Example:
        >>> codec = RandomK.like(jnp.zeros(4), k=2)
        >>> sent = codec.decode(codec.encode_with(jr.key(0), jnp.ones(4)))
        >>> sorted(sent.tolist())
        [0.0, 0.0, 2.0, 2.0]
    """

    k: int = eqx.field(static=True)
    form: Form
    unbiased: bool = eqx.field(static=True, default=True)

    @classmethod
    def like(cls, tree: PyTree, k: int | float, unbiased: bool = True) -> RandomK:
        """For trees of this form; `k` is a number of entries, or a share of all of them below 1."""
        form = Form.of(tree)
        return cls(form.entries(k), form, unbiased)

    def encode_with(self, key: jax.Array, value: PyTree) -> PyTree:
        seed, flat = jr.bits(key, (), jnp.uint32), self.form.flat(value)
        factor = flat.size / self.k if self.unbiased else 1.0
        return flat[self._places(seed)] * jnp.asarray(factor, flat.dtype), seed

    def decode(self, message: PyTree) -> PyTree:
        values, seed = message
        nothing = jnp.zeros(sum(self.form.sizes), values.dtype)
        return self.form.tree(nothing.at[self._places(seed)].set(values))

    def _places(self, seed: jax.Array) -> jax.Array:
        return jr.choice(jr.key(seed), sum(self.form.sizes), (self.k,), replace=False)


class Quantized(RandomCodec):
    """Every entry rounded to one of `2s + 1` levels, `s = 2^(bits − 1) − 1`, of its leaf's largest magnitude.

        v ↦ m/s · round(s v/m) ,   m = max |v| over the leaf

    Rounding is up or down at random, so that the mean of all messages is the value itself; the error of an
    entry is below `m/s`. On the wire: `bits` for each entry, one after another in bytes, and one m a leaf.

    Attributes:
        bits: of an entry, 2 to 16.
        form: of the tree.
        unbiased: round at random. Without, to the nearest level: then no entry's error is larger than the
            entry, as error feedback needs.

    Reference: D. Alistarh et al., QSGD: communication-efficient SGD via gradient quantization and encoding,
    NeurIPS 2017 (whose m is the norm, and whose levels are then coded by their frequency).

    Example:
        >>> codec = Quantized.like(jnp.zeros(5), bits=3)
        >>> message = codec.encode_with(jr.key(0), jnp.array([3.0, -2.0, 0.0, 1.0, -3.0]))
        >>> message[0].nbytes, codec.decode(message).tolist()
        (2, [3.0, -2.0, 0.0, 1.0, -3.0])
    """

    bits: int = eqx.field(static=True)
    form: Form
    unbiased: bool = eqx.field(static=True, default=True)

    def __check_init__(self) -> None:
        check_bits(self.bits)

    @classmethod
    def like(cls, tree: PyTree, bits: int, unbiased: bool = True) -> Quantized:
        """For trees of this form."""
        return cls(bits, Form.of(tree), unbiased)

    @property
    def _levels(self) -> int:
        """s: how many levels there are above zero."""
        return 2 ** (self.bits - 1) - 1

    def encode_with(self, key: jax.Array, value: PyTree) -> PyTree:
        leaves = [jnp.ravel(jnp.asarray(leaf)) for leaf in jax.tree.leaves(value)]
        largest = tuple(jnp.max(jnp.abs(leaf), initial=0) for leaf in leaves)
        # A leaf of zeros has no scale, and all its levels are zero.
        both = zip(leaves, largest, strict=True)
        scaled = [self._levels * leaf / jnp.where(m == 0, 1, m) for leaf, m in both]
        levels = self._rounded(key, jnp.concatenate(scaled)).astype(jnp.int32)
        return _packed(levels + self._levels, self.bits), largest

    def _rounded(self, key: jax.Array, numbers: jax.Array) -> jax.Array:
        if not self.unbiased:
            return jnp.round(numbers)
        below = jnp.floor(numbers)
        return below + (jr.uniform(key, numbers.shape, numbers.dtype) < numbers - below)

    def decode(self, message: PyTree) -> PyTree:
        packed, largest = message
        levels = _unpacked(packed, sum(self.form.sizes), self.bits) - self._levels
        shares = self.form.tree(levels.astype(jnp.result_type(float)))
        leaves, structure = jax.tree.flatten(shares)
        both = zip(leaves, largest, strict=True)
        return jax.tree.unflatten(structure, [leaf * m / self._levels for leaf, m in both])


def check_bits(bits: Any) -> None:
    """Raise an error that explains unless an entry can have so many bits."""
    if type(bits) is not int or not 2 <= bits <= 16:
        raise ValueError(f"bits is {bits!r}; it must be a whole number from 2 to 16")


def _packed(codes: jax.Array, bits: int) -> jax.Array:
    """Whole numbers of so many bits, one after another in bytes."""
    return jnp.packbits((codes[:, None] >> jnp.arange(bits)) & 1)


def _unpacked(packed: jax.Array, count: int, bits: int) -> jax.Array:
    """So many whole numbers again."""
    ones = jnp.unpackbits(packed, count=count * bits).reshape(count, bits)
    return jnp.sum(ones.astype(jnp.int32) << jnp.arange(bits), axis=1)
