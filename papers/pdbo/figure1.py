"""Figure 1 of PDBO: the error factors μ_{α,β} of VR-HGP and μ_{1,0} of HGP against the contraction η_A.

    python papers/pdbo/figure1.py [folder]

prints a table, and draws `figure1.png` and `figure1.svg` in the folder (default: runs/pdbo) if matplotlib is
installed. The paper's text does not name the curves of its figure 1: these are the pairs of its figure 2.

Reference: N. Terashita, S. Hara, arXiv:2210.02129, 2022, appendix C.5.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from fedbilevel.theory import vr_hgp_factor

PAIRS = ((1.0, 0.0), (0.0, 1.0), (0.1, 0.9), (0.5, 0.5), (0.9, 0.1))
ROWS = (0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

# One colour (Okabe and Ito) and one kind of line for each pair.
LOOKS = (("#000000", "-"), ("#E69F00", ":"), ("#CC79A7", "-."), ("#009E73", "--"), ("#0072B2", "-"))


def table() -> str:
    """One row for each η_A, one column for each (α, β); at last how many times the last pair's HGP's is."""
    alphas, betas = np.transpose(PAIRS)
    factors = vr_hgp_factor(alphas, betas, np.array(ROWS)[:, None])
    names = [f"({alpha:g}, {beta:g})" for alpha, beta in PAIRS]
    lines = ["".join(f"{name:>11}" for name in ("eta", *names, "HGP / last"))]
    for eta, row in zip(ROWS, factors, strict=True):
        lines.append("".join(f"{value:>11.4g}" for value in (eta, *row, row[0] / row[-1])))
    return "\n".join(lines)


def draw(folder: pathlib.Path) -> list[pathlib.Path]:
    """Write the figure as PNG and SVG; the files written, none without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    figure = Figure(figsize=(4.2, 3), layout="constrained")
    panel = figure.subplots()
    eta = np.linspace(0, 1, 400)[1:-1]
    for (alpha, beta), (colour, line) in zip(PAIRS, LOOKS, strict=True):
        name = f"({alpha:g}, {beta:g})" + (" HGP" if alpha == 1 else "")
        panel.plot(eta, vr_hgp_factor(alpha, beta, eta), color=colour, linestyle=line, label=name)
    panel.set(xlabel=r"$\eta_A$", ylabel=r"$\mu_{\alpha,\beta}$", xlim=(0, 1), ylim=(0, 10))
    panel.legend(title=r"$(\alpha, \beta)$", frameon=False)
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "figure1.png", folder / "figure1.svg"]
    for file in files:
        figure.savefig(file, dpi=300)
    return files


def main(arguments: Sequence[str]) -> None:
    """Print the table, then draw."""
    print(table())
    files = draw(pathlib.Path(arguments[0] if arguments else "runs/pdbo"))
    print("\n".join(map(str, files)) or "no figure: install matplotlib to draw it")


if __name__ == "__main__":
    main(sys.argv[1:])
