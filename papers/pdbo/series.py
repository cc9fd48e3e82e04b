"""Table 1 of PDBO: whether the series of the hypergradient converges, by the step size in its recursion.

    python papers/pdbo/series.py

The recursion multiplies by `P − (α/w) H_i`, H_i of a minibatch at one node; over complete links it converges
where α is below one over the largest curvature that nodes meet. Prints the norm of the hypergradient after
20 and 100 terms for two α: that of the inner steps in small, 0.25, and a smaller one. PDBO-DA over complete
links as in the preset `small` of table1.toml, at the end of its first T inner steps, with seed 10.
"""

from __future__ import annotations

import pathlib

import numpy as np

import fedbilevel as fb
from fedbilevel.experiment.build import build
from fedbilevel.experiment.config import plans

TABLE = pathlib.Path(__file__).parent / "table1.toml"
RATES, TERMS, SEED = (0.25, 0.05), (20, 100), 10


def norm(lr: float, terms: int) -> float:
    """Of the hypergradients of all nodes: where they step along them with step size 1, of how far x goes."""
    changes = {
        "algorithm.adjoint_lr": lr,
        "algorithm.adjoint.terms": terms,
        "algorithm.upper": {"kind": "SGD", "learning_rate": 1.0},
    }
    (plan,) = plans(TABLE, preset="small", changes=changes, seeds=[SEED], only=["PDBO-DA, FC"])
    built = build(plan)
    result = fb.solve(built.problem, built.clients, built.algorithm, 1, seed=SEED, engine=built.engine)
    return float("inf") if result.diverged else float(np.linalg.norm(np.asarray(result.x, float)))


def main() -> None:
    """Print the table: one row for each step size."""
    print(f"{'α':>8}" + "".join(f"{terms:>10} terms" for terms in TERMS))
    for lr in RATES:
        print(f"{lr:>8g}" + "".join(f"{norm(lr, terms):>16.3g}" for terms in TERMS), flush=True)


if __name__ == "__main__":
    main()
