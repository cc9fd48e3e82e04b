"""Room for compiled programs: what a process may hold of them, and forgetting them in time."""

from __future__ import annotations

import gc
import pathlib

import jax

MAPS = pathlib.Path("/proc/self/maps")
LIMIT = pathlib.Path("/proc/sys/vm/max_map_count")


def make_room(share: float = 0.5) -> None:
    """Forget all compiled programs if they fill more than a share of what a process may hold.

    Linux gives a process so many pieces of memory (65,530 unless told otherwise), of which every program that
    JAX compiles takes hundreds. An experiment with a hundred variants needs more; the next program would then
    end the process, with a segmentation fault. A program that is needed again is compiled again, or read
    from JAX's cache of compiled programs. Other systems have no such limit.
    """
    if not (MAPS.exists() and LIMIT.exists()):
        return
    with MAPS.open("rb") as pieces:
        used = sum(1 for _ in pieces)
    if used > share * int(LIMIT.read_text()):
        jax.clear_caches()
        gc.collect()
