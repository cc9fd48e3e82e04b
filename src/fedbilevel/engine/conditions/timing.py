"""How long things take: the speed of clients and of their links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from fedbilevel.engine.conditions.per_client import LogNormal, Numbers, amount, check_count
from fedbilevel.fed.ledger import Counts

Seconds = Float[Array, " size"]


class Speed(eqx.Module):
    """How fast clients compute: `call` seconds for every oracle call and `sample` for every sample it reads.

    The two are the coefficients of a line through measured times of programs; everything else that a
    client does is taken to be free.

    Args:
        call, sample: a number, one for each client, or `LogNormal(...)`.
    """

    call: LogNormal
    sample: LogNormal

    def __init__(self, call: Numbers | LogNormal = 0.0, sample: Numbers | LogNormal = 0.0) -> None:
        self.call, self.sample = amount(call, "call"), amount(sample, "sample")

    def seconds(self, key: Key[Array, ""], ids: Int[Array, " size"], spent: Counts) -> Seconds:
        """How long clients need for what they spent, `(size,)` counts."""
        k_call, k_sample = jax.random.split(key)
        calls, samples = (_total(kind, ids, spent) for kind in ("call", "samples"))
        return self.call.draw(k_call, ids) * calls + self.sample.draw(k_sample, ids) * samples

    def check(self, n: int) -> None:
        """Raise an error that explains unless this can be said of n clients."""
        for name in ("call", "sample"):
            check_count(getattr(self, name).median, f"speed.{name}", n)


class Link(eqx.Module):
    """A client's way to the others: a message of b bytes takes `latency + b / bandwidth` seconds.

    Args:
        latency: seconds that a message is under way, one way, whatever its size.
        up: bytes a second that a client can send.
        down: bytes a second that it can receive.

    Each is a number, one for each client, or `LogNormal(...)`.
    """

    latency: LogNormal
    up: LogNormal
    down: LogNormal

    def __init__(
        self,
        latency: Numbers | LogNormal = 0.0,
        up: Numbers | LogNormal = np.inf,
        down: Numbers | LogNormal = np.inf,
    ) -> None:
        self.latency = amount(latency, "latency")
        self.up, self.down = amount(up, "up", _SLOWEST), amount(down, "down", _SLOWEST)

    @classmethod
    def measured(cls, exchanges: Sequence[Mapping[int, float]], n: int) -> Self:
        """A link that takes as long as was measured, whatever is sent and computed.

        Its latency is half the median of a client's exchanges, there and back.

        Args:
            exchanges: for each exchange the seconds that each client took, as `Process.exchanges` has them.
            n: how many clients there are; each must be in an exchange.
        """
        taken = [[seconds[i] for seconds in exchanges if i in seconds] for i in range(n)]
        unseen = [i for i, seconds in enumerate(taken) if not seconds]
        if unseen:
            raise ValueError(f"nothing was measured of clients {unseen}: they took part in no exchange")
        return cls(latency=[float(np.median(seconds)) / 2 for seconds in taken])

    def there_and_back(self, key: Key[Array, ""], ids: Int[Array, " size"], size: Any) -> Seconds:
        """The latency of a question and its answer, and the time that an answer of `size` bytes needs."""
        return 2 * self._latency(key, ids) + self.sending(key, ids, size)

    def sending(self, key: Key[Array, ""], ids: Int[Array, " size"], size: Any) -> Seconds:
        """How long `size` bytes take to leave clients."""
        return size / self.up.draw(jax.random.fold_in(key, 1), ids)

    def receiving(self, key: Key[Array, ""], ids: Int[Array, " size"], size: Any) -> Seconds:
        """How long `size` bytes take to reach clients."""
        return size / self.down.draw(jax.random.fold_in(key, 2), ids)

    def over_edges(
        self,
        key: Key[Array, ""],
        ids: Int[Array, " size"],
        begun: Seconds,
        edges: Bool[Array, "size size"],
        size: int,
    ) -> Float[Array, ""]:
        """When the last message of clients to each other is there; `edges[i, j]`: j sends to i.

        A client's messages share its bandwidth, and each has the latencies of both ends.

        Args:
            key: of the exchange.
            ids: of the clients.
            begun: when each client begins to send.
            edges: who sends to whom.
            size: of a message.
        """
        latency = self._latency(key, ids)
        sent = begun + latency + self.sending(key, ids, size * jnp.sum(edges, axis=0))
        taken = latency + self.receiving(key, ids, size * jnp.sum(edges, axis=1))
        return jnp.max(jnp.where(edges, sent[None, :] + taken[:, None], 0))

    def _latency(self, key: Key[Array, ""], ids: Int[Array, " size"]) -> Seconds:
        return self.latency.draw(jax.random.fold_in(key, 0), ids)

    def check(self, n: int) -> None:
        """Raise an error that explains unless this can be said of n clients."""
        for name in ("latency", "up", "down"):
            check_count(getattr(self, name).median, f"link.{name}", n)


def _total(kind: str, ids: Int[Array, " size"], spent: Counts) -> Float[Array, " size"]:
    """How many calls or samples each client has spent: a real number, since samples may be many."""
    amounts = [times.astype(jnp.float32) * entry.unit for entry, times in spent.items() if entry.kind == kind]
    return sum(amounts, jnp.zeros(ids.shape, jnp.float32))


_SLOWEST = 1e-3
"""Bytes a second below which a bandwidth is taken for a mistake: a division by it would overflow."""
