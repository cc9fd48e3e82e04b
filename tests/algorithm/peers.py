"""What the tests of D-SOBA and MA-DSBO share: their boxes in numpy, which share nothing with the library.

Rows are nodes. A row of Z is `(x, y, u)`; on a quadratic its directions are `M_i z_i + m_i`.
"""

import functools

import jax.random as jr
import numpy as np

from algorithm.nodes import ALIKE, DX, DY, WEIGHTS, N, counted, drawn
from fedbilevel import links

X, Y, U = slice(0, DX), slice(DX, DX + DY), slice(DX + DY, DX + 2 * DY)
Z0 = np.tile(np.concatenate([np.ones(DX), np.zeros(2 * DY)]), (N, 1))  # where the quadratic starts
RING, COMPLETE = WEIGHTS["ring"], WEIGHTS["complete"]
BALANCED = links.Stochastic(0.3, 0.7, directed=False, balanced=True, seed=2)
IN_TURN = links.Given([RING, COMPLETE])


def directions(q):
    """M and m of every node: `(∇_x f + Bᵀu, ∇_y g, H u − ∇_y f)`, since `J = −Bᵀ`."""
    nothing, matrices, offsets = np.zeros((DY, DY)), [], []
    for A, B, b, c, D, E, e, rho in zip(q.A, q.B, q.b, q.c, q.D, q.E, q.e, q.rho, strict=True):
        matrices.append(np.block([[rho * np.eye(DX), E, B.T], [-B, A, nothing], [-E.T, -D, A]]))
        offsets.append(np.concatenate([-rho * e, -b, D @ c]))
    return np.stack(matrices), np.stack(offsets)


def dsoba(q, weights, rates, average=1.0, correction=None, low=-np.inf, remembered="free"):
    """D-SOBA's Z after 1, 2, ... steps with these W; x is at least `low`.

    What exact diffusion remembers of x is "free", or, wrongly, "projected".
    """
    (M, m), Z = directions(q), Z0
    R, averages = np.repeat(rates, (DX, DY, DY)), np.broadcast_to(average, len(weights))
    moving, D, mixed, psi, free = np.zeros((N, DX)), 0 * Z, 0 * Z, Z, Z
    for W, theta in zip(weights, averages, strict=True):
        before, D = D, np.einsum("nij,nj->ni", M, Z) + m
        moving = D[:, X] = (1 - theta) * moving + theta * D[:, X]
        if correction is None:
            free = W @ (Z - R * D)
        elif correction == "tracking":
            S = mixed + D - before
            free, mixed = W @ (Z - R * S), W @ S
        else:
            old, psi = psi, Z - R * D
            phi = psi + {"free": free, "projected": Z}[remembered] - old
            free = (phi + W @ phi) / 2
        Z = np.concatenate([np.maximum(free[:, X], low), free[:, DX:]], axis=1)
        yield Z


def tracked(slope, V, weights, lr):
    """V after as many steps of gradient tracking as there are weights."""
    S = now = slope(V)
    for W in weights:
        V, before = W @ V - lr * S, now
        now = slope(V)
        S = W @ S + now - before
    return V


def madsbo(q, weights, rates, steps, average=1.0):
    """MA-DSBO's Z after 1, 2, ... steps of T and N inner ones; of each, the `T + N + 1` weights."""
    (M, m), Z, r = directions(q), Z0, np.zeros((N, DX))

    def slope(part, V):
        now = Z.copy()
        now[:, part] = V
        return (np.einsum("nij,nj->ni", M, now) + m)[:, part]

    for W in weights:
        lower, adjoint, upper = W[: steps[0]], W[steps[0] : sum(steps)], W[-1]
        for part, lr, matrices in ((Y, rates[1], lower), (U, rates[2], adjoint)):
            V = tracked(functools.partial(slope, part), Z[:, part], matrices, lr)
            Z = Z.copy()
            Z[:, part] = V
        r = (1 - average) * r + average * slope(X, Z[:, X])
        Z = np.concatenate([upper @ Z[:, X] - rates[0] * r, Z[:, DX:]], axis=1)
        yield Z


def last(iterates):
    """The last of them."""
    for Z in iterates:
        found = Z
    return found


def key_of_step(time, seed=0):
    return jr.fold_in(jr.key(seed), time)


def drawn_weights(kind, key, time):
    """W of an exchange."""
    return np.asarray(kind.network(N).draw(key, time))


def rows(running):
    """Z of the library."""
    state = running.state
    return np.concatenate([np.asarray(kept.value) for kept in (state.x, state.y, state.u)], axis=1)


@functools.cache
def optimum(counts=ALIKE):
    """`(x*, y*, u*)` of the weighted problem, at every node."""
    return solved(drawn() if counts == ALIKE else counted(counts))


def solved(q):
    """`(x*, y*, u*)`: where the mean of the directions is zero, at every node."""
    M, m = directions(q)
    return np.tile(np.linalg.solve(M.mean(axis=0), -m.mean(axis=0)), (N, 1))
