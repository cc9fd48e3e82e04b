"""PDBO: the curvature of g at every node of a run, which decides whether its series converges.

    python papers/pdbo/from_run/curvature.py runs/pdbo/twenty-nodes/pdbo-da-stod/seed-0

Of a run's folder it takes the first checkpoint that is there, and prints the extreme eigenvalues of
`∇²_yy g_i` on a minibatch of each node, at the node's own (x_i, y_i). Where nodes step after they receive,
terms of the series grow along eigenvalues above about `1/α`, and along negative ones that nodes share. How
much longer the last of 20 terms is than the first is printed for some α, which tells the two apart: with a
smaller α the growth by large eigenvalues ends, that by negative ones only becomes slower.
"""

from __future__ import annotations

import pathlib
import sys

import jax
import jax.random as jr
import numpy as np
from outer_step import growth, outer_step

import fedbilevel as fb
from fedbilevel.adjoint.lanczos import Spectrum, Tridiagonal, spectrum
from fedbilevel.experiment.build import build
from fedbilevel.experiment.config import plans
from fedbilevel.local.gradients import OwnCurvature
from fedbilevel.problem import Client
from fedbilevel.tree import PyTree, row

ITERATIONS, TERMS = 20, 20
SHARES = (1.0, 0.4, 0.1)


def spectra(folder: pathlib.Path) -> list[Spectrum]:
    """Both ends of the spectrum at each node."""
    (plan,) = plans(folder / "config.toml")
    built, point = build(plan), fb.load(min(folder.glob("checkpoint-*.npz")))

    @jax.jit
    def at(node: jax.Array, x: PyTree, y: PyTree) -> tuple[jax.Array, jax.Array]:
        me = Client(built.problem, built.clients, node, node, jr.fold_in(jr.key(0), node))
        diagonal, off = OwnCurvature(ITERATIONS)(me, x, y)
        return diagonal, off

    own = [(node, row(point.x, node), row(point.y, node)) for node in np.arange(built.clients.n)]
    return [spectrum(Tridiagonal(*at(*values))) for values in own]


def growths(folder: pathlib.Path) -> dict[float, float]:
    """How much longer the last term is than the first, by the step size in the recursion."""
    steps = [outer_step(folder, TERMS, share) for share in SHARES]
    return {lr: growth(result) for result, lr in steps}


def main(folder: str) -> None:
    """Print a row for each node, the extremes of all, and how the series grows."""
    found = spectra(pathlib.Path(folder))
    for node, ends in enumerate(found):
        print(f"node {node:3}  {ends.low:10.4g} to {ends.high:10.4g}", flush=True)
    low, high = min(ends.low for ends in found), max(ends.high for ends in found)
    print(f"all       {low:10.4g} to {high:10.4g}; 1/λ = {1 / high:.3g}")
    for lr, grown in growths(pathlib.Path(folder)).items():
        print(f"α = {lr:8.4g}: the last of {TERMS} terms is {grown:.3g} times the first", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
