"""What the tests of FedBiO and its relatives share: quadratics, runs of the library, their boxes in numpy.

The boxes are loops over clients and steps that share nothing with the library. A point is a list with one
tuple of variables a client: `(x, y, u)`, or `(x, y)` where the lower level is local.
"""

import contextlib

import jax
import numpy as np

import fedbilevel as fb
from fedbilevel.fed.ledger import Ledger
from fedbilevel.fed.place import Kept
from fedbilevel.problem.quadratic import lower_objective, upper_objective

CLIENTS, DX, DY, SAMPLES = 4, 3, 4, 2
CAPACITY = 4000  # one compiled program for short and for long runs
GLOBAL, LOCAL = (True, True, True), (True, False)  # which variables are averaged
X0, Y0 = np.array([1.0, -2.0, 0.5]), np.array([0.3, 1.0, -1.0, 2.0])


def drawn(seed=1, clients=CLIENTS, **options):
    """A quadratic whose clients differ, in numpy."""
    return jax.tree.map(np.asarray, fb.Quadratic.random(jax.random.key(seed), clients, DX, DY, **options))


def problem():
    return fb.Problem(upper_objective, lower_objective, X0, Y0)


def clients_of(q, **options):
    """Two different samples a client; their mean is the client's own quadratic."""

    def pair(rows, spread=0.0):
        return np.stack([rows - spread, rows + spread], axis=1)

    lower = {"A": pair(q.A, 0.2 * np.eye(DY)), "B": pair(q.B, 0.5), "b": pair(q.b, 0.5)}
    upper = {"D": pair(q.D), "E": pair(q.E, 0.5), "c": pair(q.c, 0.5), "e": pair(q.e, 0.5)}
    return fb.Clients(lower, upper | {"rho": pair(q.rho)}, **options)


# ------------------------------------------------------------------ the library


class Running:
    """An algorithm in the simulator, from its start."""

    def __init__(self, clients, algorithm, seed=0, dropout=0.0):
        with contextlib.ExitStack() as stack:
            engine = fb.Simulator(dropout=dropout)
            self.session = stack.enter_context(engine.connect(problem(), clients, algorithm))
        self.key, self.time, self.ledgers = jax.random.key(seed), 0, []
        self.state, counts = self.session.init(jax.random.key(seed + 1000))
        self.start = Ledger.from_counts(counts)

    def advance(self, steps=1):
        """Some steps; their ledgers are in `ledgers`, one each."""
        block = self.session.advance(self.state, self.key, self.time, steps, CAPACITY)
        assert block.finite
        assert block.done == steps
        self.state, self.time = block.state, self.time + steps
        for step in range(min(steps, 3)):
            self.ledgers.append(Ledger.from_counts({e: times[step] for e, times in block.counts.items()}))
        return self

    @property
    def z(self):
        """The variables, one tuple a client."""
        state = getattr(self.state, "variables", self.state)
        return rows_of(state.shared, state.own)

    @property
    def momenta(self):
        """Of FedBiOAcc: likewise."""
        held = self.state.held
        shared = held[1] if held else self.state.momenta.shared
        return rows_of(shared, self.state.momenta.own)


def rows_of(shared, own):
    """One tuple a client of what is averaged (and may be kept by everybody) and of what is its own."""

    def row(client):
        everyones = [leaf[client] for leaf in shared.value] if isinstance(shared, Kept) else shared
        return tuple(np.asarray(leaf) for leaf in (*everyones, *(kept.value[client] for kept in own)))

    return [row(client) for client in range(count_of(own, shared))]


def count_of(own, shared):
    kept = [*own, *([shared] if isinstance(shared, Kept) else [])]
    return jax.tree.leaves(kept)[0].shape[0] if kept else CLIENTS


def distance(a, b):
    """The largest difference of two points."""
    return max(np.max(np.abs(p - q)) for s, t in zip(a, b, strict=True) for p, q in zip(s, t, strict=True))


# ------------------------------------------------------------------ the boxes in numpy


def global_field(q):
    """`(∇_x f_i − J_i u, ∇_y g_i, H_i u − ∇_y f_i)`; `J_i = −B_iᵀ`."""

    def at(i, z):
        x, y, u = z
        f_x, f_y, g_y = gradients(q, i, x, y)
        return f_x + q.B[i].T @ u, g_y, q.A[i] @ u - f_y

    return at


def local_field(q, rate, terms):
    """`(∇_x f_i − J_i u, ∇_y g_i)` with `u = τ Σ_{j≤Q} (I − τH_i)^j ∇_y f_i`."""

    def series(left):
        return rate * sum(np.linalg.matrix_power(left, j) for j in range(terms + 1))

    inverses = [series(np.eye(DY) - rate * A) for A in q.A]

    def at(i, z):
        f_x, f_y, g_y = gradients(q, i, *z)
        return f_x + q.B[i].T @ (inverses[i] @ f_y), g_y

    return at


def gradients(q, i, x, y):
    f_x = q.rho[i] * (x - q.e[i]) + q.E[i] @ y
    f_y = q.D[i] @ (y - q.c[i]) + q.E[i].T @ x
    return f_x, f_y, q.A[i] @ y - q.B[i] @ x - q.b[i]


def fedbio_round(field, shared, rows, rates, counts, members):
    """I_i steps of every member, and the average of what is shared."""
    new = {}
    for i in members:
        new[i] = rows[i]
        for _ in range(counts[i]):
            new[i] = stepped(new[i], rates, field(i, new[i]))
    return together(rows, new, shared)


def fedbioacc_round(field, shared, rows, momenta, rates, decay, alpha, time, counts, members, answering=None):
    """STORM: as the paper has it, t counted from `time`; `answering` are those who send momenta too."""
    new, old, moving = {}, {}, {}
    for i in members:
        z, m, t = rows[i], momenta[i], time
        for done in range(counts[i]):
            t = time + done
            before, z = z, stepped(z, [rate * alpha(t) for rate in rates], m)
            if done < counts[i] - 1:
                m = corrected(field, i, z, before, m, decay, alpha(t))
        new[i], old[i], moving[i] = z, before, (m, alpha(t))
    answering = members if answering is None else answering
    averaged = together(rows, new, shared)
    after = {
        i: corrected(field, i, averaged[i], old[i], moving[i][0], decay, moving[i][1]) for i in answering
    }
    # Who is not heard of again has not kept its own variables either.
    rows = [row if i in answering else own_of(rows[i], row, shared) for i, row in enumerate(averaged)]
    return rows, together(momenta, after, shared)


def corrected(field, i, z, before, momenta, decay, alpha):
    parts = zip(field(i, z), field(i, before), momenta, decay, strict=True)
    return tuple(here + (1 - c * alpha**2) * (m - there) for here, there, m, c in parts)


def stepped(z, rates, directions):
    return tuple(v - rate * d for v, rate, d in zip(z, rates, directions, strict=True))


def together(rows, new, shared):
    """Everybody gets the average of the shared variables of `new`; only those in it new ones of their own."""
    means = [np.mean([row[j] for row in new.values()], axis=0) for j in range(len(shared))]
    return [own_of(new.get(i, row), means, shared) for i, row in enumerate(rows)]


def own_of(own, common, shared):
    return tuple(common[j] if is_shared else own[j] for j, is_shared in enumerate(shared))
