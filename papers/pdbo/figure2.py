"""Figure 2 of PDBO: the error of VR-HGP's hypergradient against its rounds, for several (α, β).

    python papers/pdbo/figure2.py [folder]

Three nodes, one-dimensional data (the mean pixel of images of two digits), 100 training and 100 validation
samples a node, full batches; links come and go undirected with known probabilities, independent for the two
lines of a round. The hyperparameters are each node's weights of the two classes (the paper does not say
which it took). The truth is `B(I − A)⁻¹c + c_x` at the stationary point of the expected iteration, by dense
matrices. Prints the root of the mean square of the relative error over 100 seeds, and draws `figure2.png` in
the folder (default: runs/pdbo).

Reference: N. Terashita, S. Hara, arXiv:2210.02129, 2022, appendix C.6.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.flatten_util import ravel_pytree

import fedbilevel as fb
from fedbilevel.adjoint import VRHGP, Equilibrium
from fedbilevel.adjoint.push import receiving_weights
from fedbilevel.data import load
from fedbilevel.fed import Network
from fedbilevel.fed.ledger import metering
from fedbilevel.problem.oracle import Client

NODES, SAMPLES, RATE, STEPS = 3, 100, 1.0, 500
PAIRS = ((1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (0.9, 0.1), (0.1, 0.9))
ROUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
SEEDS = 100


def one_dimensional(seed: int = 0) -> tuple[fb.Problem, fb.Clients]:
    """Two digits, each image as its mean pixel; nodes differ in how much they have of which."""
    images, labels = (np.asarray(load("mnist-mini").train[name]) for name in ("inputs", "labels"))
    brightness = images.reshape(len(images), -1).mean(axis=1, keepdims=True).astype(float)
    brightness = (brightness - brightness.mean()) / brightness.std()
    digits = [iter(np.random.default_rng(seed).permutation(np.flatnonzero(labels == d))) for d in (1, 0)]
    shares = (0.3, 0.5, 0.7)
    levels = [[_taken(digits, brightness, labels, share) for share in shares] for _ in range(2)]
    problem = fb.ClassWeights(fb.Linear(2), inputs=(1,), classes=2, penalty=0.1)
    return problem, fb.Clients(*levels)


def _taken(digits: Sequence[Iterator[int]], inputs: Any, labels: Any, share: float) -> dict[str, Any]:
    """The next samples of both digits: nobody else has them, at either level."""
    count = round(share * SAMPLES)
    counts = count, SAMPLES - count
    rows = [row for places, own in zip(digits, counts, strict=True) for row in itertools.islice(places, own)]
    return {"inputs": inputs[rows], "labels": np.asarray(labels[rows] == 1, np.int32)}


class Truth:
    """The stationary point of the expected iteration, and the hypergradient there, by dense matrices."""

    def __init__(self, problem: fb.Problem, clients: fb.Clients, network: Network) -> None:
        self.mean = jnp.asarray(network.expected())
        self.nodes = [Client(problem, clients, i, i, jr.key(0)) for i in range(NODES)]
        flat, self.unravel = ravel_pytree(problem.y0)
        self.x = jnp.zeros((NODES, *problem.x0.shape))
        self.w = self._weights()
        self.z = self._stationary(jnp.broadcast_to(flat, (NODES, flat.size)) * self.w[:, None])

    def _weights(self) -> jax.Array:
        """`P̄ w = w` with sum n."""
        values, vectors = np.linalg.eig(np.asarray(self.mean))
        w = np.real(vectors[:, np.argmax(np.real(values))])
        return jnp.asarray(NODES * w / w.sum())

    def advance(self, z: jax.Array, x: jax.Array) -> jax.Array:
        """One step of the expected iteration, the gradient step after receiving."""
        gradients = [
            ravel_pytree(me.g_y(x[i], self.unravel(z[i] / self.w[i]), me.batch("lower", me.key)))[0]
            for i, me in enumerate(self.nodes)
        ]
        return self.mean @ z - RATE * jnp.stack(gradients)

    def _stationary(self, z: jax.Array) -> jax.Array:
        step = jax.jit(lambda z: self.advance(z, self.x))
        for _ in range(20 * STEPS):
            z = step(z)
        return z

    def cost(self, z: jax.Array, x: jax.Array) -> jax.Array:
        """The mean outer cost."""
        costs = [
            me.f(x[i], self.unravel(z[i] / self.w[i]), me.batch("upper", me.key))
            for i, me in enumerate(self.nodes)
        ]
        return sum(costs, start=jnp.zeros(())) / NODES

    def hypergradient(self) -> jax.Array:
        """`c_x + B (I − A)⁻¹ c`, one row a node."""
        by_z, by_x = jax.jacobian(self.advance, argnums=(0, 1))(self.z, self.x)
        c, c_x = jax.grad(self.cost, argnums=(0, 1))(self.z, self.x)
        size = self.z.size
        u = jnp.linalg.solve(jnp.eye(size) - by_z.reshape(size, size).T, c.ravel())
        return c_x + (by_x.reshape(size, -1).T @ u).reshape(self.x.shape)


def estimates(problem: fb.Problem, clients: fb.Clients, network: Network, truth: Truth, rounds: int) -> Any:
    """VR-HGP after so many rounds, `(pairs, seeds, nodes, d_x)`: one compiled program."""
    fed = fb.Simulator().federation(problem, clients)
    known = receiving_weights(network)
    y = jax.vmap(truth.unravel)(truth.z / truth.w[:, None])

    def one(alpha: jax.Array, beta: jax.Array, key: jax.Array) -> Any:
        with metering():
            x, there, w, receive = (fed.everyone.take(fed.keep(v)) for v in (truth.x, y, truth.w, known))
            at = Equilibrium(x, there, w, receive, network, RATE, "after")
            adjoint = VRHGP(rounds, alpha, beta, edges="independent")
            return fed.everyone.gather(adjoint.hypergradient(fed, at, key), "h")[0]

    seeds = jax.vmap(one, in_axes=(None, None, 0))
    alphas, betas = jnp.asarray(PAIRS).T
    run = jax.jit(jax.vmap(seeds, in_axes=(0, 0, None)))
    return run(alphas, betas, jr.split(jr.key(1), SEEDS))


@functools.cache
def errors() -> Any:
    """`(rounds, pairs)`: root mean square over seeds of the relative error."""
    problem, clients = one_dimensional()
    network = fb.links.Stochastic(0.4, 0.8, directed=False).network(NODES)
    truth = Truth(problem, clients, network)
    right = truth.hypergradient()
    found = np.stack([estimates(problem, clients, network, truth, rounds) for rounds in ROUNDS])
    squares = np.sum((found - np.asarray(right)) ** 2, axis=(-2, -1)) / np.sum(np.asarray(right) ** 2)
    return np.sqrt(squares.mean(axis=-1))


def table() -> str:
    """One row for each number of rounds, one column for each (α, β)."""
    names = [f"({alpha:g}, {beta:g})" for alpha, beta in PAIRS]
    lines = ["".join(f"{name:>12}" for name in ("rounds", *names))]
    for rounds, row in zip(ROUNDS, errors(), strict=True):
        lines.append(f"{rounds:>12}" + "".join(f"{value:>12.4g}" for value in row))
    return "\n".join(lines)


def draw(folder: pathlib.Path) -> pathlib.Path:
    """Write the figure as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 3), layout="constrained")
    panel = figure.subplots()
    for (alpha, beta), column in zip(PAIRS, errors().T, strict=True):
        panel.loglog(ROUNDS, column, label=f"({alpha:g}, {beta:g})" + (" HGP" if alpha == 1 else ""))
    panel.set(xlabel="rounds", ylabel="relative error of the hypergradient")
    panel.legend(title="(α, β)")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(file := folder / "figure2.png")
    return file


def main(arguments: Sequence[str]) -> None:
    """Print the table and draw the figure, in double precision."""
    with jax.enable_x64(True):
        print(table())
    print(f"\nwritten: {draw(pathlib.Path(*(arguments or ['runs/pdbo'])))}")


if __name__ == "__main__":
    main(sys.argv[1:])
