"""What must not matter: the order of the clients, having each of them twice, running again."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import fedbilevel as fb
from conform.cases import CASES, RATES, THREE, bilevel

pytestmark = pytest.mark.usefixtures("float64")

# With full batches and all clients only the clients' own draws could tell them apart, so the local
# methods use the truncated series, which draws nothing.
SUM: dict[str, Any] = RATES | {"terms": 4, "smoothness": 4.0, "series": "sum", "lower_steps": 2}
METHODS = {
    "FedNest": (bilevel, lambda: fb.FedNest(**SUM | {"series": "sampled"})),
    "LFedNestSVRG": (bilevel, lambda: fb.LFedNestSVRG(**SUM)),
    "LFedNestNonAlt": (bilevel, lambda: fb.LFedNestNonAlt(**SUM)),
    "FedBiO": (bilevel, lambda: fb.FedBiO(**THREE, sync_every=2)),
    "SimFBO": (bilevel, lambda: fb.SimFBO(**THREE, sync_every=2, local_lr=0.5)),
    "FedMSA": (bilevel, lambda: fb.FedMSA(**THREE, sync_every=2, renew=0.4)),
    "F2SA": (bilevel, lambda: fb.F2SA(0.01, 0.1, 5.0, sync_every=2)),
    "AggITD": (bilevel, lambda: fb.AggITD(**THREE, lower_rounds=3, lower_steps=2)),
    # c α² is below 1: the momenta remember, and what clients keep must not depend on their order.
    "FedBiOAcc": (bilevel, lambda: fb.FedBiOAcc(**THREE, sync_every=2, delta=1.5, t0=4.0, c_upper=0.5)),
    **{name: CASES[name][:2] for name in ("minimax", "compositional", "FedAvgS", "FedGDAGT")},
}


def rearranged(clients: fb.Clients, order: list[int]) -> fb.Clients:
    """The clients of the given numbers, in that order."""
    parts = []
    for samples in (clients.lower, clients.upper):
        rows = [range(int(samples.start[i]), int(samples.start[i] + samples.size[i])) for i in order]
        parts.append(fb.Clients.indexed(samples.flat, rows).lower)
    return fb.Clients(*parts)


@pytest.mark.parametrize("name", METHODS)
def test_order_and_duplication_of_clients_change_nothing(name: str) -> None:
    make, algorithm = METHODS[name]
    problem, clients = make()
    plain = fb.solve(problem, rearranged(clients, [0, 1, 2]), algorithm(), 6)
    permuted = fb.solve(problem, rearranged(clients, [2, 0, 1]), algorithm(), 6)
    doubled = fb.solve(problem, rearranged(clients, [0, 1, 2, 0, 1, 2]), algorithm(), 6)
    for other in (permuted, doubled):
        for p, q in zip(
            jax.tree.leaves((other.x, other.y)), jax.tree.leaves((plain.x, plain.y)), strict=True
        ):
            np.testing.assert_allclose(p, q, rtol=1e-12, atol=1e-12)
    assert permuted.ledger == plain.ledger
    assert doubled.ledger.rounds == plain.ledger.rounds
    assert doubled.ledger.bytes == 2 * plain.ledger.bytes
    assert doubled.ledger.calls == {kind: 2 * n for kind, n in plain.ledger.calls.items()}


def test_leaving_a_client_out_does_matter() -> None:
    make, algorithm = METHODS["FedBiO"]
    problem, clients = make()
    plain = fb.solve(problem, clients, algorithm(), 6)
    fewer = fb.solve(problem, rearranged(clients, [0, 1]), algorithm(), 6)
    assert float(np.abs(plain.x - fewer.x).max()) > 1e-3
