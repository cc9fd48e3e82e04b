"""The mesh: the clients spread over the devices of one or several processes that trust each other."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fedbilevel.data.clients import Clients
from fedbilevel.engine.base import Block, Engine, Session, Stepper, check_dropout
from fedbilevel.engine.mesh.join import join, watching
from fedbilevel.engine.mesh.layout import AXIS, Layout, device_mesh, here
from fedbilevel.engine.mesh.load import load_clients
from fedbilevel.engine.mesh.shard import ShardFederation, spent_by_all, split_kept
from fedbilevel.engine.simulator import (
    ASKED_AT_ONCE,
    SimulatedFederation,
    SimulatedSession,
    answer,
    begin,
    simulate,
)
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.ledger import Counts
from fedbilevel.fed.place import Kept, PlacementError
from fedbilevel.problem.base import Problem
from fedbilevel.tree import PyTree


class Mesh(eqx.Module, Engine):
    """Spreads the clients over all devices of all processes: for those who outgrow one machine.

    The algorithm runs as in the simulator, with the same draws and the same ledger, and results agree to
    rounding. Every device computes its own clients and holds only their data; a `mean` is one all-reduce.

    Processes must trust each other: what they exchange is neither encrypted nor signed. They are started by
    `fedbilevel launch`, or by a cluster's scheduler (see `Mesh.join`).

    Args:
        chunk: how many clients a device computes at once; None: all it has. As in the simulator.
        dropout: probability that a client does not answer after a local computation.
        devices: how many devices to use, if not all; only within one process.
    """

    chunk: int | None = eqx.field(static=True, default=None)
    dropout: float = eqx.field(static=True, default=0.0)
    devices: int | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        for name in ("chunk", "devices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1, or None for all")
        check_dropout(self.dropout)

    @staticmethod
    def join() -> None:
        """Join the other processes of the mesh, before anything is computed; alone, do nothing.

        A script that is started several times calls it first, right after its imports; the command line does
        so by itself. Where to go is read from the environment: `JAX_COORDINATOR_ADDRESS` (host:port of
        process 0), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`, which `fedbilevel launch` sets, or what `srun`
        and `mpirun` say.
        """
        join()

    @staticmethod
    def clients(
        n: int,
        load: Callable[[int], Mapping[str, PyTree]],
        *,
        batch_size: int | None = None,
        weights: Any = "uniform",
    ) -> Clients:
        """n clients of whom each process loads only those that its devices will hold.

        With `Clients(...)` every process reads everybody's data, and only its devices hold their own alone.

        Args:
            n: how many clients there are.
            load: called with a client's number; returns `{"lower": tree}` and, where they differ, "upper",
                "test" and "validation": one pytree each, whose leaves have a leading axis of samples.
            batch_size, weights: as for `Clients`.

        >>> import numpy as np
        >>> clients = Mesh.clients(3, lambda i: {"lower": np.full((2 + i, 4), float(i))}, batch_size=2)
        >>> clients.lower.size.tolist()
        [2, 3, 4]
        """
        return load_clients(Layout(device_mesh(), n), load, batch_size, weights)

    @contextlib.contextmanager
    def connect(
        self, problem: Problem, clients: Clients, stepper: Stepper, probes: Sequence[Stepper] = ()
    ) -> Iterator[Session]:
        yield self.federation(problem, clients).compile(stepper)

    def federation(self, problem: Problem, clients: Clients) -> MeshFederation:
        """The clients, each with its data on its device."""
        layout = Layout(device_mesh(self.devices), clients.n)
        placed, weights = layout.clients(clients), layout.everywhere(clients.weights)
        return MeshFederation(
            layout.everywhere(problem), placed, self.chunk, self.dropout, layout=layout, weights=weights
        )


class MeshFederation(SimulatedFederation):
    """The federation as a process sees it from outside of a step: arrays spread over all devices.

    Attributes:
        layout: which device holds which clients.
        weights: of all clients.
    """

    layout: Layout = eqx.field(static=True, kw_only=True)
    weights: Any = eqx.field(kw_only=True)

    @property
    def n(self) -> int:  # type: ignore[override]
        return self.layout.n

    def shard(self, problem: Problem, clients: Clients, weights: Any) -> ShardFederation:
        """The federation as a device sees it, with its own part of `clients`."""
        own = eqx.tree_at(lambda c: c.weights, clients, weights, is_leaf=lambda leaf: leaf is None)
        devices = self.layout.devices.size
        return ShardFederation(problem, own, self.chunk, self.dropout, everybody=self.n, devices=devices)

    def _cohort(self, ids: jax.Array, token: str, weights: Any) -> Cohort:
        raise PlacementError(
            "a mesh has cohorts only while a step runs on its devices: use `solve`, or `compile(algorithm)`"
        )

    def _keep(self, stacked: PyTree) -> Kept:
        return Kept(self.layout.keep(stacked))

    def stacked(self, kept: Kept) -> PyTree:
        with watching():
            return self.layout.stacked(kept.value)

    def compile(self, algorithm: Stepper) -> Session:
        return MeshSession(self, algorithm)


class MeshSession(SimulatedSession):
    """An algorithm on a mesh: many steps are one compiled program, the same on every device.

    What the server knows is handed out as arrays of this process, what clients keep stays spread.
    """

    federation: MeshFederation

    def __init__(self, federation: MeshFederation, stepper: Stepper) -> None:
        super().__init__(federation, stepper)
        self.stepper = federation.layout.everywhere(self.stepper)

    def init(self, key: jax.Array) -> tuple[PyTree, Counts]:
        state, counts = self._call(_begin, self.federation, None, self.stepper, key)
        return state, counts

    def ask(self, probe: Stepper, state: PyTree, key: jax.Array) -> dict[str, Any]:
        fed = self.federation
        whole = eqx.tree_at(lambda fed: fed.clients, fed, fed.clients.whole())
        at_once = dataclasses.replace(whole, chunk=fed.chunk or ASKED_AT_ONCE, dropout=0.0)
        _, found = self._call(_answer, at_once, state, probe, key)
        return found

    def _advance(self, state: PyTree, key: jax.Array, first: int, steps: int, capacity: int) -> Block:
        times = jnp.asarray(first, int), jnp.asarray(steps, int)
        state, rest = self._call(_advance, self.federation, state, self.stepper, key, *times, capacity)
        return Block(state, int(rest.done), bool(rest.finite), rest.info, rest.counts)

    def _call(self, compiled: Any, fed: MeshFederation, state: PyTree, *rest: Any) -> tuple[PyTree, Any]:
        """Run on all devices and wait: a new state, and something that all devices know."""
        kept, shared = split_kept(state)
        everywhere = self.federation.layout.everywhere
        with watching():
            kept, known = jax.block_until_ready(compiled(fed, kept, *everywhere((shared, *rest))))
        shared, other = jax.tree.map(here, known)
        return eqx.combine(kept, shared), other


def _on_devices(function: Callable[..., tuple[PyTree, Any]]) -> Any:
    """`function(shard, state, *rest) -> (state, what all know)`, compiled, the same on every device.

    Called with the federation, the two parts of the state (`split_kept`) and the rest; returns what clients
    keep and, as a pair, the rest of the state and what all know.
    """

    @eqx.filter_jit
    def run(fed: MeshFederation, kept: PyTree, shared: PyTree, *rest: Any) -> Any:
        arrays, static = eqx.partition((fed.problem, fed.weights, shared, rest), eqx.is_array)

        def local(clients: Clients, kept: PyTree, arrays: PyTree) -> Any:
            problem, weights, shared, rest = eqx.combine(arrays, static)
            shard = fed.shard(problem, clients, weights)
            state, known = function(shard, eqx.combine(kept, shared), *rest)
            kept, shared = split_kept(jax.tree.map(jnp.asarray, state))
            return kept, (shared, known)

        own, all_alike = PartitionSpec(AXIS), PartitionSpec()
        # What is alike on all devices is so because they compute alike: nothing that JAX could check.
        everywhere = jax.shard_map(
            local,
            mesh=fed.layout.devices,
            in_specs=(own, own, all_alike),
            out_specs=(own, all_alike),
            check_vma=False,
        )
        return everywhere(fed.clients, kept, arrays)

    return run


@_on_devices
def _begin(shard: ShardFederation, _: None, stepper: Stepper, key: jax.Array) -> tuple[PyTree, Counts]:
    state, counts = begin(shard, stepper, key)
    return state, spent_by_all(counts)


@_on_devices
def _answer(shard: ShardFederation, state: PyTree, probe: Stepper, key: jax.Array) -> tuple[None, Any]:
    return None, answer(shard, probe, state, key)


@_on_devices
def _advance(shard: ShardFederation, state: PyTree, stepper: Stepper, *rest: Any) -> tuple[PyTree, Block]:
    block = simulate(shard, stepper, state, *rest)
    return block.state, block._replace(state=None, counts=spent_by_all(block.counts))
