"""The message that sets a client up, and the surroundings that its process needs."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.data.clients import Clients
from fedbilevel.engine.base import Stepper
from fedbilevel.engine.own_data import OwnData, SiteClients
from fedbilevel.engine.wire import encode
from fedbilevel.portable import PortableError, name_of, pack
from fedbilevel.problem.base import Problem

_INSIDE = "FEDBILEVEL_CLIENT_PROCESS"
"""Set in the environment of clients' processes."""


def configuration(
    problem: Problem,
    clients: Clients,
    stepper: Stepper,
    probes: Sequence[Stepper],
    factory: Callable[[], Problem] | None = None,
) -> Callable[[int], bytes]:
    """The message that sets client `id` up; made here first, so that a mistake shows before any start.

    Args:
        problem, clients, stepper, probes: as for `Engine.connect`.
        factory: an importable function that makes the problem, in the place of the problem's own functions.
    """
    if factory is not None:
        name_of(factory)
    common = agreed_parts(factory or problem, stepper, probes) | {"n": clients.n}
    if "'__main__:" in str(pack(common)[0]) and not main_script():
        raise PortableError(
            "a function or class of a notebook or prompt cannot be found by a client's process: "
            "put it into a module and import it from there"
        )
    return lambda id: _message(common | {"clients": _data_of(clients, id), "id": id})


def agreed_parts(
    problem: Problem | Callable[[], Problem], stepper: Stepper, probes: Sequence[Stepper]
) -> dict[str, Any]:
    """The part of a configuration that a client may insist on: what is solved, and how."""
    return {
        "problem": _without_metrics(problem) if isinstance(problem, Problem) else problem,
        "algorithm": stepper.unmade().at(0),  # schedules stay with the server, which sends their values
        "probes": list(probes),
        "x64": jnp.result_type(float) == jnp.float64,
    }


def refuse_inside_client() -> None:
    """Raise an error that explains if this is a client's process: it must not start clients of its own."""
    if _INSIDE in os.environ:
        raise RuntimeError(
            "this is a client's process, which must not start clients of its own. It runs your script to "
            "find the functions that the script defines: put what should run once, such as the call of "
            "`solve`, under `if __name__ == '__main__':`."
        )


def client_environment(cache: str) -> dict[str, str]:
    """Clients find the modules that the server finds, and share the machine's cores and compiled programs.

    Args:
        cache: a folder for what they compile, unless JAX has one already.
    """
    usual = {
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    settings: Any = jax.config
    own = {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "JAX_COMPILATION_CACHE_DIR": settings.jax_compilation_cache_dir or cache,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        _INSIDE: "1",
    }
    return usual | dict(os.environ) | own


def main_script() -> list[str]:
    """Where a client finds what the program itself defines, named `__main__:...`; nothing for a prompt."""
    main = sys.modules.get("__main__")
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return ["-m", spec.name]
    return [path] if path else []


def _data_of(clients: Clients, id: int) -> Clients | OwnData:
    return clients.own if isinstance(clients, SiteClients) else clients.only(id)


def _message(content: dict[str, Any]) -> bytes:
    structure, arrays = pack(content)
    return encode({"configure": structure}, arrays)


def _without_metrics(problem: Problem) -> Problem:
    """Metrics are the server's business, and may be lambdas."""
    return dataclasses.replace(problem, metrics={})
