"""The mesh on this machine: one process against two at equal threads, and what more clients cost.

The processes share the cores of the machine between them. Each measurement is a program of its own (JAX
starts once in a process), so times of two of them are compared, each the best of several blocks of steps.

    python benchmarks/mesh.py [clients of the comparison]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

STEPS, BLOCKS = 10, 5
SMALL = (100, 1_000, 10_000, 100_000)
"""Numbers of small clients."""


def main(clients: int = 64) -> None:
    """Print the figures."""
    from timing import figure, milliseconds

    times = {count: measured(count, "network", clients) for count in (1, 2)}
    work = {
        f"{count} processes, client steps a second": round(clients / best) for count, best in times.items()
    }
    about: dict[str, Any] = {"clients": clients, "cores": len(os.sched_getaffinity(0))} | work
    figure(
        "work per second of two processes over that of one, at equal threads", times[1] / times[2], **about
    )
    for count in (1, 2):
        steps = {n: measured(count, "small", n) for n in SMALL}
        parts = {f"{n:,} clients, ms": milliseconds(seconds) for n, seconds in steps.items()}
        growth = (steps[SMALL[-1]] - steps[SMALL[0]]) / (SMALL[-1] - SMALL[0])
        figure(f"µs that a small client adds to a step, {count} processes", 1e6 * growth, **parts)


def measured(processes: int, kind: str, clients: int) -> float:
    """Seconds of a step, in so many processes that share the cores."""
    script = [__file__, "measure", str(processes), kind, str(clients)]
    command = [sys.executable, "-m", "fedbilevel", "launch", "-p", str(processes), "--", *script]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(json.loads(out)["seconds"])


def measure(processes: int, kind: str, clients: int) -> None:
    """Inside of one of the processes: print the best time of a step."""
    cores, rank = sorted(os.sched_getaffinity(0)), int(os.environ["JAX_PROCESS_ID"])
    os.sched_setaffinity(0, cores[rank * len(cores) // processes : (rank + 1) * len(cores) // processes])

    import jax.random as jr

    import fedbilevel as fb
    from fedbilevel.engine.mesh_join import leads

    fb.Mesh.join()
    problem, data, algorithm = {"network": network, "small": small}[kind](clients)
    session = fb.Mesh().federation(problem, data).compile(algorithm)
    state, times = session.init(jr.key(0))[0], []
    for _ in range(BLOCKS + 1):  # the first one compiles
        begin = time.perf_counter()
        session.advance(state, jr.key(1), 0, STEPS, STEPS)
        times.append(time.perf_counter() - begin)
    if leads():
        print(json.dumps({"seconds": min(times[1:]) / STEPS}))


def network(clients: int, samples: int = 64) -> tuple[Any, Any, Any]:
    """Clients that train a small network on noise: how long it takes does not depend on what it learns."""
    import numpy as np

    import fedbilevel as fb

    draws = np.random.default_rng(0)
    data = {
        "inputs": draws.random((clients, samples, 28, 28, 1), np.float32),
        "labels": draws.integers(10, size=(clients, samples)).astype(np.int32),
    }
    problem = fb.ClassWeights(fb.MLP((64, 10)), inputs=(28, 28, 1), classes=10)
    return (
        problem,
        fb.Clients(data, batch_size=32),
        fb.LFedNest(0.01, 0.05, terms=3, lower_steps=5, smoothness=10.0),
    )


def small(clients: int) -> tuple[Any, Any, Any]:
    """Clients with four samples of eight numbers and a local step on eight parameters."""
    import jax.numpy as jnp
    import numpy as np

    import fedbilevel as fb

    rows = np.random.default_rng(0).random((clients, 4, 8), np.float32)
    problem = fb.single_level(lambda x, samples: jnp.mean((samples - x) ** 2), jnp.zeros(8))
    return problem, fb.Clients(rows, batch_size=2), fb.FedAvg(0.1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        main(*map(int, sys.argv[1:]))
