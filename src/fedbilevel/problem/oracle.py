"""The client as a local program sees it: its own data, key and counted oracles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp

from fedbilevel.data.batches import Batch, Samples, in_blocks
from fedbilevel.data.clients import LEVELS, Clients
from fedbilevel.fed.ledger import ORACLES, Entry, count
from fedbilevel.problem.base import Problem, objective
from fedbilevel.problem.objective import OnFeatures, Separable
from fedbilevel.tree import PyTree, row

_FEW = 4
"""Up to so many vectors of a stack are multiplied one after another. All at once they make stacks of matrix
products, whose transposes XLA copies on a CPU, in the place of folding them into the products."""

Stacks: TypeAlias = tuple[PyTree, ...]
"""Some stacks of vectors like y, each with one leading axis."""


class Client:
    """One client: `me` in a local program. It never sees another client's data.

    Attributes:
        id: its number in the federation.
        key: its own random key of this run.
        problem: what is solved.

    Every oracle takes the batch it is evaluated on, so `me.g_y(x, y, zeta)` is `∇_y g_i(x, y; ζ)`.
    No matrix is ever formed: second-order oracles are products with a vector `v` like y.
    """

    def __init__(self, problem: Problem, clients: Clients, place: Any, id: Any, key: jax.Array) -> None:
        self.problem, self.id, self.key = problem, id, key
        self._clients, self._place = clients, place

    def rekeyed(self, stage: Any) -> Client:
        """This client with a key of its own for one stage of a longer program."""
        key = jax.random.fold_in(self.key, stage)
        return Client(self.problem, self._clients, self._place, self.id, key)

    def with_batches_of(self, size: int | None) -> Client:
        """This client with minibatches of another size; None: all of its samples."""
        return Client(self.problem, self._clients.batched(size), self._place, self.id, self.key)

    def at_fixed(self, x: PyTree, level: str) -> Client:
        """This client for work at one x: an objective's features of x and its samples are computed now, once.

        Only a `Separable` objective has them; for any other this is the client as it is.
        """
        function = getattr(self.problem, level)
        if not isinstance(function, Separable):
            return self
        own = self._samples(level).own(self._place)
        seen = eqx.tree_at(lambda samples: samples.flat, own, function.features(x, own.flat))
        clients = eqx.tree_at(lambda clients: getattr(clients, level), self._clients, seen)
        changed: dict[str, Any] = {level: OnFeatures(function)}
        problem = dataclasses.replace(self.problem, **changed)
        return Client(problem, clients, 0, self.id, self.key)

    # --------------------------------------------------------------- batches

    def input_shape(self, level: str) -> tuple[int, ...] | None:
        """The shape of one sample in the column `inputs` of a level; None: there is none."""
        return self._clients.input_shape(level)

    def batch(self, level: str, key: jax.Array) -> Batch:
        """An independent minibatch of this client's own data."""
        return self._samples(level).batch(self._place, key)

    def batches_in_pass(self, level: str) -> Any:
        """How many batches a pass over this client's data takes."""
        return self._samples(level).batches_in_pass(self._place)

    def largest(self, level: str) -> tuple[int, int]:
        """How many samples a minibatch has, and the largest client of the federation: 0 if nobody has any."""
        samples = self._samples(level)
        return samples.width, samples.longest

    def one_pass(self, level: str, key: jax.Array, body: Any, carry: PyTree) -> PyTree:
        """`carry = body(batch, carry)` over one shuffled pass of this client's data."""
        return self._samples(level).one_pass(self._place, key, body, carry)

    # --------------------------------------------------------------- oracles

    def f(self, x: PyTree, y: PyTree, batch: Batch) -> jax.Array:
        """`f_i(x, y)`, a scalar."""
        self.count(batch, "f")
        value: jax.Array = self._mean("upper", self._f, batch, x, y)
        return value

    def f_x(self, x: PyTree, y: PyTree, batch: Batch) -> PyTree:
        """`∇_x f_i`, like x."""
        self.count(batch, "f_x")
        return self._mean("upper", jax.grad(self._f), batch, x, y)

    def f_y(self, x: PyTree, y: PyTree, batch: Batch) -> PyTree:
        """`∇_y f_i`, like y."""
        self.count(batch, "f_y")
        return self._mean("upper", jax.grad(self._f, argnums=1), batch, x, y)

    def f_x_and_y(self, x: PyTree, y: PyTree, batch: Batch) -> tuple[PyTree, PyTree]:
        """`(∇_x f_i, ∇_y f_i)` in one backward pass."""
        self.count(batch, "f_x", "f_y")
        both: tuple[PyTree, PyTree] = self._mean("upper", jax.grad(self._f, argnums=(0, 1)), batch, x, y)
        return both

    def g(self, x: PyTree, y: PyTree, batch: Batch) -> jax.Array:
        """`g_i(x, y)`, a scalar."""
        self.count(batch, "g")
        value: jax.Array = self._mean("lower", self._g, batch, x, y)
        return value

    def g_x(self, x: PyTree, y: PyTree, batch: Batch) -> PyTree:
        """`∇_x g_i`, like x: what first-order methods with a penalty need."""
        self.count(batch, "g_x")
        return self._mean("lower", jax.grad(self._g), batch, x, y)

    def g_y(self, x: PyTree, y: PyTree, batch: Batch) -> PyTree:
        """`∇_y g_i`, like y."""
        self.count(batch, "g_y")
        return self._mean("lower", jax.grad(self._g, argnums=1), batch, x, y)

    def g_x_and_y(self, x: PyTree, y: PyTree, batch: Batch) -> tuple[PyTree, PyTree]:
        """`(∇_x g_i, ∇_y g_i)` in one backward pass."""
        self.count(batch, "g_x", "g_y")
        both: tuple[PyTree, PyTree] = self._mean("lower", jax.grad(self._g, argnums=(0, 1)), batch, x, y)
        return both

    def g_y_change(self, x: PyTree, start: PyTree, y: PyTree, batch: Batch) -> PyTree:
        """`∇_y g_i(x, y) − ∇_y g_i(x, start)`: two calls, which share what they read and compute of x."""
        self.count(batch, "g_y")
        self.count(batch, "g_y")
        both = jax.tree.map(lambda *pair: jnp.stack(pair), y, start)
        each = jax.vmap(jax.grad(self._g, argnums=1), in_axes=(None, 0, None))
        slopes = self._mean("lower", each, batch, x, both)
        return jax.tree.map(lambda leaf: leaf[0] - leaf[1], slopes)

    def g_yy(self, x: PyTree, y: PyTree, v: PyTree, batch: Batch) -> PyTree:
        """`H_i v = ∇²_yy g_i · v`, like y: reverse over forward, about two gradients."""
        self.count(batch, "g_yy")
        return self._mean("lower", jax.grad(self._slope, argnums=1), batch, x, y, v)

    def g_xy(self, x: PyTree, y: PyTree, v: PyTree, batch: Batch) -> PyTree:
        """`J_i v = ∇_x ⟨∇_y g_i(x, y), v⟩`, like x: reverse over forward, about two gradients."""
        self.count(batch, "g_xy")
        return self._mean("lower", jax.grad(self._slope), batch, x, y, v)

    def g_xy_and_yy(self, x: PyTree, y: PyTree, v: PyTree, batch: Batch) -> tuple[PyTree, PyTree]:
        """`(J_i v, H_i v)` in one backward pass through the slope of g along v."""
        self.count(batch, "g_xy", "g_yy")
        both: tuple[PyTree, PyTree] = self._mean(
            "lower", jax.grad(self._slope, argnums=(0, 1)), batch, x, y, v
        )
        return both

    def g_xy_each(self, x: PyTree, y: PyTree, vectors: Stacks, batch: Batch) -> Stacks:
        """`J_i v` for every v of some stacks; they share the work at `(x, y)`."""
        self.count(batch, *("g_xy",) * _many(vectors))
        products: Stacks = self._mean("lower", _each(jax.grad(self._slope)), batch, x, y, vectors)
        return products

    def g_yy_each(self, x: PyTree, y: PyTree, vectors: Stacks, batch: Batch) -> Stacks:
        """`H_i v` for every v of some stacks; they share the work at `(x, y)`."""
        self.count(batch, *("g_yy",) * _many(vectors))
        product = _each(jax.grad(self._slope, argnums=1))
        products: Stacks = self._mean("lower", product, batch, x, y, vectors)
        return products

    def g_yx_each(self, x: PyTree, y: PyTree, directions: PyTree, batch: Batch) -> PyTree:
        """`∂_x ∇_y g_i · d`, like y, for every d (like x) of a stack; counted as g_xy."""
        self.count(batch, *("g_xy",) * jax.tree.leaves(directions)[0].shape[0])

        def along(d: PyTree, own: Batch) -> PyTree:
            return jax.jvp(lambda x: jax.grad(self._g, argnums=1)(x, y, own), (x,), (d,))[1]

        return self._mean("lower", jax.vmap(along, in_axes=(0, None)), batch, directions)

    def g_xy_and_yy_each(self, x: PyTree, y: PyTree, vectors: Stacks, batch: Batch) -> tuple[Stacks, Stacks]:
        """`(J_i v, H_i v)` for every v of some stacks; they share the work at `(x, y)`."""
        self.count(batch, *("g_xy", "g_yy") * _many(vectors))
        product = _each(jax.grad(self._slope, argnums=(0, 1)))
        jv, hv = zip(*self._mean("lower", product, batch, x, y, vectors), strict=True)
        return jv, hv

    # ------------------------------------------------- for oracles of your own

    def value(self, level: str, x: PyTree, y: PyTree, batch: Batch) -> jax.Array:
        """f (`"upper"`) or g (`"lower"`) on a batch, not counted: to differentiate, or for use inside `vmap`.

        Say what it costs with `count`, once, outside of any transformation.
        """
        return objective(self.problem, _named(level, ("upper", "lower"), "level"), x, y, batch)

    def count(self, batch: Any, *kinds: str) -> None:
        """Book one oracle call of each kind, and one reading of the batch's samples."""
        if not isinstance(batch, Batch):
            raise TypeError(
                f"an oracle was called with {type(batch).__name__} in the place of a batch; it needs the "
                '`Batch` that `me.batch("lower", key)` gives, not its samples alone'
            )
        for kind in kinds:
            count(Entry("call", _named(kind, ORACLES, "kind of oracle call")))
        if isinstance(batch.count, int):  # in the unit, which is multiplied on the host and cannot overflow
            count(Entry("samples", "", batch.count))
        else:
            count(Entry("samples"), batch.count)

    def _samples(self, level: str) -> Samples:
        """All clients' samples of a level: where this client's own are taken from."""
        return getattr(self._clients, _named(level, LEVELS, "level"))

    def _mean(self, level: str, compute: Callable[..., PyTree], batch: Batch, *at: PyTree) -> PyTree:
        """`compute(*at, batch)`, in blocks of samples where the problem asks for them."""
        return in_blocks(lambda own: compute(*at, own), batch, self.problem.block_of(level))

    def _f(self, x: PyTree, y: PyTree, batch: Batch) -> jax.Array:
        return objective(self.problem, "upper", x, y, batch)

    def _g(self, x: PyTree, y: PyTree, batch: Batch) -> jax.Array:
        return objective(self.problem, "lower", x, y, batch)

    def _slope(self, x: PyTree, y: PyTree, v: PyTree, batch: Batch) -> jax.Array:
        """`⟨∇_y g_i(x, y), v⟩` without the gradient: a forward derivative along v."""
        return jax.jvp(lambda y: self._g(x, y, batch), (y,), (v,))[1]


def _named(name: str, names: tuple[str, ...], what: str) -> str:
    """The name, if it is one of these."""
    if name not in names:
        raise ValueError(f"there is no {what} {name!r}; there are {', '.join(names)}")
    return name


def _many(stacks: Stacks) -> int:
    """How many vectors there are."""
    return sum(len(jax.tree.leaves(stack)[0]) for stack in stacks)


def _each(product: Callable[..., PyTree]) -> Callable[..., Stacks]:
    """`product(x, y, v, batch)` for every vector v of some stacks."""

    def of_stack(x: PyTree, y: PyTree, stack: PyTree, batch: Batch) -> PyTree:
        if (many := _many((stack,))) > _FEW:
            return jax.vmap(lambda v: product(x, y, v, batch))(stack)
        found = [product(x, y, row(stack, place), batch) for place in range(many)]
        return jax.tree.map(lambda *own: jnp.stack(own), *found)

    return lambda x, y, stacks, batch: tuple(of_stack(x, y, stack, batch) for stack in stacks)
