"""A federation: the clients, how to choose among them, and how a step is run."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from fedbilevel.draw import below
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.place import Kept, Published, check_rows
from fedbilevel.tree import PyTree


class Federation(abc.ABC):
    """What an algorithm sees of the world: an argument of its `step`, never a global.

    Attributes:
        n: how many clients there are.
        problem: what is solved (its structure and starting point; no client's data).
    """

    n: int
    problem: Any

    @property
    @abc.abstractmethod
    def everyone(self) -> Cohort:
        """All clients."""

    def sample(self, key: jax.Array, size: int) -> Cohort:
        """`size` distinct clients, uniformly drawn."""
        if not 1 <= size <= self.n:
            raise ValueError(
                f"a cohort of {size} was asked for, but there are {self.n} clients; "
                f"choose between 1 and {self.n}, or None for everyone"
            )
        return self.everyone if size == self.n else self._sample(key, size)

    def cohort(self, key: jax.Array, size: int | None) -> Cohort:
        """`sample(key, size)`, or everyone if `size` is None."""
        return self.everyone if size is None else self.sample(key, size)

    @abc.abstractmethod
    def _sample(self, key: jax.Array, size: int) -> Cohort: ...

    @abc.abstractmethod
    def publish(self, value: PyTree, label: str) -> Published:
        """A server value that each client will download at most once (see `Cohort.read`)."""

    def keep(self, stacked: PyTree) -> Kept:
        """A value that every client keeps between rounds; row i of every leaf is client i's.

        This is the clients' own starting point and costs nothing.
        """
        check_rows(stacked, self.n, "keep")
        return self._keep(stacked)

    @abc.abstractmethod
    def _keep(self, stacked: PyTree) -> Kept: ...

    @abc.abstractmethod
    def stacked(self, kept: Kept) -> PyTree:
        """Every client's kept value as rows: to report or save a state. Not billed."""

    @abc.abstractmethod
    def compile(self, algorithm: Any) -> Any:
        """The algorithm ready to run on this federation: its `init`, and `advance` for many steps."""

    @abc.abstractmethod
    def loop(self, times: Any, body: Callable[[Any, PyTree], PyTree], carry: PyTree) -> PyTree:
        """`for i in range(times): carry = body(i, carry)`; `times` may be random."""


@functools.partial(jax.jit, static_argnames=("n", "size"))
def choose(key: Key[Array, ""], n: int, size: int) -> Int[Array, " {size}"]:
    """`size` distinct ids below `n`, uniformly over the subsets, ascending.

    R. W. Floyd's method: exact, with `size` random numbers and O(size²) comparisons, so that the
    cost of a small cohort does not depend on the number of clients; a large one is cut from a
    permutation.
    """
    if size * size > 64 * n:
        return jnp.sort(jax.random.permutation(key, n)[:size])
    tops = jnp.arange(n - size, n, dtype=jnp.int32)
    draws = below(key, (size,), tops + 1)

    def insert(index: jax.Array, chosen: jax.Array) -> jax.Array:
        taken = jnp.any(chosen == draws[index])
        return chosen.at[index].set(jnp.where(taken, tops[index], draws[index]))

    chosen = jax.lax.fori_loop(0, size, insert, jnp.full((size,), -1, draws.dtype))
    return jnp.sort(chosen)


def answers(
    key: Key[Array, ""], ids: Int[Array, " size"], dropout: float, had: Any = None
) -> Bool[Array, " size"] | Any:
    """Who has a result when each client fails with probability `dropout`: `(size,)` bool, or None.

    Drawn from each client's own key, so that every engine silences the same clients. If nobody
    would answer, everybody who could is asked again and answers.

    Args:
        key: the key of the run; client i folds its id into it.
        ids: `(size,)` ids of the cohort.
        dropout: probability of failing.
        had: who had the arguments, `(size,)` bool; None: everyone (None is returned likewise).
    """
    if dropout == 0:
        return had
    own = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, i), 0x5113))(ids)
    able = jnp.ones(ids.shape, bool) if had is None else had
    present = (jax.vmap(jax.random.uniform)(own) >= dropout) & able
    return jnp.where(jnp.any(present), present, able)
