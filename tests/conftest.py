"""What tests share: float64 where asked for, and one pool of client processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

# Clients' processes compile the same programs as each other: let them share what they compiled.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="fedbilevel-tests-"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import pytest

import fedbilevel as fb


@pytest.fixture
def float64() -> Iterator[None]:
    """The test computes in double precision."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def processes() -> Iterator[fb.Process]:
    """One process engine for all tests; its clients are honest unless an algorithm asks for the contrary."""
    with fb.Process(timeout=120, worker="rogue_worker") as engine:
        yield engine
