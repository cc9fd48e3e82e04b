"""Loops and branches that know what their bodies spend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from fedbilevel.fed.ledger import Counts, as_arrays, book, metering
from fedbilevel.tree import PyTree


def trace_once(function: Callable[..., PyTree], *examples: PyTree) -> tuple[Callable[..., PyTree], PyTree]:
    """`function`, its Python run only now, and the shapes of what it returns.

    A loop must know the shapes that its body returns before it can be built. Without this the body
    would be traced once to find them and once to use it, and nested loops would double each other.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*examples)
    treedef, flat_function = jax.tree.structure(shapes), jaxpr_as_fun(closed)

    def replay(*arguments: PyTree) -> PyTree:
        return jax.tree.unflatten(treedef, flat_function(*jax.tree.leaves(arguments)))

    return replay, shapes


def zeros(shapes: PyTree, *leading: int) -> PyTree:
    """Zeros of the given shapes, each with extra leading axes."""
    return jax.tree.map(lambda leaf: jnp.zeros((*leading, *leaf.shape), leaf.dtype), shapes)


def repeat(times: Any, body: Callable[[Any, PyTree], PyTree], carry: PyTree) -> PyTree:
    """`for i in range(times): carry = body(i, carry)`, compiled, with its cost booked.

    A `lax.fori_loop` that also carries the counts of its body, so that random and per-client
    numbers of iterations are billed exactly.

    Args:
        times: number of iterations; an integer or a traced scalar.
        body: `(i, carry) -> carry`, pure; may use counted oracles and verbs.
        carry: any pytree of fixed shapes.
    """
    # Arrays from the start: a Python number would change its type after the first iteration.
    carry = jax.tree.map(jnp.asarray, carry)

    def metered(index: Any, carry: PyTree) -> tuple[PyTree, Counts]:
        with metering() as meter:
            carry = body(index, carry)
        return carry, as_arrays(meter.counts)

    staged, (_, counts) = trace_once(metered, jnp.zeros((), jnp.int32), carry)

    def advance(index: Any, carried: tuple[PyTree, Counts]) -> tuple[PyTree, Counts]:
        carry, spent = staged(jnp.asarray(index, jnp.int32), carried[0])
        return carry, jax.tree.map(jnp.add, carried[1], spent)

    carry, total = jax.lax.fori_loop(0, times, advance, (carry, zeros(counts)))
    book(total)
    return carry


def branch(index: Any, branches: Sequence[Callable[[], PyTree]]) -> PyTree:
    """What the branch of that number returns, with its cost booked and nobody else's.

    Under `vmap` all branches are computed and one is chosen; the bill is still that of the chosen one.

    Args:
        index: which; an integer or a traced scalar.
        branches: functions without arguments; their results must have the same form.
    """

    def metered(run: Callable[[], PyTree]) -> Callable[[], tuple[PyTree, Counts]]:
        def inside() -> tuple[PyTree, Counts]:
            with metering() as meter:
                out = jax.tree.map(jnp.asarray, run())
            return out, as_arrays(meter.counts)

        return inside

    staged = [trace_once(metered(run)) for run in branches]
    nothing = {entry: jnp.zeros((), jnp.int32) for _, (_, counts) in staged for entry in counts}

    def complete(replay: Callable[[], PyTree]) -> Callable[[], tuple[PyTree, Counts]]:
        def inside() -> tuple[PyTree, Counts]:
            out, counts = replay()
            return out, nothing | counts

        return inside

    out, counts = jax.lax.switch(index, [complete(replay) for replay, _ in staged])
    book(counts)
    return out
