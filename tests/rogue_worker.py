"""A client that misbehaves when the algorithm asks for it: run as a client's process by the tests.

Without a `Misbehave` program it is an honest client, so that all tests can share one pool.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from fedbilevel.algorithm.base import TwoVariables, Variables
from fedbilevel.engine.serve import main
from fedbilevel.engine.wire import decode, encode
from fedbilevel.engine.worker import Worker
from fedbilevel.fed import Federation, Program
from fedbilevel.tree import PyTree

VICTIM = 1
SLOW = 1.5
"""Seconds by which a slow victim's answers are late."""


class Misbehave(Program):
    """`x ↦ id²`; the victim does something else."""

    mode: str = eqx.field(static=True)

    def __call__(self, me: Any, *values: Any) -> PyTree:
        value = jnp.zeros_like(values[0]) + jnp.asarray(me.id, values[0].dtype) ** 2
        if self.mode == "nan":
            return jnp.where(me.id == VICTIM, jnp.nan, value)
        if self.mode == "raise":
            check = jax.ShapeDtypeStruct((), jnp.bool_)
            fine = jax.pure_callback(_raise_at_victim, check, me.id)
            return jnp.where(fine, value, 0)
        return value


def _raise_at_victim(id: Any) -> Any:
    if int(id) == VICTIM:
        raise ValueError("the sensor is unplugged")
    return np.asarray(True)


class Average(TwoVariables):
    """`x ← x + mean Misbehave(x)`: with everyone 5/3 a step, without the victim 2."""

    mode: str = eqx.field(static=True)

    def step(self, fed: Federation, state: Variables, key: jax.Array) -> tuple[Variables, Any]:
        everyone = fed.everyone
        value = everyone.run(Misbehave(self.mode), everyone.send(state.x, "x"), key=jr.key(0))
        return Variables(state.x + everyone.mean(value, "v"), state.y), {}


class RogueWorker(Worker):
    """Tampers with its replies, or never sends them."""

    def answer(self, message: bytes) -> bytes:
        reply = super().answer(message)
        modes = [p.mode for p in self.programs if isinstance(p, Misbehave)]
        if not modes or self.id != VICTIM or "configure" in decode(message)[0]:
            return reply
        return getattr(self, f"_{modes[0]}", lambda honest: honest)(reply)

    def _shape(self, reply: bytes) -> bytes:
        body, arrays = decode(reply)
        return encode(body, [np.concatenate([a.ravel(), a.ravel()]) for a in arrays])

    def _dtype(self, reply: bytes) -> bytes:
        body, arrays = decode(reply)
        return encode(body, [a.astype(np.float16) for a in arrays])

    def _garbage(self, reply: bytes) -> bytes:
        return bytes(range(256)) * 3

    def _truncated(self, reply: bytes) -> bytes:
        return reply[:-3]

    def _bill(self, reply: bytes) -> bytes:
        body, arrays = decode(reply)
        return encode(body | {"spent": [["round", "", 1, -5]]}, arrays)

    def _flood(self, reply: bytes) -> bytes:
        return bytes(8 << 20)

    def _die(self, reply: bytes) -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return reply

    def _slow(self, reply: bytes) -> bytes:
        time.sleep(SLOW)
        return reply

    def _sleep(self, reply: bytes) -> bytes:
        time.sleep(3600)
        return reply


if __name__ == "__main__":
    # By its real name, so that the server's and the client's classes are the same.
    from rogue_worker import RogueWorker as Rogue

    main(Rogue)
