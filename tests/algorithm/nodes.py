"""What the tests of push-sum and hypergradient push share: quadratics at nodes, and their boxes in numpy.

Rows are nodes. `W[i, j]` is what node i takes of node j; columns sum to one.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import fedbilevel as fb
from fedbilevel.adjoint import Equilibrium
from fedbilevel.adjoint.push import receiving_weights
from fedbilevel.fed.ledger import Ledger
from fedbilevel.problem.quadratic import lower_objective, upper_objective

N, DX, DY = 5, 2, 3
LR = 0.1  # below one over the largest curvature, also where w is small
CIRCLE = (np.eye(N) + np.roll(np.eye(N), 1, axis=0) + np.roll(np.eye(N), -1, axis=0)) / 3
UNEVEN = CIRCLE * np.random.default_rng(3).uniform(0.3, 1.0, (N, N))  # links both ways, of other weights
UNEVEN /= UNEVEN.sum(axis=0)
ALIKE, COUNTS = (1.0,) * N, (1.5, 0.5, 1.0, 0.75, 1.25)  # how much nodes count; the mean is 1
WEIGHTS = {"complete": np.full((N, N), 1 / N), "ring": CIRCLE, "uneven": UNEVEN}


@functools.cache
def drawn(n=N, seed=0, **options):
    """A quadratic whose nodes differ, in numpy; and so is everything else here."""
    return jax.tree.map(np.asarray, fb.Quadratic.random(jr.key(seed), n, DX, DY, **options))


@functools.cache
def counted(counts):
    """The quadratic of which a plain mean is the weighted one of `drawn()`: f_i and g_i, so many times."""
    q, names = drawn(), ("A", "B", "b", "D", "E", "rho")
    rows = [(getattr(q, name).T * np.asarray(counts)).T for name in names]
    return eqx.tree_at(lambda q: [getattr(q, name) for name in names], q, rows)


@functools.cache
def federation(n=N, seed=0, counts=None):
    """Always with weights, so that those who count alike and those who do not have one compiled program."""
    q = drawn(n, seed)
    clients = q.clients(weights=np.ones(n) if counts is None else np.asarray(counts))
    return fb.Simulator().federation(q.problem(metrics={}), clients)


def first_twice(rows):
    """Rows of nodes of which the first is there twice."""
    return np.concatenate([rows[:1], rows])


def points(n=N, seed=1):
    """Some x of every node."""
    return np.random.default_rng(seed).normal(size=(n, DX))


# ------------------------------------------------------------------ the library


class Running:
    """An algorithm in the simulator, from its start."""

    def __init__(self, algorithm, seed=0, counts=None):
        self.session = federation(counts=counts).compile(algorithm.among(N))
        self.key, self.time = jr.key(seed), 0
        self.state, counts = self.session.init(jr.key(seed + 1000))
        self.start, self.ledger = Ledger.from_counts(counts), Ledger()

    def advance(self, steps=1):
        block = self.session.advance(self.state, self.key, self.time, steps, 5000)
        assert block.finite
        assert block.done == steps
        self.state, self.time = block.state, self.time + steps
        self.ledger += Ledger.from_counts(block.counts)
        return self


def traces_of(algorithms):
    """How often g was traced so far, after a short run of each of the algorithms."""
    traced, counts = [], []

    def lower(x, y, samples):
        traced.append(1)
        return lower_objective(x, y, samples)

    problem = fb.Problem(upper_objective, lower, np.ones(DX), np.zeros(DY))
    for algorithm in algorithms:
        fb.solve(problem, drawn().clients(), algorithm, 2, every=2)
        counts.append(len(traced))
    return counts


@eqx.filter_jit
def pushed(adjoint, fed, network, receive, point, lr, when, key, time=0):
    """The hypergradient of every node at a point `(x, y, w)`."""
    everyone = fed.everyone
    values = (everyone.deal(value, "point") for value in (*point, receive))
    at = Equilibrium(*values, network, lr, when, time)
    return everyone.gather(adjoint.hypergradient(fed, at, key), "h")[0]


def hypergradient(adjoint, links, point, when, seed=0, counts=None):
    network, fed = links.network(N), federation(counts=counts)
    adjoint = jax.tree.map(jnp.asarray, adjoint)  # other numbers compile nothing new
    receive = receiving_weights(network)
    return np.asarray(pushed(adjoint, fed, network, receive, point, LR, when, jr.key(seed)))


# ------------------------------------------------------------------ the boxes in numpy


def gradients(q, x, y):
    """`∇_x f_i, ∇_y f_i, ∇_y g_i` of every node."""
    f_x = q.rho[:, None] * (x - q.e) + np.einsum("nij,nj->ni", q.E, y)
    f_y = np.einsum("nij,nj->ni", q.D, y - q.c) + np.einsum("nij,ni->nj", q.E, x)
    g_y = np.einsum("nij,nj->ni", q.A, y) - np.einsum("nij,nj->ni", q.B, x) - q.b
    return f_x, f_y, g_y


def outer(q, x, y, counts):
    """`mean f_i(x_i, y_i)`, weighted."""
    bend = np.einsum("ni,nij,nj->n", y - q.c, q.D, y - q.c) / 2
    each = bend + q.rho / 2 * np.sum((x - q.e) ** 2, axis=1) + np.einsum("ni,nij,nj->n", x, q.E, y)
    return np.average(each, weights=counts)


def sgp_step(q, W, x, z, w, lr, when):
    """One step of stochastic gradient push."""
    move = lr * gradients(q, x, z / w[:, None])[2]
    return (W @ (z - move) if when == "before" else W @ z - move), W @ w


def stationary(W):
    """The w that the weights leave alone, with sum n."""
    values, vectors = np.linalg.eig(W)
    w = np.real(vectors[:, np.argmin(np.abs(values - 1))])
    return w / w.sum() * len(W)


def resting_point(q, W, x, lr, when, steps=200):
    """y and w where many steps of push-sum, with its own w at rest, come to."""
    z, w = np.zeros((len(W), DY)), stationary(W)
    for _ in range(steps):
        z, w = sgp_step(q, W, x, z, w, lr, when)
    return z / w[:, None], w


def operators(q, W, w, lr, when):
    """A and B, dense: transposed derivatives of a step of push-sum in z and x. Rows: node by node."""
    n = len(W)
    mix, nothing = np.kron(W, np.eye(DY)), np.zeros((n * DY, n * DY))
    hessian, mixed = nothing.copy(), np.zeros((n * DY, n * DX))
    for i in range(n):
        here = slice(i * DY, (i + 1) * DY)
        hessian[here, here] = q.A[i] / w[i]
        mixed[here, i * DX : (i + 1) * DX] = -q.B[i]
    if when == "before":
        return (mix @ (np.eye(n * DY) - lr * hessian)).T, -lr * (mix @ mixed).T
    return (mix - lr * hessian).T, -lr * mixed.T


def starts(q, x, y, w):
    """`c_x` and `c` of the mean cost, as long vectors."""
    f_x, f_y, _ = gradients(q, x, y)
    return f_x.ravel() / len(x), (f_y / w[:, None]).ravel() / len(x)


def exact(q, W, point, lr, when):
    """`B(I − A)⁻¹c + c_x`, one row a node."""
    A, B = operators(q, W, point[2], lr, when)
    c_x, c = starts(q, *point)
    return (B @ np.linalg.solve(np.eye(len(A)) - A, c) + c_x).reshape(-1, DX)


def exact_own(q, W, point, lr, when):
    """`d f_i/dx_i` of every node's own cost."""
    n, (A, B) = len(W), operators(q, W, point[2], lr, when)
    f_x, f_y, _ = gradients(q, *point[:2])
    rows = []
    for i in range(n):
        c = np.zeros((n, DY))
        c[i] = f_y[i] / point[2][i]
        rows.append((B @ np.linalg.solve(np.eye(len(A)) - A, c.ravel())).reshape(n, DX)[i] + f_x[i])
    return np.stack(rows)
