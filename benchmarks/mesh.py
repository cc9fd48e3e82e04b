"""The mesh on this machine: one process against two at equal threads, and what more clients cost.

The processes share the cores of the machine between them. One and two processes are programs of their own,
since JAX starts once in a process; so their times are compared, each the best of several blocks of steps.

    python benchmarks/mesh.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

STEPS, BLOCKS = 10, 5
CLIENTS = 64
"""How many clients train a network in the comparison."""
SMALL = (100, 1_000, 10_000, 100_000)
"""Numbers of small clients."""


def main() -> None:
    """Print the figures."""
    from timing import figure, milliseconds

    seconds = {processes: measured(processes) for processes in (1, 2)}
    whole = {processes: times["network", CLIENTS] for processes, times in seconds.items()}
    about: dict[str, Any] = {"clients": CLIENTS, "cores": len(os.sched_getaffinity(0))}
    about |= {f"client steps a second, {named(p)}": round(CLIENTS / best) for p, best in whole.items()}
    figure(
        "work per second of two processes over that of one, at equal threads", whole[1] / whole[2], **about
    )
    for processes, times in seconds.items():
        steps = [times["small", clients] for clients in SMALL]
        parts = {
            f"ms a step, {n:,} clients": milliseconds(step) for n, step in zip(SMALL, steps, strict=True)
        }
        growth = 1e6 * (steps[-1] - steps[0]) / (SMALL[-1] - SMALL[0])
        figure(f"µs that a small client adds to a step, {named(processes)}", growth, **parts)


def named(processes: int) -> str:
    """So many processes, in words."""
    return f"{processes} process{'es' * (processes > 1)}"


def measured(processes: int) -> dict[tuple[str, int], float]:
    """Seconds of a step, by kind and number of clients, in so many processes that share the cores."""
    script = [__file__, "measure", str(processes)]
    command = [sys.executable, "-m", "fedbilevel", "launch", "-p", str(processes), "--", *script]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {(kind, clients): seconds for kind, clients, seconds in json.loads(out)}


def measure(processes: int) -> None:
    """Inside of one of the processes: print the best times of a step."""
    cores, rank = sorted(os.sched_getaffinity(0)), int(os.environ["JAX_PROCESS_ID"])
    os.sched_setaffinity(0, cores[rank * len(cores) // processes : (rank + 1) * len(cores) // processes])

    import fedbilevel as fb
    from fedbilevel.engine.mesh.join import leads

    fb.Mesh.join()
    found = [("network", CLIENTS, best(*network(CLIENTS)))]
    found += [("small", clients, best(*small(clients))) for clients in SMALL]
    if leads():
        print(json.dumps(found))


def best(problem: Any, clients: Any, algorithm: Any) -> float:
    """Seconds of a step, in the best of several blocks."""
    import jax.random as jr

    import fedbilevel as fb

    session = fb.Mesh().federation(problem, clients).compile(algorithm)
    state, times = session.init(jr.key(0))[0], []
    for _ in range(BLOCKS + 1):  # the first one compiles
        begin = time.perf_counter()
        session.advance(state, jr.key(1), 0, STEPS, STEPS)
        times.append(time.perf_counter() - begin)
    return min(times[1:]) / STEPS


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
        measure(int(sys.argv[2]))
    else:
        main()
