"""Which device holds which clients, and their data placed there.

Device d of D holds the `per_device = ⌈n / D⌉` clients from number `d · per_device` on. Every array has as
many rows on each device: the last devices may hold places without a client, and a device whose clients
have fewer samples than another's is filled up. Nobody reads what fills them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh as DeviceMesh, NamedSharding, PartitionSpec

from fedbilevel.data.batches import Samples
from fedbilevel.data.clients import Clients
from fedbilevel.engine.mesh.join import MeshError, join
from fedbilevel.tree import PyTree

AXIS = "clients"
Numbers = npt.NDArray[Any]


def device_mesh(devices: int | None = None) -> DeviceMesh:
    """All devices of all processes in a row, or the first so many of a single process."""
    join()
    found = np.array(jax.devices())
    if devices is not None and jax.process_count() > 1:
        raise MeshError(f"devices is {devices}, but several processes use all of their devices: leave it out")
    if devices is not None and devices > len(found):
        raise MeshError(
            f"devices is {devices}, but there are {len(found)}. A CPU is one device, unless XLA_FLAGS has "
            f"--xla_force_host_platform_device_count={devices} before JAX starts."
        )
    return DeviceMesh(found[:devices], (AXIS,))


@dataclasses.dataclass(frozen=True)
class Layout:
    """n clients on the devices of a mesh with one axis.

    Attributes:
        devices: the mesh.
        n: how many clients there are.
    """

    devices: DeviceMesh
    n: int

    @property
    def per_device(self) -> int:
        """How many places for clients a device has."""
        return -(-self.n // self.devices.size)

    @property
    def split(self) -> NamedSharding:
        """Of arrays whose rows are spread over the devices."""
        return NamedSharding(self.devices, PartitionSpec(AXIS))

    @property
    def copied(self) -> NamedSharding:
        """Of arrays that every device holds."""
        return NamedSharding(self.devices, PartitionSpec())

    def of(self, device: int) -> npt.NDArray[np.int64]:
        """The clients of a device, ascending; none for places that are left over."""
        first = device * self.per_device
        return np.arange(min(first, self.n), min(first + self.per_device, self.n))

    @property
    def own(self) -> list[int]:
        """Numbers, in the mesh, of this process's devices."""
        here = jax.process_index()
        return [i for i, device in enumerate(self.devices.devices.flat) if device.process_index == here]

    # ------------------------------------------------------------------ arrays

    def everywhere(self, tree: PyTree) -> PyTree:
        """Arrays, alike in all processes, as arrays that every device holds."""

        def copy(leaf: Any) -> jax.Array:
            if getattr(leaf, "sharding", None) == self.copied:
                return leaf
            copies = [jax.device_put(leaf, device) for device in self.devices.local_devices]
            return jax.make_array_from_single_device_arrays(copies[0].shape, self.copied, copies)

        return jax.tree.map(
            lambda leaf: copy(leaf) if isinstance(leaf, jax.Array | np.ndarray) else leaf, tree
        )

    def spread(
        self, rows_of: Callable[[int], Numbers], length: int, shape: tuple[int, ...] = (), fill: int = 0
    ) -> jax.Array:
        """One array with `length` rows of a shape on each device; a process makes its own devices' only."""

        def block(index: Any) -> Numbers:
            rows = rows_of((index[0].start or 0) // length)
            return np.concatenate([rows, np.full((length - len(rows), *rows.shape[1:]), fill, rows.dtype)])

        return jax.make_array_from_callback((length * self.devices.size, *shape), self.split, block)

    def keep(self, stacked: PyTree) -> PyTree:
        """One row a client, spread over the devices."""

        def rows(leaf: Numbers) -> jax.Array:
            return self.spread(lambda device: leaf[self.of(device)], self.per_device, leaf.shape[1:])

        return jax.tree.map(lambda leaf: rows(np.asarray(jnp.asarray(leaf))), stacked)

    def stacked(self, kept: PyTree) -> PyTree:
        """What `keep` spread: one row a client, on this process's first device. All processes must ask."""
        whole = jax.tree.map(_gatherer(self.copied), kept)
        return jax.tree.map(lambda leaf: here(leaf)[: self.n], whole)

    # -------------------------------------------------------------------- data

    def clients(self, clients: Clients) -> Clients:
        """The clients with their samples where they belong, and without weights."""
        levels = (clients.lower, clients.upper, clients.test, clients.validation)
        placed = {id(level.start): self._samples(level) for level in levels}  # what levels share, once
        parts = [
            eqx.tree_at(_arrays, level, _arrays(placed[id(level.start)]), is_leaf=_is_none)
            for level in levels
        ]
        where = lambda c: (c.lower, c.upper, c.test, c.validation, c.weights)  # noqa: E731
        return eqx.tree_at(where, clients, (*parts, None), is_leaf=_is_none)

    def _samples(self, samples: Samples) -> Samples:
        start, size = np.asarray(samples.start), np.asarray(samples.size)
        places = [_places(start, size, self.of(device)) for device in range(self.devices.size)]
        if samples.rows is None:
            read, rows = places, None
        else:  # what several clients of a device share is there once
            pairs = [np.unique(np.asarray(samples.rows)[p], return_inverse=True) for p in places]
            read, inverse = [pair[0] for pair in pairs], [pair[1].astype(np.int32) for pair in pairs]
            rows = self.spread(inverse.__getitem__, max(map(len, inverse)))
        longest = max(map(len, read))
        return Samples(
            jax.tree.map(lambda leaf: self._rows(leaf, read, longest), samples.flat),
            self.spread(lambda device: _starts(size[self.of(device)]), self.per_device),
            # Nobody divides by the number of samples of a place without a client.
            self.spread(lambda device: size[self.of(device)], self.per_device, fill=1),
            rows,
            *(samples.batch_size, samples.longest, samples.smallest),
        )

    def _rows(self, leaf: Any, read: list[Numbers], longest: int) -> jax.Array:
        whole = np.asarray(leaf)
        return self.spread(lambda device: whole[read[device]], longest, whole.shape[1:])


def here(leaf: jax.Array) -> jax.Array:
    """An array that every device holds, as this process's own."""
    own: jax.Array = leaf.addressable_data(0)
    return own


@functools.cache
def _gatherer(copied: NamedSharding) -> Any:
    return jax.jit(jnp.asarray, out_shardings=copied)


def _arrays(samples: Samples) -> tuple[Any, ...]:
    return samples.flat, samples.start, samples.size, samples.rows


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _places(start: Numbers, size: Numbers, clients: Numbers) -> Numbers:
    """The places of all samples of some clients, one client after another."""
    parts = [np.arange(start[i], start[i] + size[i]) for i in clients]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _starts(size: Numbers) -> Numbers:
    ends = np.cumsum(size, dtype=np.int32)
    return ends - size.astype(np.int32)
