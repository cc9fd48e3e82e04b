"""The ledger: what a run cost, in rounds, bytes, oracle calls and samples.

Costs are booked while an algorithm is traced. A `Meter` holds the bookings of one straight-line
block of traced code; `repeat` carries them through loops whose length may be random. Bookings are
counts of messages and calls, 32-bit within one step; they are multiplied by the bytes of a message
and the samples of a batch on the host, and summed over steps in Python integers.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

ORACLES = ("f", "f_x", "f_y", "g", "g_x", "g_y", "g_yy", "g_xy")
"""The kinds of oracle call that are counted."""


class Entry(NamedTuple):
    """One line of the account: `kind` is round, down, up, edge, call, samples or seconds."""

    kind: str
    label: str = ""
    unit: int = 1


Counts: TypeAlias = dict[Entry, Any]

ROUND = Entry("round")
SECONDS = Entry("seconds")
"""How long a step takes, where an engine has a model of time: the one entry that is no whole number."""


SIMULATED_SECONDS = "simulated_seconds"
"""The column of a history that says how long it took under simulated conditions, if any."""


class UncountedWorkError(RuntimeError):
    """Work was booked where it would be counted once, not once per iteration."""


class Meter:
    """The bookings of one straight-line block of traced code."""

    def __init__(self) -> None:
        self.counts: Counts = {}
        self.level = get_opaque_trace_state(convention="nnx")

    def add(self, entry: Entry, times: Any) -> None:
        self.counts[entry] = self.counts.get(entry, 0) + times


# A context variable, so that runs in several threads do not book on each other's meters.
_open: contextvars.ContextVar[tuple[Meter, ...]] = contextvars.ContextVar("meters", default=())


@contextlib.contextmanager
def metering() -> Iterator[Meter]:
    """Open a meter: what is booked inside is found in its `counts`."""
    meter = Meter()
    token = _open.set((*_open.get(), meter))
    try:
        yield meter
    finally:
        _open.reset(token)


def count(entry: Entry, times: Any = 1) -> None:
    """Book `times` units of `entry` on the innermost open meter (none open: nothing happens)."""
    if not _open.get():
        return
    meter = _open.get()[-1]
    if meter.level != get_opaque_trace_state(convention="nnx"):
        raise UncountedWorkError(
            f"{entry.label or entry.kind!r} was used inside a raw jax loop or transformation "
            "(lax.scan, lax.fori_loop, lax.cond, vmap, grad ...), where it would be counted once "
            "and not once per iteration. Use `fed.loop` in an algorithm and "
            "`fedbilevel.fed.repeat` in a local program; or `me.value`, which is not counted, and "
            "`me.count` outside of the transformation."
        )
    meter.add(entry, times)


def book(counts: Mapping[Entry, Any]) -> None:
    """Book a whole block's counts on the innermost open meter."""
    for entry, times in counts.items():
        count(entry, times)


def as_arrays(counts: Counts) -> Counts:
    """The counts as arrays (int32, seconds float32), so that loops and `vmap` can carry them."""
    return {
        entry: jnp.asarray(times, jnp.float32 if entry == SECONDS else jnp.int32)
        for entry, times in counts.items()
    }


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What has been spent. Ledgers add: `a + b` is the cost of doing both.

    Attributes:
        rounds: exchanges in which the server (or a neighbour) waits for the clients.
        down: bytes from the server to clients, by label.
        up: bytes from clients to the server, by label.
        edge: bytes from client to client, by label.
        calls: oracle calls of all clients, by kind (`f, f_x, f_y, g, g_x, g_y, g_yy, g_xy`).
        samples: samples read by these calls (a fused call reads its batch once).
        messages: from client to client, by label: how many links were used, with `edge/messages` bytes each.
        seconds: what it takes under simulated conditions; None where there is no model of time. No part of
            equality: it is a sum of real numbers, which may be added in another order.
    """

    rounds: int = 0
    down: Mapping[str, int] = dataclasses.field(default_factory=dict)
    up: Mapping[str, int] = dataclasses.field(default_factory=dict)
    edge: Mapping[str, int] = dataclasses.field(default_factory=dict)
    calls: Mapping[str, int] = dataclasses.field(default_factory=dict)
    samples: int = 0
    messages: Mapping[str, int] = dataclasses.field(default_factory=dict)
    seconds: float | None = None

    @classmethod
    def from_counts(cls, counts: Mapping[Entry, Any]) -> Ledger:
        """Total of booked counts; array values are summed exactly, in Python integers."""
        tables: dict[str, dict[str, int]] = {"down": {}, "up": {}, "edge": {}, "call": {}}
        messages: dict[str, int] = {}
        totals, seconds = {"round": 0, "samples": 0}, None
        for (kind, label, unit), times in counts.items():
            if kind == SECONDS.kind:
                seconds = float(np.sum(np.asarray(times, np.float64)))
                continue
            number = int(np.sum(np.asarray(times, np.int64)))
            if kind in totals:
                totals[kind] += number * unit
                continue
            tables[kind][label] = tables[kind].get(label, 0) + number * unit
            if kind == "edge":
                messages[label] = messages.get(label, 0) + number
        return cls(
            totals["round"],
            tables["down"],
            tables["up"],
            tables["edge"],
            tables["call"],
            totals["samples"],
            messages,
            seconds,
        )

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(
            self.rounds + other.rounds,
            _merge(self.down, other.down),
            _merge(self.up, other.up),
            _merge(self.edge, other.edge),
            _merge(self.calls, other.calls),
            self.samples + other.samples,
            _merge(self.messages, other.messages),
            _sum(self.seconds, other.seconds),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self._spent() == other._spent()

    def __hash__(self) -> int:
        return hash((self.rounds, self.samples))

    def _spent(self) -> tuple[Any, ...]:
        tables = (self.down, self.up, self.edge, self.calls, self.messages)
        return (self.rounds, self.samples, *({k: v for k, v in t.items() if v} for t in tables))

    @property
    def bytes(self) -> int:
        """Bytes in all directions."""
        return sum(sum(table.values()) for table in (self.down, self.up, self.edge))

    def columns(self) -> dict[str, int | float]:
        """The totals as one row of a table: rounds, bytes by direction, calls by kind, samples.

        And `simulated_seconds`, where there is a model of time.
        """
        row: dict[str, int | float] = {"rounds": self.rounds}
        for direction in ("down", "up", "edge"):
            row[f"bytes_{direction}"] = sum(getattr(self, direction).values())
        row |= {f"calls_{kind}": self.calls.get(kind, 0) for kind in ORACLES}
        time = {} if self.seconds is None else {SIMULATED_SECONDS: self.seconds}
        return row | {"samples": self.samples} | time

    def __str__(self) -> str:
        lines = [f"{self.rounds:,} rounds, {self.bytes:,} bytes, {self.samples:,} samples read"]
        if self.seconds is not None:
            lines[0] += f", {self.seconds:,.4g} simulated seconds"
        for title in ("down", "up", "edge", "calls"):
            table = {k: v for k, v in getattr(self, title).items() if v}
            if table:
                parts = [f"{label} {amount:,}" for label, amount in sorted(table.items())]
                lines.append(f"  {title:5} {', '.join(parts)}")
        if sum(self.messages.values()):
            lines.append(f"  links used {sum(self.messages.values()):,} times")
        return "\n".join(lines)


def _merge(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {label: a.get(label, 0) + b.get(label, 0) for label in sorted({*a, *b})}


def _sum(a: float | None, b: float | None) -> float | None:
    return a if b is None else b if a is None else a + b
