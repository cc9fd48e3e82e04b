"""Problems with known answers: quadratics whose clients all differ.

Every solution, adjoint and hypergradient is a closed form, so they are what an algorithm, yours too,
is tested on: an exact method must reach them to rounding, a biased one must not.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from fedbilevel.data.clients import Clients
from fedbilevel.problem.base import Problem
from fedbilevel.tree import PyTree


def lower_objective(x: jax.Array, y: jax.Array, samples: PyTree) -> jax.Array:
    """`g = ½ yᵀAy − yᵀ(Bx + b)`, the mean over the samples."""
    bend = jnp.einsum("i,sij,j->s", y, samples["A"], y) / 2
    pull = jnp.einsum("i,sij,j->s", y, samples["B"], x) + samples["b"] @ y
    return jnp.mean(bend - pull)


def upper_objective(x: jax.Array, y: jax.Array, samples: PyTree) -> jax.Array:
    """`f = ½ (y − c)ᵀD(y − c) + (ρ/2)‖x − e‖² + xᵀEy`, the mean over the samples."""
    gap, away = y - samples["c"], x - samples["e"]
    bend = jnp.einsum("si,sij,sj->s", gap, samples["D"], gap) / 2
    cross = jnp.einsum("i,sij,j->s", x, samples["E"], y)
    return jnp.mean(bend + samples["rho"] / 2 * jnp.sum(away**2, axis=-1) + cross)


class Quadratic(eqx.Module):
    """Heterogeneous quadratic bilevel problem; every field has one row a client.

        g_i = ½ yᵀA_i y − yᵀ(B_i x + b_i)
        f_i = ½ (y − c_i)ᵀD_i(y − c_i) + (ρ_i/2)‖x − e_i‖² + xᵀE_i y

    With bars for means over clients: `y*(x) = Ā⁻¹(B̄x + b̄)`,
    `u*(x) = Ā⁻¹(D̄y* − mean(D_i c_i) + Ēᵀx)`, `∇h = ρ̄x − mean(ρ_i e_i) + Ēy* + B̄ᵀu*`.

    `lower` says which problem the metric `error` is about: "global", one y for everybody, or "local", where
    every client has its own `y_i*(x) = A_i⁻¹(B_i x + b_i)` (`FedBiOLocal`, `FedBiOAccLocal`).

    Example:
        >>> import jax
        >>> quadratic = Quadratic.random(jax.random.key(0), clients=4, dx=3, dy=5)
        >>> bool(jax.numpy.linalg.norm(quadratic.hypergradient(quadratic.solution())) < 1e-4)
        True
    """

    A: Float[Array, "clients dy dy"]
    B: Float[Array, "clients dy dx"]
    b: Float[Array, "clients dy"]
    c: Float[Array, "clients dy"]
    D: Float[Array, "clients dy dy"]
    E: Float[Array, "clients dx dy"]
    e: Float[Array, "clients dx"]
    rho: Float[Array, " clients"]
    lower: str = eqx.field(static=True, default="global")

    def __check_init__(self) -> None:
        check_whose(self.lower)

    @classmethod
    def random(
        cls,
        key: jax.Array,
        clients: int,
        dx: int,
        dy: int,
        *,
        curvature: tuple[float, float] = (1.0, 4.0),
        coupling: float = 0.3,
        alike: bool = False,
        lower: str = "global",
    ) -> Quadratic:
        """A quadratic bilevel problem with random clients, and a solution in closed form.

        Args:
            key: draws them.
            clients: how many.
            dx, dy: dimensions of x and y.
            curvature: where the eigenvalues of every `A_i` lie.
            coupling: size of `E_i`, which couples x and y in f.
            alike: all clients are equal.
            lower: whose y is: "global" or "local".
        """
        parts = _draw_quadratic(key, 1 if alike else clients, clients, dx, dy, curvature, coupling)
        return dataclasses.replace(cls(*parts), lower=lower)

    # ------------------------------------------------------ as a federation

    @property
    def n(self) -> int:
        """How many clients there are."""
        return self.b.shape[0]

    def problem(self, **options: Any) -> Problem:
        """The bilevel problem, started at `x = 1`, `y = 0`; its metric `error` is `‖x − x*‖`.

        x* is `solution()`, or `own_solution()` where the lower level is local.
        """
        x0, y0 = jnp.ones(self.e.shape[1]), jnp.zeros(self.b.shape[1])
        best = self.solution() if self.lower == "global" else self.own_solution()
        metrics = {"error": DistanceTo(best)}
        return Problem(upper_objective, lower_objective, x0, y0, **{"metrics": metrics} | options)

    def clients(
        self,
        samples: int = 1,
        noise: float = 0.0,
        key: jax.Array | None = None,
        pooled: bool = False,
        **options: Any,
    ) -> Clients:
        """The clients' data: `samples` perturbed copies each, whose mean is exactly the client's own.

        Args:
            samples: how many.
            noise: standard deviation of the perturbations of `b`, `c`, `e`.
            key: draws them.
            pooled: one client has all samples; its f and g are the means over the clients of before.
            **options: as for `Clients` (`batch_size`, `weights`).
        """
        lower = {"A": self.A, "B": self.B, "b": self.b}
        upper = {"D": self.D, "E": self.E, "c": self.c, "e": self.e, "rho": self.rho}
        key = jr.key(0) if key is None else key
        clients = Clients(*_perturbed(key, (lower, upper), samples, noise), **options)
        return clients.pooled() if pooled else clients

    # ---------------------------------------------------------- closed forms

    def lower_solution(self, x: Float[Array, " dx"]) -> Float[Array, " dy"]:
        """`y*(x)`, the minimiser of `mean g_i(x, ·)`."""
        return jnp.linalg.solve(self.A.mean(0), self.B.mean(0) @ x + self.b.mean(0))

    def adjoint_at(self, x: Float[Array, " dx"], y: Float[Array, " dy"]) -> Float[Array, " dy"]:
        """`u = Ā⁻¹ mean ∇_y f_i(x, y)`; at `y*(x)` it is `u*(x)`."""
        return jnp.linalg.solve(self.A.mean(0), self.upper_slope(x, y))

    def upper_slope(self, x: Float[Array, " dx"], y: Float[Array, " dy"]) -> Float[Array, " dy"]:
        """`mean ∇_y f_i(x, y)`."""
        gap = jnp.einsum("nij,nj->i", self.D, y - self.c) / self.n
        return gap + self.E.mean(0).T @ x

    def hypergradient_at(
        self, x: Float[Array, " dx"], y: Float[Array, " dy"], u: Float[Array, " dy"]
    ) -> Float[Array, " dx"]:
        """`mean (∇_x f_i(x, y) − J_i u)`, for any y and u."""
        direct = jnp.mean(self.rho[:, None] * (x - self.e), axis=0) + self.E.mean(0) @ y
        return direct + self.B.mean(0).T @ u

    def hypergradient(self, x: Float[Array, " dx"]) -> Float[Array, " dx"]:
        """`∇h(x)`, the gradient of `mean f_i(x, y*(x))`."""
        y = self.lower_solution(x)
        return self.hypergradient_at(x, y, self.adjoint_at(x, y))

    def solution(self) -> jax.Array:
        """`x*`: `∇h` is affine, so one linear solve finds its zero."""
        return _zero(self.hypergradient, jnp.zeros_like(self.e[0]))

    def only(self, client: int) -> Quadratic:
        """The problem of one client alone."""
        return jax.tree.map(lambda leaf: leaf[client : client + 1], self)

    # ------------------------------------------- local lower level: one y a client

    def own_lower_solutions(self, x: Float[Array, " dx"]) -> Float[Array, "clients dy"]:
        """`y_i*(x) = A_i⁻¹(B_i x + b_i)`, one row a client."""
        return jax.vmap(jnp.linalg.solve)(self.A, self.B @ x + self.b)

    def own_hypergradient(self, x: Float[Array, " dx"]) -> Float[Array, " dx"]:
        """The mean of the clients' own hypergradients: right for a local lower level only."""

        def alone(client: Quadratic) -> jax.Array:
            return jax.tree.map(lambda leaf: leaf[None], client).hypergradient(x)

        return jnp.mean(jax.vmap(alone)(self), axis=0)

    def own_solution(self) -> jax.Array:
        """The x at which `own_hypergradient` is zero."""
        return _zero(self.own_hypergradient, jnp.zeros_like(self.e[0]))


# --------------------------------------------------------------------- parts


class DistanceTo(eqx.Module):
    """The metric `‖x − target‖`, or `‖y − target‖` of the lower level."""

    target: jax.Array
    level: str = eqx.field(static=True, default="upper")

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.linalg.norm((x if self.level == "upper" else y) - self.target)


def check_whose(lower: str) -> None:
    """Raise an error that explains unless it is said whose y is: everybody's or every client's own."""
    if lower not in ("global", "local"):
        raise ValueError(f'lower is {lower!r}; it must be "global" or "local"')


def _positive(key: jax.Array, count: int, d: int, low: Any, high: Any) -> jax.Array:
    """Symmetric matrices with eigenvalues spread over `[low, high]`, both ends included."""
    turns, _ = jnp.linalg.qr(jr.normal(key, (count, d, d)))
    return jnp.einsum("nij,j,nkj->nik", turns, jnp.linspace(low, high, d), turns)


@eqx.filter_jit
def _zero(affine: Any, like: jax.Array) -> jax.Array:
    """The zero of an affine map."""
    return jnp.linalg.solve(jax.jacobian(affine)(like), -affine(like))


@functools.partial(jax.jit, static_argnames=("count", "clients", "dx", "dy"))
def _draw_quadratic(
    key: jax.Array, count: int, clients: int, dx: int, dy: int, curvature: Any, coupling: Any
) -> tuple[jax.Array, ...]:
    """The fields of a `Quadratic`: `count` different clients, repeated to `clients` of them."""
    keys = jr.split(key, 8)

    def normal(which: int, *shape: int) -> jax.Array:
        return jr.normal(keys[which], (count, *shape))

    parts = (
        _positive(keys[0], count, dy, *curvature),
        normal(1, dy, dx) / dx**0.5,
        normal(2, dy),
        normal(3, dy),
        _positive(keys[4], count, dy, 0.5, 1.5),
        coupling * normal(5, dx, dy) / dy**0.5,
        normal(6, dx),
        jr.uniform(keys[7], (count,), minval=0.5, maxval=1.5),
    )
    return tuple(jnp.broadcast_to(p, (clients, *p.shape[1:])) for p in parts)


@functools.partial(jax.jit, static_argnames="samples")
def _perturbed(key: jax.Array, parts: PyTree, samples: int, noise: Any) -> PyTree:
    """`samples` copies of every client's row; those of the vectors b, c, e differ, and keep their mean."""
    spread = ("b", "c", "e")
    keys = jr.split(key, len(spread))

    def copies(name: str, rows: jax.Array) -> jax.Array:
        stacked = jnp.repeat(rows[:, None], samples, axis=1)
        if name not in spread:
            return stacked
        draws = noise * jr.normal(keys[spread.index(name)], stacked.shape)
        return stacked + draws - jnp.mean(draws, axis=1, keepdims=True)

    return tuple({name: copies(name, rows) for name, rows in part.items()} for part in parts)
