"""What simulated sites are asked to do in the tests of the NVFlare engine: importable by their processes."""

from __future__ import annotations

import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from fedbilevel.algorithm.base import TwoVariables, Variables
from fedbilevel.fed import Federation, Program
from fedbilevel.tree import PyTree

VICTIM = 1
NAP = 3.0


class Sleepy(Program):
    """`x ↦ id²`; the victim falls asleep when it is told to."""

    nap: float

    def __call__(self, me: Any, *values: Any) -> PyTree:
        awake = jax.pure_callback(_sleep_at_victim, jax.ShapeDtypeStruct((), jnp.bool_), me.id, self.nap)
        return jnp.where(awake, jnp.zeros_like(values[0]) + jnp.asarray(me.id, values[0].dtype) ** 2, 0)


def _sleep_at_victim(id: Any, nap: Any) -> Any:
    if int(id) == VICTIM:
        time.sleep(float(nap))
    return np.asarray(True)


class SleepyAverage(TwoVariables):
    """`x ← x + mean Sleepy(x)`; the victim sleeps in the first step, or in all of them."""

    nap: float
    once: bool = eqx.field(static=True, default=True)

    def at(self, time: Any) -> SleepyAverage:
        return SleepyAverage(0.0) if self.once and time != 0 else self

    def step(self, fed: Federation, state: Variables, key: jax.Array) -> tuple[Variables, Any]:
        everyone = fed.everyone
        value = everyone.run(Sleepy(self.nap), everyone.send(state.x, "x"), key=jr.key(0))
        return Variables(state.x + everyone.mean(value, "v"), state.y), {}


def samples(site: str) -> dict[str, Any]:
    """What each site has: other samples, and another number of them."""
    number = int(site.removeprefix("site-"))
    rng = np.random.default_rng(number)
    return {"lower": rng.normal(size=(2 + number, 3)).astype(np.float32)}
