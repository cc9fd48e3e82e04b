"""Engines by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from fedbilevel.engine.base import Engine
from fedbilevel.engine.mesh.engine import Mesh
from fedbilevel.engine.nvflare.engine import NVFlare
from fedbilevel.engine.process import Process
from fedbilevel.engine.simulator import Simulator
from fedbilevel.name import nearest

ENGINES: Mapping[str, Callable[[], Engine]] = {
    "simulator": Simulator,
    "process": Process,
    "mesh": Mesh,
    "nvflare": NVFlare,
}


def engine_of(engine: str) -> Engine:
    """A new engine, by name."""
    if engine not in ENGINES:
        listed = ", ".join(ENGINES)
        raise ValueError(f"there is no engine {engine!r}; the engines are {listed}{nearest(engine, ENGINES)}")
    return ENGINES[engine]()


@contextlib.contextmanager
def opened(engine: str | Engine) -> Iterator[Engine]:
    """An engine by name, which lives as long as the `with` block; or an engine object, its owner's."""
    if isinstance(engine, Engine):
        yield engine
    else:
        with engine_of(engine) as own:
            yield own
