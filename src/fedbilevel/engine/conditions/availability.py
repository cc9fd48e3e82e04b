"""Who is there: clients that come and go from step to step.

A client that is away in a step gets no message and gives no answer; what it has, it keeps.
"""

from __future__ import annotations

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from fedbilevel.engine.conditions.per_client import Numbers, check_count, checked, keys_of, of


class Availability(eqx.Module):
    """Which clients are there in which step. A pure function of the run's key, the step and the client.

    It has no state that would have to be carried or saved: any step can be asked for by itself.
    """

    @abc.abstractmethod
    def there(
        self, key: Key[Array, ""], step: Int[Array, ""], ids: Int[Array, " size"]
    ) -> Bool[Array, " size"]:
        """Who of some clients is there in a step."""

    @abc.abstractmethod
    def check(self, n: int) -> None:
        """Raise an error that explains unless this can be said of n clients."""


class Bernoulli(Availability):
    """Every client is there with a probability, independently in every step.

    Args:
        probability: one number for all clients, or one for each.
    """

    probability: Float[Array, "*clients"]

    def __init__(self, probability: Numbers) -> None:
        self.probability = jnp.asarray(checked(probability, "probability", 0.0, 1.0), jnp.float32)

    def there(
        self, key: Key[Array, ""], step: Int[Array, ""], ids: Int[Array, " size"]
    ) -> Bool[Array, " size"]:
        return _uniform(jax.random.fold_in(key, step), ids)[0] < of(self.probability, ids)

    def check(self, n: int) -> None:
        check_count(self.probability, "availability", n)


class OnOff(Availability):
    """Every client is a Markov chain of two states, begun in its stationary law.

    Away for `1/returns` steps and there for `1/leaves` steps on average, so there for the share
    `returns / (leaves + returns)` of all steps. With probability `leaves + returns` a step forgets what was
    before and draws the state anew, which is the same chain; so a step's state is that of the last such
    step, and is found by looking back about `1 / (leaves + returns)` steps.

    Args:
        leaves: the probability to be away in the next step of a client that is there; a number, or one each.
        returns: the probability to be there in the next step of a client that is away; likewise.
    """

    leaves: Float[Array, "*clients"]
    returns: Float[Array, "*clients"]

    def __init__(self, leaves: Numbers, returns: Numbers) -> None:
        checked(leaves, "leaves", 0.0, 1.0)
        if np.any(np.asarray(checked(returns, "returns", 0.0, 1.0)) == 0):
            raise ValueError("returns is 0: a client that is away would never be there again")
        if np.any(np.asarray(leaves) + np.asarray(returns) > 1):
            raise ValueError(
                f"leaves is {leaves} and returns is {returns}; their sum must be at most 1 "
                "(at 1 steps are independent, as with Bernoulli; beyond it clients would alternate)"
            )
        self.leaves, self.returns = jnp.asarray(leaves, jnp.float32), jnp.asarray(returns, jnp.float32)

    def there(
        self, key: Key[Array, ""], step: Int[Array, ""], ids: Int[Array, " size"]
    ) -> Bool[Array, " size"]:
        leaves, returns = of(self.leaves, ids), of(self.returns, ids)

        def look_back(carry: Any) -> Any:
            step, known, state = carry
            renewal, drawn = _uniform(jax.random.fold_in(key, step), ids)
            renewed = (renewal < leaves + returns) | (step == 0)
            new = drawn * (leaves + returns) < returns
            return step - 1, known | renewed, jnp.where(known, state, new)

        nobody = jnp.zeros(ids.shape, bool)
        start = (jnp.asarray(step, jnp.int32), nobody, nobody)
        return jax.lax.while_loop(lambda carry: ~jnp.all(carry[1]), look_back, start)[2]

    def check(self, n: int) -> None:
        check_count(self.leaves, "availability.leaves", n)
        check_count(self.returns, "availability.returns", n)


class DayNight(Availability):
    """Clients are there by day: in the first `day` of every `period` steps, by the clock of their zone.

    Args:
        period: steps from one morning to the next.
        day: the share of a period in which a client is there.
        zones: client i lives in zone `i mod zones`; zones are spread evenly over a period.
    """

    period: float = eqx.field(static=True)
    day: float = eqx.field(static=True, default=0.5)
    zones: int = eqx.field(static=True, default=1)

    def __check_init__(self) -> None:
        if not (self.period > 0 and 0 < self.day <= 1 and self.zones >= 1):
            raise ValueError(
                f"period is {self.period}, day {self.day} and zones {self.zones}; "
                "they must be above 0, a share above 0 and at most 1, and at least 1"
            )

    def there(
        self, key: Key[Array, ""], step: Int[Array, ""], ids: Int[Array, " size"]
    ) -> Bool[Array, " size"]:
        hour = (step % self.period) / self.period + (ids % self.zones) / self.zones
        return jnp.mod(hour, 1.0) < self.day

    def check(self, n: int) -> None:
        return None


class Trace(Availability):
    """What was observed, again and again.

    Args:
        rows: `(steps, clients)`, one row a step: 1 or true for a client that is there.
    """

    rows: Bool[Array, "steps clients"]

    def __init__(self, rows: Any) -> None:
        widths = {np.shape(row) for row in rows}
        if len(widths) != 1 or len(widths.pop()) != 1 or not set(np.unique(np.asarray(rows))) <= {0, 1}:
            raise ValueError(
                f"a trace needs rows of 0 and 1, (steps, clients), of equal length; got {rows!r}"
            )
        self.rows = jnp.asarray(rows, bool)

    def there(
        self, key: Key[Array, ""], step: Int[Array, ""], ids: Int[Array, " size"]
    ) -> Bool[Array, " size"]:
        return self.rows[step % self.rows.shape[0]][ids]

    def check(self, n: int) -> None:
        if self.rows.shape[1] != n:
            raise ValueError(f"availability is a trace of {self.rows.shape[1]} clients, but there are {n}")


def _uniform(key: Key[Array, ""], ids: Int[Array, " size"]) -> Any:
    """Two numbers in [0, 1) for each client, `(2, size)`."""
    return jax.vmap(lambda own: jax.random.uniform(own, (2,), jnp.float32))(keys_of(key, ids)).T
