"""What tests share: float64 where asked for, and one pool of client processes."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import pathlib
from collections.abc import Callable, Iterator

# Most of the time goes into compilation. It is kept for the next run, and shared by clients' processes;
# and these programs are too small to be worth optimising.
CACHE = pathlib.Path(__file__).parent.parent / ".cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_multi_thread_eigen=false"
# The older way to make loops of a program's operations, all in one piece, takes half the time. XLA stops at a
# flag it does not know, so that it is for these versions only.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ.setdefault("XLA_FLAGS", FLAGS)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import jaxtyping
import pytest

# Shapes and types of annotations are checked while the tests run, and only then.
checked = [f"fedbilevel.{part}" for part in ("draw", "fed", "data", "problem", "adjoint", "local")]
with jaxtyping.install_import_hook(checked, "beartype.beartype"):
    import fedbilevel as fb


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins first, so that no worker is left alone with it at the end."""
    items.sort(key=lambda item: "slow" not in item.keywords)


@pytest.fixture
def float64() -> Iterator[None]:
    """The test computes in double precision."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def all_float64() -> Iterator[None]:
    """All tests of a module compute in double precision, and what they share does too."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module", autouse=True)
def room_for_programs() -> Iterator[None]:
    """Compiled programs are forgotten before the system's limit of mapped regions (65,530 a process) is near.

    A process that goes beyond it is killed by a segmentation fault somewhere in the compiler.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
        gc.collect()


_lowered: list[str] = []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: _lowered.append(event))


@pytest.fixture
def compilations() -> Callable[[], int]:
    """How many programs have been compiled since the test began."""
    start = len(_lowered)
    return lambda: sum("jaxpr_to_mlir" in event for event in _lowered[start:])


@pytest.fixture(scope="session")
def processes() -> Iterator[fb.Process]:
    """One process engine for all tests; its clients are honest unless an algorithm asks for the contrary."""
    with fb.Process(timeout=120, worker="rogue_worker") as engine:
        yield engine
