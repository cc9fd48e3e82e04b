"""Minimax and compositional problems with known answers (see `problem/quadratic.py`)."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from fedbilevel.data.clients import Clients
from fedbilevel.problem.base import Problem, compositional, minimax
from fedbilevel.problem.quadratic import DistanceTo
from fedbilevel.tree import PyTree


def saddle_objective(x: jax.Array, y: jax.Array, samples: PyTree) -> jax.Array:
    """`f = −[½‖y‖² − bᵀy + yᵀAx] + (λ/2)‖x‖²`, the mean over the samples."""
    inner = jnp.sum(y**2) / 2 - samples["b"] @ y + jnp.einsum("i,sij,j->s", y, samples["A"], x)
    return jnp.mean(-inner + samples["penalty"] / 2 * jnp.sum(x**2))


class Saddle(eqx.Module):
    """Heterogeneous saddle-point problem: `f_i = −[½‖y‖² − b_iᵀy + yᵀA_i x] + (λ/2)‖x‖²`.

    `x* = (λI + ĀᵀĀ)⁻¹Āᵀb̄`, `y* = b̄ − Āx*`; zero when the `b_i` are centred.
    """

    A: Float[Array, "clients dy dx"]
    b: Float[Array, "clients dy"]
    penalty: Float[Array, " clients"]

    @classmethod
    def random(
        cls,
        key: jax.Array,
        clients: int,
        d: int,
        *,
        spread: float = 1.0,
        centred: bool = True,
        penalty: float = 10.0,
    ) -> Saddle:
        """The FedNest paper's minimax problem: `A_i = t_i I`, `t_i ~ U(0, 0.1)`, `b_i ~ N(0, spread²)`.

        Args:
            key: draws the clients.
            clients: how many.
            d: dimension of x and of y.
            spread: s, how much the `b_i` differ.
            centred: subtract their mean, so that the saddle point is zero.
            penalty: λ.
        """
        k_scale, k_shift = jr.split(key)
        scales = jr.uniform(k_scale, (clients, 1, 1), maxval=0.1)
        b = spread * jr.normal(k_shift, (clients, d))
        return cls(scales * jnp.eye(d), b - b.mean(0) if centred else b, jnp.full(clients, penalty))

    def problem(self, **options: Any) -> Problem:
        """The minimax problem, started at one; its metrics are `‖x − x*‖` and `‖y − y*‖`."""
        d, (x, y) = self.b.shape[1], self.solution()
        metrics = {"error": DistanceTo(x), "lower_error": DistanceTo(y, "lower")}
        return minimax(
            saddle_objective, jnp.ones(self.A.shape[2]), jnp.ones(d), **{"metrics": metrics} | options
        )

    def clients(self, **options: Any) -> Clients:
        """The clients' data, one sample each."""
        return Clients({name: leaf[:, None] for name, leaf in _fields(self).items()}, **options)

    @jax.jit
    def solution(self) -> tuple[jax.Array, jax.Array]:
        """The saddle point `(x*, y*)`."""
        A, b = self.A.mean(0), self.b.mean(0)
        x = jnp.linalg.solve(self.penalty.mean() * jnp.eye(A.shape[1]) + A.T @ A, A.T @ b)
        return x, b - A @ x


def inner_map(x: jax.Array, samples: PyTree) -> jax.Array:
    """`r(x) = Rx + s`, the mean over the samples."""
    return jnp.mean(samples["R"] @ x + samples["s"], axis=0)


def outer_distance(y: jax.Array, samples: PyTree) -> jax.Array:
    """`½‖y − t‖²`, the mean over the samples."""
    return jnp.mean(jnp.sum((y - samples["t"]) ** 2, axis=-1)) / 2


class Composition(eqx.Module):
    """Compositional least squares: `r_i = R_i x + s_i`, `f_i(y) = ½‖y − t_i‖²`.

    `x* = (R̄ᵀR̄)⁻¹R̄ᵀ(t̄ − s̄)`, `y* = R̄x* + s̄`.
    """

    R: Float[Array, "clients dy dx"]
    s: Float[Array, "clients dy"]
    t: Float[Array, "clients dy"]

    @classmethod
    def random(cls, key: jax.Array, clients: int, dx: int, dy: int) -> Composition:
        """A compositional problem with random clients, and a solution in closed form.

        Args:
            key: draws the clients.
            clients: how many.
            dx, dy: dimensions of x and y; `dy` at least `dx`, or the solution is not unique.
        """
        k_map, k_shift, k_target = jr.split(key, 3)
        R = jnp.eye(dy, dx) + 0.3 * jr.normal(k_map, (clients, dy, dx))
        return cls(R, jr.normal(k_shift, (clients, dy)), jr.normal(k_target, (clients, dy)))

    def problem(self, **options: Any) -> Problem:
        """The compositional problem, started at `x = 1`, `y = 0`; its metric `error` is `‖x − x*‖`."""
        x0, y0 = jnp.ones(self.R.shape[2]), jnp.zeros(self.s.shape[1])
        metrics = {"error": DistanceTo(self.solution())}
        return compositional(outer_distance, inner_map, x0, y0, **{"metrics": metrics} | options)

    def clients(self, **options: Any) -> Clients:
        """The clients' data, one sample each."""
        rows = {name: leaf[:, None] for name, leaf in _fields(self).items()}
        return Clients({"R": rows["R"], "s": rows["s"]}, {"t": rows["t"]}, **options)

    @jax.jit
    def solution(self) -> jax.Array:
        """`x*`."""
        R = self.R.mean(0)
        return jnp.linalg.solve(R.T @ R, R.T @ (self.t.mean(0) - self.s.mean(0)))


def _fields(module: eqx.Module) -> dict[str, jax.Array]:
    return {name: getattr(module, name) for name in module.__dataclass_fields__}
