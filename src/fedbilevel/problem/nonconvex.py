"""A nonconvex problem whose hypergradient is known in closed form, and whose samples are noisy.

Theorems about nonconvex bilevel methods count what it takes until `‖∇h(x)‖²` is small. Here that number is
exact at every iterate, at no cost, so that the theorems' exponents can be measured.
"""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from fedbilevel.data.clients import Clients
from fedbilevel.problem.base import Problem
from fedbilevel.problem.quadratic import check_whose
from fedbilevel.tree import PyTree

Shared = Float[Array, " dy"]
Upper = Float[Array, " dx"]


class CurvedLower(eqx.Module):
    """`g = ½ Σ_j a_j y_j² − yᵀ(s ⊙ Bx + b)`, the mean over the samples `(a, s, b)`."""

    B: Float[Array, "dy dx"]

    def __call__(self, x: jax.Array, y: jax.Array, samples: PyTree) -> jax.Array:
        pull = samples["s"] * (self.B @ x) + samples["b"]
        return jnp.mean((samples["a"] @ (y**2)) / 2 - pull @ y)


class BoundedUpper(eqx.Module):
    """`f = Σ_j log(1 + (y_j − c_j)²) + λ Σ_k x_k²/(1 + x_k²) + ⟨tilt, y⟩ + ⟨push, x⟩`, the mean over samples.

    The last two terms are noise: they sum to zero over a client's samples.
    """

    penalty: Any

    def __call__(self, x: jax.Array, y: jax.Array, samples: PyTree) -> jax.Array:
        valley = jnp.sum(jnp.log1p((y - samples["c"]) ** 2), axis=-1)
        noise = samples["tilt"] @ y + samples["push"] @ x
        return jnp.mean(valley + noise) + self.penalty * jnp.sum(x**2 / (1 + x**2))


class Nonconvex(eqx.Module):
    """Heterogeneous bilevel problem, nonconvex in both variables above, strongly convex below.

        g_i = ½ Σ_j a_ij y_j² − yᵀ(s_i ⊙ Bx + b_i)
        f_i = Σ_j log(1 + (y_j − c_ij)²) + λ Σ_k x_k²/(1 + x_k²)

    f has bounded gradients and is smooth, as the theory of FedBiO wants it. With bars for means over clients,
    products entry by entry, and `φ'(t) = 2t/(1 + t²)`:

        y*(x) = (s̄ Bx + b̄)/ā      u*(x) = mean_i φ'(y* − c_i)/ā      ∇h(x) = 2λx/(1 + x²)² + Bᵀ(s̄ u*)

    Where the lower level is local, the mean is over the clients' own `y_i*`, `u_i*`, `Bᵀ(s_i u_i*)`.

    Example:
        >>> import jax
        >>> known = Nonconvex.random(jax.random.key(0), clients=4, dx=3, dy=5)
        >>> known.hypergradient(jax.numpy.ones(3)).shape
        (3,)
    """

    a: Float[Array, "clients dy"]
    s: Float[Array, "clients dy"]
    b: Float[Array, "clients dy"]
    c: Float[Array, "clients dy"]
    B: Float[Array, "dy dx"]
    penalty: Any
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
        penalty: float = 0.1,
        lower: str = "global",
    ) -> Nonconvex:
        """A problem with random clients, all different.

        Args:
            key: draws them.
            clients: how many.
            dx, dy: dimensions of x and y.
            curvature: between which numbers the `a_ij` lie: g is that strongly convex, and that smooth.
            penalty: λ.
            lower: whose y is: "global", one for everybody, or "local", every client's own.
        """
        k_a, k_s, k_b, k_c, k_B = jr.split(key, 5)
        shape = (clients, dy)
        return cls(
            jr.uniform(k_a, shape, minval=curvature[0], maxval=curvature[1]),
            jr.uniform(k_s, shape, minval=0.5, maxval=1.5),
            jr.normal(k_b, shape),
            jr.normal(k_c, shape),
            jr.normal(k_B, (dy, dx)) / dx**0.5,
            penalty,
            lower,
        )

    # ------------------------------------------------------ as a federation

    @property
    def n(self) -> int:
        """How many clients there are."""
        return self.a.shape[0]

    def problem(self, **options: Any) -> Problem:
        """The bilevel problem, started at `x = 1`, `y = 0`; its metric `stationarity` is `‖∇h(x)‖²`."""
        dy, dx = self.B.shape
        metrics = {"stationarity": Stationarity(self)}
        functions = BoundedUpper(self.penalty), CurvedLower(self.B)
        return Problem(*functions, jnp.ones(dx), jnp.zeros(dy), **{"metrics": metrics} | options)

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
            noise: standard deviation of a sample's a and s, relative to the client's own, of its b, and of
                the slopes of f; at most 0.5, so that every sample's g is strongly convex.
            key: draws them.
            pooled: one client has all samples; its f and g are the means over the clients of before.
            **options: as for `Clients` (`batch_size`, `weights`).
        """
        if not 0 <= noise <= 0.5:
            raise ValueError(f"noise is {noise}; it must lie between 0 and 0.5, or some g is not convex")
        key = jr.key(0) if key is None else key
        clients = Clients(*_perturbed(key, self, samples, noise), **options)
        return clients.pooled() if pooled else clients

    # ---------------------------------------------------------- closed forms

    @jax.jit
    def lower_solution(self, x: Upper) -> Shared:
        """`y*(x)`, the minimiser of `mean g_i(x, ·)`."""
        return (self.s.mean(0) * (self.B @ x) + self.b.mean(0)) / self.a.mean(0)

    @jax.jit
    def adjoint(self, x: Upper) -> Shared:
        """`u*(x)`, what the inverse Hessian makes of `mean ∇_y f_i(x, y*(x))`."""
        return jnp.mean(_slope(self.lower_solution(x) - self.c), axis=0) / self.a.mean(0)

    @jax.jit
    def hypergradient(self, x: Upper) -> Upper:
        """`∇h(x)` with one y for everybody."""
        return self._direct(x) + self.B.T @ (self.s.mean(0) * self.adjoint(x))

    @jax.jit
    def own_hypergradient(self, x: Upper) -> Upper:
        """`∇h(x)` where every client has its own y."""
        y = (self.s * (self.B @ x) + self.b) / self.a
        u = _slope(y - self.c) / self.a
        return self._direct(x) + self.B.T @ jnp.mean(self.s * u, axis=0)

    @jax.jit
    def stationarity(self, x: Upper) -> jax.Array:
        """`‖∇h(x)‖²` of the lower level that this problem has."""
        h = self.hypergradient(x) if self.lower == "global" else self.own_hypergradient(x)
        return jnp.sum(h**2)

    def _direct(self, x: jax.Array) -> jax.Array:
        return 2 * self.penalty * x / (1 + x**2) ** 2


class Stationarity(eqx.Module):
    """The metric `‖∇h(x)‖²` of a known problem."""

    known: Nonconvex

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return self.known.stationarity(x)


def _slope(t: jax.Array) -> jax.Array:
    """The derivative of `log(1 + t²)`."""
    return 2 * t / (1 + t**2)


@functools.partial(jax.jit, static_argnames="samples")
def _perturbed(key: jax.Array, known: Nonconvex, samples: int, noise: Any) -> tuple[PyTree, PyTree]:
    """`samples` copies of every client's a, s, b and c, and slopes around zero; all keep their means."""
    (n, dy), dx = known.a.shape, known.B.shape[1]
    keys = iter(jr.split(key, 5))

    def spread(width: int) -> jax.Array:
        edge = 3**0.5 * noise  # uniform draws between −edge and edge have the standard deviation `noise`
        draws = jr.uniform(next(keys), (n, samples, width), minval=-edge, maxval=edge)
        return draws - jnp.mean(draws, axis=1, keepdims=True)

    a, s, b, c = (leaf[:, None] for leaf in (known.a, known.s, known.b, known.c))
    lower = {"a": a * (1 + spread(dy)), "s": s * (1 + spread(dy)), "b": b + spread(dy)}
    upper = {"c": jnp.broadcast_to(c, (n, samples, dy)), "tilt": spread(dy), "push": spread(dx)}
    return lower, upper
