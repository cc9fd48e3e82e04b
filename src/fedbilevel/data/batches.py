"""Samples of all clients, stored once, and the minibatches drawn from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from fedbilevel.draw import below, shuffled
from fedbilevel.fed.loop import repeat
from fedbilevel.tree import PyTree


class Batch(eqx.Module):
    """Some samples of one client.

    Attributes:
        samples: pytree, leading axis = samples.
        weight: `(B,)` weights of the samples, summing to one; None: they are all alike.
        count: how many samples really count (a padded batch has fewer than its shape says).
        share: 1, but for the short last batch of a pass: its size over that of the others. A step is
            shortened by it, so that every sample of a pass moves the iterate alike.
    """

    samples: PyTree
    weight: Any = None
    count: Any = 0
    share: Any = 1.0


class Samples(eqx.Module):
    """The samples of all clients for one level: flat, with the place of each client's rows.

    Clients of unequal size cost no padding: client i owns rows `start[i] : start[i] + size[i]` of
    `rows` (or of `flat` itself where `rows` is None), and only minibatches are gathered.

    Attributes:
        flat: pytree, leading axis = all samples of all clients.
        start, size: `(clients,)` integers.
        rows: optional `(total,)` index into `flat`, so that several splits share one copy.
        batch_size: samples in a minibatch; None: all of a client's samples.
        longest, smallest: the extreme sizes over the whole federation.
    """

    flat: PyTree
    start: Any
    size: Any
    rows: Any
    batch_size: int | None = eqx.field(static=True)
    longest: int = eqx.field(static=True)
    smallest: int = eqx.field(static=True)

    @property
    def width(self) -> int:
        """The number of rows in a batch (static): the batch size, or the largest client's size."""
        return self.longest if self.batch_size is None else min(self.batch_size, self.longest)

    def batch(self, client: Any, key: jax.Array) -> Batch:
        """A minibatch, drawn independently and uniformly (with replacement) from a client's samples.

        A client with no more samples than the batch size uses all of them, once each.
        """
        size, places = self.size[client], jnp.arange(self.width)
        if self.width == self.longest:
            return self._pick(client, places, size)
        drawn = below(key, (self.width,), size)
        if self.smallest > self.width:
            return Batch(self._rows(client, drawn), count=self.width)
        whole = size <= self.width
        return self._pick(client, jnp.where(whole, places, drawn), jnp.minimum(size, self.width))

    def own(self, client: Any) -> Samples:
        """One client's samples alone, as client 0, padded to the longest client's size."""
        flat = self._rows(client, jnp.minimum(jnp.arange(self.longest), self.size[client] - 1))
        start, size = jnp.zeros(1, self.start.dtype), self.size[client][None]
        return Samples(flat, start, size, None, self.batch_size, self.longest, self.smallest)

    def batches_in_pass(self, client: Any) -> Any:
        """How many batches one pass over a client's samples takes; static if all clients agree."""
        most, least = -(-self.longest // self.width), -(-self.smallest // self.width)
        return most if most == least else -(-self.size[client] // self.width)

    def one_pass(
        self, client: Any, key: jax.Array, body: Callable[[Batch, PyTree], PyTree], carry: PyTree
    ) -> PyTree:
        """`carry = body(batch, carry)` over one shuffled pass of a client's samples."""
        order = self._shuffled(client, key)

        def visit(index: Any, carry: PyTree) -> PyTree:
            places = jax.lax.dynamic_slice(order, (index * self.width,), (self.width,))
            left = jnp.minimum(self.size[client] - index * self.width, self.width)
            share = jnp.asarray(left, float) / jnp.minimum(self.size[client], self.width)
            return body(self._pick(client, places, left, share), carry)

        return repeat(self.batches_in_pass(client), visit, carry)

    def _shuffled(self, client: Any, key: jax.Array) -> jax.Array:
        """A random order of a client's samples, its own rows first, filled up to whole batches."""
        return jnp.pad(shuffled(key, self.longest, self.size[client]), (0, -self.longest % self.width))

    def _pick(self, client: Any, places: jax.Array, count: Any, share: Any = 1.0) -> Batch:
        """The batch of the first `count` of the given places; the others weigh nothing."""
        samples = self._rows(client, jnp.minimum(places, self.size[client] - 1))
        if self.smallest == self.longest and self.longest % self.width == 0:
            return Batch(samples, count=self.width)
        # `float` is the widest real type in use; two int32 alone would give a float32.
        weight = (jnp.arange(self.width) < count) / jnp.asarray(count, float)
        return Batch(samples, weight, count, share)

    def _rows(self, client: Any, places: jax.Array) -> PyTree:
        rows = self.start[client] + places
        rows = rows if self.rows is None else self.rows[rows]
        return jax.tree.map(lambda leaf: leaf[rows], self.flat)


def weighted(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`function(*variables, samples)` as a function of `(*variables, batch)`.

    A padded batch is evaluated sample by sample and summed with its weights. So the function must
    be what an objective over data is: the mean over the samples of what one sample gives. A function that
    is not says itself what it is on weighted samples: `function.on_weighted(*variables, samples, weight)`.
    """

    def of_batch(*arguments: Any) -> jax.Array:
        *variables, batch = arguments
        if batch.weight is None:
            return function(*variables, batch.samples)
        if hasattr(function, "on_weighted"):
            return function.on_weighted(*variables, batch.samples, batch.weight)
        alone = jax.tree.map(lambda leaf: leaf[:, None], batch.samples)
        values = jax.vmap(lambda sample: function(*variables, sample))(alone)
        return jnp.tensordot(batch.weight.astype(values.dtype), values, axes=1)

    return of_batch


def in_blocks(compute: Callable[[Batch], PyTree], batch: Batch, size: int | None) -> PyTree:
    """`compute(batch)`, a mean over samples, as the mean of what blocks of at most `size` samples give.

    One block after another, and one sum: what a block needs can stay in a processor's cache, and memory is
    that of one block. None: all at once. The last block may be shorter.
    """
    length = len(jax.tree.leaves(batch.samples)[0])
    if size is None or length <= size:
        return compute(batch)
    rows = batch.samples, jnp.ones(length) / length if batch.weight is None else batch.weight
    whole = length - length % size

    def visit(total: PyTree, block: tuple[PyTree, jax.Array]) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, _share_of(compute, *block, alike=batch.weight is None)), None

    start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(compute, batch))
    blocks = jax.tree.map(lambda leaf: leaf[:whole].reshape(-1, size, *leaf.shape[1:]), rows)
    total = jax.lax.scan(visit, start, blocks)[0]
    rest = jax.tree.map(lambda leaf: leaf[whole:], rows)
    return visit(total, rest)[0] if whole < length else total


def _share_of(compute: Callable[[Batch], PyTree], samples: PyTree, weight: jax.Array, alike: bool) -> PyTree:
    """What a block adds to the mean: its own mean, times the sum of its weights."""
    share = jnp.sum(weight)
    # A block of padding alone weighs nothing, and must not divide by that.
    own = Batch(samples, None if alike else weight / jnp.where(share > 0, share, 1))
    return jax.tree.map(lambda leaf: share.astype(leaf.dtype) * leaf, compute(own))
