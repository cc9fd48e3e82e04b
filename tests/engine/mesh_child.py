"""One process of a mesh: runs conformance cases and leaves their results. Started by the tests.

    python mesh_child.py FOLDER NAME:PRECISION:DROPOUT ...

As many host devices as XLA_FLAGS says; one of several processes if the environment says so.
"""

from __future__ import annotations

import gc
import json
import math
import pathlib
import re
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from conform.compare import run
from experiment.tiny import IMAGES, changed, plan
from fedbilevel.engine.mesh import engine as mesh
from fedbilevel.engine.mesh.shard import split_kept
from fedbilevel.experiment.build import build
from fedbilevel.experiment.config import Plan
from fedbilevel.experiment.runner import run_all
from fedbilevel.problem.objective import OfLower


def session_of(algorithm: Any, samples: int, level: str = "upper") -> Any:
    """Five clients with so many samples of 7 numbers; what is learnt is x, or y."""

    def loss(x: Any, rows: jax.Array) -> jax.Array:
        return jnp.mean((rows @ x["a"] - x["b"]) ** 2)

    start = {"a": jnp.ones(7), "b": jnp.zeros(())}
    of_y = OfLower(loss)
    problem = fb.single_level(loss, start) if level == "upper" else fb.Problem(of_y, of_y, (), start)
    clients = fb.Clients([jnp.full((samples, 7), float(i)) for i in range(5)], batch_size=2)
    return fb.Mesh().federation(problem, clients).compile(algorithm)


def exchanges(algorithm: Any, level: str = "upper") -> list[list[Any]]:
    """What the compiled program of a block of steps has devices exchange: kinds, and numbers of elements."""
    session = session_of(algorithm, 100, level)
    kept, shared = split_kept(session.init(jax.random.key(0))[0])
    times = jnp.asarray(0), jnp.asarray(3)
    known = session.federation.layout.everywhere((shared, session.stepper, jax.random.key(1), *times))
    lowered = mesh._advance.lower(session.federation, kept, *known, CAPACITY)
    found = re.findall(_COLLECTIVE, lowered.compile().compiled.as_text())
    return sorted(
        [kind, math.prod(int(length) for length in shape.split(",") if length)] for shape, kind in found
    )


CAPACITY = 50
_COLLECTIVE = r"\w+\[([\d,]*)\]\S* ([a-z]+-(?:reduce|gather|to-all|permute|scatter)(?:-start)?)\("


def shares() -> list[int]:
    """How many samples each device holds."""
    fed = session_of(fb.FedAvg(0.1), 3).federation
    return [int(shard.data.shape[0]) for shard in fed.clients.lower.flat.addressable_shards]


CLIENTS = 5


def own_data(client: int) -> dict[str, Any]:
    """Clients of unequal size."""
    return {"lower": np.random.default_rng(client).normal(size=(2 + client, 3)).astype(np.float32)}


def distance(x: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.mean((rows - x) ** 2)


def fitted(clients: fb.Clients, engine: str) -> fb.Result:
    return fb.solve(fb.single_level(distance, jnp.ones(3)), clients, fb.FedAvg(0.1), 5, engine=engine)


def load_own(folder: pathlib.Path) -> None:
    """Each process loads its clients, and notes whom."""
    seen: list[int] = []

    def load(client: int) -> dict[str, Any]:
        seen.append(client)
        return own_data(client)

    result = fitted(fb.Mesh.clients(CLIENTS, load, batch_size=2, weights="size"), "mesh")
    (folder / f"loaded-{jax.process_index()}.json").write_text(json.dumps(seen))
    if jax.process_index() == 0:
        result.save(folder / "loaded.npz")


def mislabelled(client: int) -> dict[str, Any]:
    """The second client's labels are no classes."""
    return {"lower": {"inputs": np.ones((3, 2), np.float32), "labels": np.arange(3) + client}}


def load_mislabelled(folder: pathlib.Path) -> None:
    """What each process says of labels that one of them has."""
    problem = fb.Classification(fb.Linear(3), inputs=(2,), classes=3)
    try:
        fb.solve(problem, fb.Mesh.clients(2, mislabelled), fb.FedAvg(0.1, level="lower"), 1, engine="mesh")
    except (ValueError, RuntimeError) as error:
        (folder / f"error-{jax.process_index()}").write_text(f"{type(error).__name__}: {error}")


def images(folder: pathlib.Path, engine: str) -> Plan:
    """Four clients that share all of a data set's images."""
    text = changed(IMAGES, ("[data.long_tail]\nmost = 20\nfactor = 0.5\n", ""))
    return plan(folder, text, engine=engine)


def held(make: Callable[[], Any]) -> tuple[Any, int]:
    """What a function makes, and how many bytes are in use more than before: numpy's and JAX's."""
    before = {id(array) for array in jax.live_arrays()}
    tracemalloc.start()
    made = make()
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return made, used + sum(array.nbytes for array in jax.live_arrays() if id(array) not in before)


def run_file(folder: pathlib.Path) -> None:
    """An experiment file: what each process holds of its data, and what comes out."""
    own = folder / f"process-{jax.process_index()}"
    own.mkdir()
    described = images(own, "mesh")
    built, size = held(lambda: build(described))
    clients = np.asarray(built.clients.lower.size).tolist()
    rows = [len(getattr(built.clients, level).flat["labels"]) for level in ("lower", "upper")]
    (own / "facts.json").write_text(json.dumps({"bytes": size, "rows": rows, "clients": clients}))
    list(run_all([(described, folder / "images")]))


def main(folder: str, *names: str) -> None:
    fb.Mesh.join()
    for text in names:
        name, precision, dropout = text.split(":")
        with jax.enable_x64(precision == "float64"):
            result = run(name, fb.Mesh(dropout=float(dropout)))
        if jax.process_index() == 0:
            result.save(pathlib.Path(folder) / f"{text}.npz")
    if jax.process_count() > 1:
        load_own(pathlib.Path(folder))
        load_mislabelled(pathlib.Path(folder))
        run_file(pathlib.Path(folder))
    else:
        facts = {
            "everyone": exchanges(fb.FedAvg(0.1, steps=2)),
            "cohort": exchanges(fb.FedAvg(0.1, steps=2, cohort=3)),
            "push": exchanges(fb.SGP(fb.links.Ring(), 0.1, "before").among(5), "lower"),
            "shares": shares(),
        }
        (pathlib.Path(folder) / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
