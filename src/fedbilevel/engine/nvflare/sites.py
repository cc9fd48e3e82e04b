"""The channel of the driver: client i is the i-th site."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from fedbilevel.engine.hurry import REMEMBERED, Hurried
from fedbilevel.engine.nvflare.desk import bytes_array
from fedbilevel.engine.nvflare.job import Job, JobLostError
from fedbilevel.engine.wire import decode, encode
from fedbilevel.portable import Json

_LOOK = 20.0
"""Seconds between two looks whether lost sites are back."""


class Sites(Hurried):
    """The sites of a job as clients of a federation.

    Args:
        job: what reaches them.
        timeout: seconds to wait for an answer.
        names: of the clients, in their order; default: all sites of the job, by name.
        rejoin: whether the job counts as lost when a site that it has lost is there again.

    Attributes:
        down, up: bytes of all messages so far, as they were handed to NVFlare and came from it.
    """

    def __init__(self, job: Job, timeout: float, names: Sequence[str] = (), *, rejoin: bool = False) -> None:
        super().__init__(timeout)
        self.job, self.rejoin = job, rejoin
        self._number, self._timed = 0, dict[int, dict[int, float]]()
        self._looked = time.monotonic()
        self.down = self.up = 0
        self._told = self._ask({"do": "tell"})[0]
        self.names = list(names) or sorted(self._told["sites"], key=_natural)

    @property
    def alive(self) -> set[int]:
        reached = set(self._told["alive"])
        return {client for client, name in enumerate(self.names) if name in reached}

    @property
    def behind(self) -> set[int]:
        late = set(self._told["behind"])
        return {client for client, name in enumerate(self.names) if name in late}

    def exchange(self, messages: dict[int, bytes], limit: int) -> dict[int, bytes | Exception]:
        self._look_for_returned()
        names = [self.names[client] for client in messages]
        body = {"do": "exchange", "sites": names, "timeout": self.timeout, "limit": limit}
        body |= {"deadline": self._deadline(), "number": self._new_number()}
        self._told, arrays = self._ask(body, [bytes_array(message) for message in messages.values()])
        self._note_times()
        replies: dict[str, Any] = {name: OSError(text) for name, text in self._told["errors"].items()}
        replies |= {name: array.tobytes() for name, array in zip(self._told["answers"], arrays, strict=True)}
        self.down += sum(map(len, messages.values()))
        self.up += sum(array.size for array in arrays)
        return {client: replies[self.names[client]] for client in messages}

    def _new_number(self) -> int:
        """The number of an exchange whose times will be noted, also of those who are late."""
        self._number += 1
        self._exchanges.append(self._timed.setdefault(self._number, {}))
        self._timed.pop(self._number - REMEMBERED, None)
        return self._number

    def _note_times(self) -> None:
        for number, name, seconds in self._told["times"]:
            if number in self._timed:
                self._timed[number][self.names.index(name)] = seconds

    def drop(self, client: int) -> None:
        self._told = self._ask({"do": "drop", "site": self.names[client]})[0]

    def returned(self) -> set[str]:
        """Sites that are lost for this job, and that a new one would have."""
        gone = set(self.names) - {self.names[client] for client in self.alive}
        return self.job.returned(gone) if gone else set()

    def _look_for_returned(self) -> None:
        if self.rejoin and time.monotonic() - self._looked > _LOOK:
            self._looked = time.monotonic()
            if back := self.returned():
                raise JobLostError(f"{', '.join(sorted(back))} can take part again, in a new job.")

    def label(self, client: int) -> str:
        return f"client {client} ({self.names[client]})"

    def peer(self, client: int) -> str:
        return self.names[client]

    def renew(self) -> None:
        """Give every site another chance, for a new session."""
        self._told = self._ask({"do": "renew"})[0]

    def _ask(self, body: Json, arrays: Sequence[Any] = ()) -> tuple[Json, list[Any]]:
        return decode(self.job.ask(encode(body, list(arrays))))


def _natural(name: str) -> list[Any]:
    """Orders site-2 before site-10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
