"""An algorithm that uses every verb of a cohort: what no single method of the library does."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.algorithm import Algorithm
from fedbilevel.fed import Codec, Federation, Given, Kept, Program
from fedbilevel.tree import PyTree


class Half(Codec):
    """Every scalar as float16."""

    def encode(self, value: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float16), value)

    def decode(self, message: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.astype(float), message)


class Mixed(NamedTuple):
    x: jax.Array
    y: Kept


class Work(Program):
    """A step on the client's own y; returns it and its gradient."""

    lr: Any

    def __call__(self, me: Any, *values: Any) -> PyTree:
        x, y, share = values
        gradient = me.g_y(x, y, me.batch("lower", me.key))
        return {"y": y - self.lr * share * gradient, "gradient": gradient}


class EveryVerb(Algorithm[Mixed]):
    """No sensible method: it moves values in every way there is, and its result depends on all of them."""

    lr: float
    cohort: int | None = eqx.field(static=True, default=None)

    def init(self, fed: Federation, key: jax.Array) -> Mixed:
        rows = jnp.arange(fed.n, dtype=fed.problem.y0.dtype)[:, None] + fed.problem.y0
        return Mixed(fed.problem.x0, fed.keep(rows))

    def step(self, fed: Federation, state: Mixed, key: jax.Array) -> tuple[Mixed, dict[str, jax.Array]]:
        k_cohort, k_work = jr.split(key)
        cohort = fed.cohort(k_cohort, self.cohort)
        shares = jnp.linspace(0.5, 1.0, cohort.size)
        x, note = cohort.read(fed.publish(state.x, "x"))
        again, _ = fed.everyone.read(note)
        out = cohort.run(Work(self.lr), x, cohort.take(state.y), cohort.deal(shares, "share"), key=k_work)
        ring = Given(jnp.roll(jnp.eye(cohort.size), 1, axis=0) / 2 + jnp.eye(cohort.size) / 2)
        mixed = cohort.push(out["y"], ring, "y")
        kept = cohort.put(state.y, mixed)
        rows, _ = cohort.gather(out["gradient"], "gradient")
        coarse = cohort.mean(mixed, "coarse", codec=Half(), weight=shares)
        moved = state.x + 0.01 * jnp.mean(rows) + 1e-3 * jnp.mean(coarse)
        return Mixed((moved + fed.everyone.mean(again, "x")) / 2, kept), {"spread": jnp.std(rows)}

    def solution(self, state: Mixed) -> tuple[PyTree, PyTree]:
        return state.x, state.y
