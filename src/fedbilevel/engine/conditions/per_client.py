"""Numbers that clients have: the same for all, one for each, or drawn from a log-normal law."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

Numbers: TypeAlias = float | Sequence[float]
"""One number for all clients, or one for each."""


class LogNormal(eqx.Module):
    """`median · exp(between · a_i + within · b_i)`: a_i is client i's own, b_i anew in every exchange.

    Both are standard normal. With neither (`LogNormal(0.2)`) it is a fixed number. Laws of the same seed have
    the same a_i: a client that is slow in one thing is slow in the other.

    Args:
        median: one number for all clients, or one for each.
        between: how much clients differ, for good: the standard deviation of the logarithm.
        within: how much one client varies from exchange to exchange: likewise.
        seed: draws what is a client's own.
    """

    median: Float[Array, "*clients"]
    between: float = eqx.field(static=True)
    within: float = eqx.field(static=True)
    seed: int = eqx.field(static=True)

    def __init__(self, median: Numbers, between: float = 0.0, within: float = 0.0, seed: int = 0) -> None:
        self.median = jnp.asarray(checked(median, "median", 0.0, np.inf), jnp.float32)
        for name, value in (("between", between), ("within", within)):
            checked(value, name, 0.0, np.inf)
        self.between, self.within, self.seed = float(between), float(within), seed

    def draw(self, key: Key[Array, ""], ids: Int[Array, " size"]) -> Float[Array, " size"]:
        """The numbers of some clients in the exchange that `key` belongs to."""
        exponent: Any = 0.0
        if self.between:
            exponent = self.between * _normal(jax.random.key(self.seed), ids)
        if self.within:
            exponent = exponent + self.within * _normal(key, ids)
        return of(self.median, ids) * jnp.exp(exponent)


def amount(value: Numbers | LogNormal, name: str, least: float = 0.0) -> LogNormal:
    """A number, one for each client, or a law, as a law; an error names what it was given for."""
    if isinstance(value, LogNormal):
        checked(value.median, name, least, np.inf)
        return value
    return LogNormal(checked(value, name, least, np.inf))


def checked(value: Any, name: str, low: float, high: float) -> Any:
    """`value`, or an error that explains unless it is one number from low to high, or several of them."""
    try:
        numbers = np.asarray(value, float)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}; it must be a number, or one for each client") from None
    if numbers.ndim > 1 or not numbers.size or not np.all((numbers >= low) & (numbers <= high)):
        limits = f"at least {low:g}" if high == np.inf else f"from {low:g} to {high:g}"
        raise ValueError(
            f"{name} is {numbers.tolist()}; it must be {limits}: one number, or one for each client"
        )
    return value


def check_count(values: Any, name: str, n: int) -> None:
    """Raise an error that explains unless there is one value for all, or one for each of n clients."""
    if jnp.ndim(values) and jnp.shape(values) != (n,):
        raise ValueError(
            f"{name} has {jnp.shape(values)[0]} numbers, one for each client, but there are {n} clients"
        )


def of(values: Any, ids: Int[Array, " size"]) -> Float[Array, " size"]:
    """The numbers of some clients, from one for all or one for each."""
    values = jnp.asarray(values)
    return values[ids] if values.ndim else jnp.broadcast_to(values, ids.shape)


def keys_of(key: Key[Array, ""], ids: Int[Array, " size"]) -> Key[Array, " size"]:
    """A key for each client, by its id: whoever else takes part, a client draws the same."""
    return jax.vmap(lambda id: jax.random.fold_in(key, id))(ids)


def _normal(key: Key[Array, ""], ids: Int[Array, " size"]) -> Float[Array, " size"]:
    return jax.vmap(lambda own: jax.random.normal(own, (), jnp.float32))(keys_of(key, ids))
