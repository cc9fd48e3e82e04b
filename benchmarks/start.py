"""How long it takes from the start of Python to the first step, and where compile time goes.

Processes of their own import the library, set up FedNest's experiment with hyper-representations
and run a step: without a cache of compiled programs, and with one that an earlier process has filled. The
parts are what JAX itself reports: tracing, lowering, compiling. A process whose random numbers are not
JAX's usual ones (`unsafe_rbg`, which XLA makes itself) shows what part of the compile time these take.

    python benchmarks/start.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Any

from timing import figure

PARTS = {
    "jaxpr_trace_duration": "trace",
    "jaxpr_to_mlir_module_duration": "lower",
    "backend_compile_duration": "compile",
}
CACHE = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def child() -> None:
    """The experiment in this process: prints what it took."""
    begin = time.perf_counter()
    import jax
    from representation import Steps, federated, method, problem

    imported = time.perf_counter()
    seconds: Counter[str] = Counter()
    programs: Counter[str] = Counter()

    def note(event: str, duration: float, **_: Any) -> None:
        if (part := PARTS.get(event.rsplit("/", 1)[-1])) is not None:
            seconds[part] += duration
            programs[part] += 1

    jax.monitoring.register_event_duration_secs_listener(note)
    steps = Steps(problem(), federated(), method(), steps=1)
    made, before = time.perf_counter(), (dict(seconds), dict(programs))
    steps()
    first = time.perf_counter()
    compiled = programs["lower"] - before[1].get("lower", 0)
    parts = {name: seconds[name] - before[0].get(name, 0.0) for name in PARTS.values()}
    steps()
    again = time.perf_counter() - first
    later = programs["lower"] - before[1].get("lower", 0) - compiled
    print(
        json.dumps(
            {
                "import": imported - begin,
                "data and first state": made - imported,
                "first step": first - made,
                "second step": again,
                "of the first step": parts,
                "programs of the first step": compiled,
                "programs of later steps": later,
            }
        )
    )


def measured(**settings: str) -> dict[str, Any]:
    """What a process with these settings says, and how long it took from its start to its first step."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, "child"], check=True, capture_output=True, text=True, env=kept | settings
    )
    total = time.perf_counter() - begin
    said: dict[str, Any] = json.loads(done.stdout)
    return {"seconds": total - said["second step"]} | said


def main() -> None:
    """Print the figures."""
    cold = measured()
    with tempfile.TemporaryDirectory() as folder:
        cache = CACHE | {"JAX_COMPILATION_CACHE_DIR": folder}
        measured(**cache)
        warm = measured(**cache)
    other = measured(JAX_DEFAULT_PRNG_IMPL="unsafe_rbg")
    figure("seconds to the first step, nothing compiled before", cold["seconds"], **_rounded(cold))
    figure("seconds to the first step, compiled programs in a cache", warm["seconds"], **_rounded(warm))
    what = "programs compiled for an experiment's steps: the first, and all later ones"
    figure(what, cold["programs of the first step"] + cold["programs of later steps"], at_most=1)
    share = 1 - other["of the first step"]["compile"] / cold["of the first step"]["compile"]
    figure("share of the step's compile time that JAX's random numbers take", share)


def _rounded(said: Any) -> Any:
    if isinstance(said, dict):
        return {name: _rounded(value) for name, value in said.items()}
    return float(f"{said:.3g}") if isinstance(said, float) else said


if __name__ == "__main__":
    child() if sys.argv[1:] == ["child"] else main()
