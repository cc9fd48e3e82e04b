"""Every algorithm on every engine: the same iterates and the same ledger."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest

import fedbilevel as fb
from conform.cases import CASES
from conform.compare import close, run, simulated

# In single precision programs differ in nothing but types, and the tests of the engine itself use it.
PAIRS = [(name, True) for name in CASES] + [("every-verb", False)]


@pytest.mark.parametrize(
    ("name", "x64"), PAIRS, ids=lambda v: v if isinstance(v, str) else f"float{32 + 32 * v}"
)
def test_process_equals_simulator(name: str, x64: bool, processes: fb.Process) -> None:
    with jax.enable_x64(x64):
        remote = run(name, processes)
    local = simulated(name, x64)
    close(remote, local, 1e-10 if x64 else 1e-5)
    assert remote.ledger == local.ledger
    assert [row.keys() for row in remote.history] == [row.keys() for row in local.history]
    assert not remote.failures


@pytest.mark.parametrize("name", CASES)
def test_same_seed_same_bits_and_no_second_compilation(name: str, compilations: Callable[[], int]) -> None:
    first = simulated(name, True)
    before = compilations()
    with jax.enable_x64(True):
        again = run(name, "simulator")
    assert compilations() == before
    assert jax.tree.all(
        jax.tree.map(lambda p, q: (np.asarray(p) == np.asarray(q)).all(), first.state, again.state)
    )
    assert again.history == first.history
    assert again.ledger == first.ledger


def test_engines_silence_the_same_clients(processes: fb.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated failures are part of the semantics: they fall on the same clients everywhere."""
    monkeypatch.setattr(processes, "dropout", 0.3)
    with jax.enable_x64(True):
        for name in ("FedNest-sum", "every-verb"):
            remote = run(name, processes)
            local = simulated(name, True, 0.3)
            close(remote, local, 1e-10)
            assert remote.ledger == local.ledger
            assert local.ledger != simulated(name, True).ledger, "nobody was silenced"
