"""FedBiO, table 1 and theorems 1 to 4: the exponents of its complexities, measured on a nonconvex problem.

For a ladder of ε every method runs with the batch size, period, number of terms and step sizes that its
theorem prescribes for that ε (constants are chosen once, for the first rung), until the mean of `‖∇h(x)‖²`
over its iterates is at most ε. Then `log cost = slope · log ε + constant` is fitted by least squares:

    python papers/fedbio/complexity              # five rungs, three seeds: six minutes of one core
    python papers/fedbio/complexity --rungs 3    # a shorter one

A theorem bounds the cost from above: a slope that is no steeper than the paper's agrees with it. As long as a
method gets there at all, its step sizes decide the slope; what is at stake is whether the noise and the bias
that the clients' drift leaves behind shrink along with ε. So the last column says how much of ε they are, and
one row, whose step sizes do not shrink, is there to fail.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ladder import climb
from rich.console import Console
from tables import ladder_table, slope_table
from theorems import CLAIMS


def main(arguments: Sequence[str] | None = None) -> None:
    """Climb all ladders and print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rungs", type=int, default=5, help="how many ε, each half of the one before")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    rungs = []
    for claim in CLAIMS:
        for rung in climb(claim, options.rungs, options.seeds):
            rungs.append(rung)
            said = f"{rung.cost('rounds'):,.0f} rounds" if rung.reached else "not reached"
            print(f"{claim.name}: ε = {rung.epsilon:.4g}, {said}", file=sys.stderr, flush=True)
    console = Console(width=130)
    console.print(ladder_table(rungs), slope_table(rungs))


if __name__ == "__main__":
    main()
