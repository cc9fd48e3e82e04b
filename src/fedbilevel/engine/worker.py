"""The client's end of a wire: holds its own data, runs the agreed programs, answers."""

from __future__ import annotations

import functools
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.data.clients import Clients
from fedbilevel.data.error import DataError
from fedbilevel.engine.agreement import Agreement
from fedbilevel.engine.handle import spec_of_rows
from fedbilevel.engine.local_run import LocalRun, rounded
from fedbilevel.engine.mailbox import Mailbox, Post
from fedbilevel.engine.own_data import Levels, OwnData, assembled, own_levels, report
from fedbilevel.engine.programs import names, programs_of
from fedbilevel.engine.reply import accepted, letter_value
from fedbilevel.engine.store import Broken, Store, mixed
from fedbilevel.engine.wire import WireError, decode, encode
from fedbilevel.fed.ledger import Entry
from fedbilevel.fed.program import Program
from fedbilevel.portable import Array, Json, imported, loaded, unpack
from fedbilevel.problem.base import ProblemError
from fedbilevel.tree import PyTree

_MYSELF = ""
"""The name of a client among its peers' letters: no peer has it."""

_STORED, _DONE = ("keep", "free", "add"), ("put", "make", "run", "push")
"""The commands that are answered by nothing: those to the store, and those to the client."""


class Worker:
    """One client: `answer(message) -> message`. The transport is somebody else's business.

    Args:
        script: how the user's program was started, if names of `__main__` may be asked for.
        data: where this client's own samples are (see `own_levels`); default: the server brings them.
        site: its name, for a function that makes data for several.

    Attributes:
        mailbox: what peers send.
        post: the way to peers, if the transport has one.
        agreement: what this client agreed to run; default: whatever the server, whom it trusts, names.
    """

    def __init__(
        self,
        script: Sequence[str] = (),
        data: str | None = None,
        site: str = "",
        agreement: Agreement | None = None,
    ) -> None:
        self.script, self.agreement = script, agreement
        self.mailbox = Mailbox()
        self.post: Post = _no_peers
        self._levels = functools.cache(partial(_own_levels, data, site))
        self.store = Store()
        self.spent: dict[Entry, int] = {}

    def answer(self, message: bytes) -> bytes:
        """Do what a message says and say what came of it."""
        body, arrays = decode(message)
        reply: list[Array] = []
        if "configure" in body:
            content = self._or_error(lambda: self._agree(body["configure"], arrays))
        elif "survey" in body:
            content = self._or_error(lambda: self._describe(reply))
        else:
            self.spent = {}
            answers = [self._obey(command, arrays, reply) for command in body["commands"]]
            counts = [[*entry, times] for entry, times in self.spent.items()]
            content = {"answers": [a for a in answers if a is not None], "spent": counts}
        return encode(content, reply)

    # ------------------------------------------------------------- agreement

    def _or_error(self, work: Callable[[], Json]) -> Json:
        try:
            return work()
        except Exception as error:  # told to the server, which knows what to advise
            return {"error": _short(error)}

    def _describe(self, reply: list[Array]) -> Json:
        body, arrays = report(self._levels())
        reply.extend(arrays)
        return {"levels": body}

    def _agree(self, configuration: Json, arrays: list[Array]) -> Json:
        if self.agreement is not None:
            self.agreement.check(configuration, arrays)
        return self._configure(**unpack(configuration, arrays, self._named))

    def _named(self, name: str) -> Any:
        """What a name stands for; names of the user's script need that script, run under another name."""
        if name.startswith("__main__:") and self.script:
            script, self.script = self.script, []
            run = runpy.run_module if script[0] == "-m" else runpy.run_path
            module = types.ModuleType("__main__")
            module.__dict__.update(run(script[-1], run_name="__fedbilevel_client__"))
            sys.modules["__main__"] = module
        return imported(name)

    def _configure(
        self, problem: Any, clients: Any, id: int, n: int, algorithm: Any, probes: Any, x64: bool
    ) -> Json:
        jax.config.update("jax_enable_x64", x64)
        self.store = Store()
        self.mailbox.reset()
        self.problem = problem() if isinstance(problem, types.FunctionType) else problem
        if isinstance(clients, OwnData):
            clients = assembled(self._levels(), clients)
            _check_labels(self.problem, clients)
        self.problem, self.clients = (jax.tree.map(_on_device, t) for t in (self.problem, rounded(clients)))
        self.id, self.algorithm = id, algorithm
        self.runs: dict[Any, LocalRun] = {}
        self.programs = programs_of(self.problem, self.clients, n, algorithm, probes, self._shapes)
        return {"programs": names(self.programs)}

    def _shapes(self, program: Program, values: list[PyTree]) -> PyTree:
        settings, structure = jax.tree.flatten(program)
        if structure not in self.runs:
            self.runs[structure] = LocalRun(self.problem, program)
        return self.runs[structure].shapes(self.clients, self.id, settings, values)

    # -------------------------------------------------------------- commands

    def _obey(self, command: Json, arrays: list[Array], reply: list[Array]) -> Json | None:
        verb, *rest = command
        if verb == "get":
            return self.store.told(rest[0], reply)
        if verb == "receive":
            return self._receive(arrays, *rest)
        if verb in _STORED:
            getattr(self.store, verb)(*rest)
        elif verb in _DONE:
            getattr(self, f"_{verb}")(*rest, arrays=arrays)
        else:
            raise WireError(f"{verb!r} is no command")
        return None

    def _put(self, ref: int, structure: Json, arrays: list[Array]) -> None:
        self.store.values[ref] = jax.tree.map(jnp.asarray, self._unpacked(structure, arrays))

    def _make(self, ref: int, arrays: list[Array]) -> None:
        """What the algorithm makes from a seed that all agreed on."""
        self.store.values[ref] = jax.tree.map(jnp.asarray, self.algorithm.on(self.problem).made())

    def _unpacked(self, structure: Json, arrays: list[Array]) -> PyTree:
        # With an agreement only what it needed is imported; a value brings no module of its own.
        return unpack(structure, arrays, self._named if self.agreement is None else loaded)

    def _run(
        self,
        ref: int,
        index: int,
        leaves: list[Json],
        key: int,
        values: list[Json],
        whole: bool,
        arrays: list[Array],
    ) -> None:
        found = [self.store.find(value) for value in values]
        broken = next((value for value in found if isinstance(value, Broken)), None)
        if broken is not None:
            self.store.values[ref] = broken
            return
        try:
            settings = [arrays[leaf["array"]] if isinstance(leaf, dict) else leaf for leaf in leaves]
            data = self.clients.whole() if whole else self.clients
            run = self.runs[jax.tree.structure(self.programs[index])]
            out, counts = run(data, self.id, settings, jnp.asarray(arrays[key]), *found)
            self.store.values[ref] = jax.block_until_ready(out)
        except Exception as error:  # whatever the user's function raises is reported, not fatal
            name = type(self.programs[index]).__name__
            self.store.values[ref] = Broken(f"{name} raised {_short(error)}")
            return
        for entry, times in counts.items():
            self.spent[entry] = self.spent.get(entry, 0) + int(times)

    def _push(self, round: int, value: Json, peers: list[str], arrays: list[Array]) -> None:
        # An empty letter says that there is nothing, so that nobody waits for more.
        letter = b"" if isinstance(self.store.find(value), Broken) else self._letter(value)
        self.mailbox.send(self.post, round, peers, letter)

    def _letter(self, value: Json) -> bytes:
        """A value for peers, told as it would be told to the server."""
        arrays: list[Array] = []
        return encode(self.store.told(value, arrays), arrays)

    def _receive(
        self,
        arrays: list[Array],
        ref: int,
        round: int,
        own: Json,
        own_weight: float,
        senders: list[Json],
        seconds: float,
        like: Json,
    ) -> Json:
        """`Σ_j W_ij in_j` of what came in time and can be right; says who is missing or refused, and why.

        What it has itself is checked like the others': a NaN of its own must not spoil what it hears.
        """
        weights, spec = dict(senders), spec_of_rows(self._unpacked(like, arrays))
        letters = self.mailbox.take(round, weights, seconds)
        read = {name: partial(letter_value, letter, spec) for name, letter in letters.items() if letter}
        values, refused = accepted(read | {_MYSELF: partial(self._own, own)})
        shares = weights | {_MYSELF: own_weight}
        self.store.values[ref] = mixed([(shares[name], value) for name, value in values.items()])
        broken = {"broken": refused.pop(_MYSELF)} if _MYSELF in refused else {}
        missing = [sender for sender in weights if sender not in letters]
        return {"missing": missing, "refused": refused} | broken

    def _own(self, value: Json) -> PyTree:
        found = self.store.find(value)
        if isinstance(found, Broken):
            raise WireError(found.reason)
        return found


def _no_peers(*_: Any) -> bool:
    raise RuntimeError("this client has no way to its peers")


def _check_labels(problem: Any, own: Clients) -> None:
    """Of a site's own samples, which nobody else has seen; of a wrong label the server hears no value."""
    try:
        problem.check_labels(own)
    except ProblemError:
        known = f"{problem.classes} classes are 0..{problem.classes - 1}"
        raise ProblemError(f"the site has labels that are no class numbers: {known}") from None


def _own_levels(source: str | None, site: str) -> Levels:
    if source is None:
        raise DataError("this site has not said where its data are: `fedbilevel site KIT --data ...` does")
    return own_levels(source, site)


def _short(error: Exception) -> str:
    """Type and text of an error; of a long one the end, where the cause is."""
    text = str(error).strip()
    return f"{type(error).__name__}: " + (text if len(text) <= 400 else f"... {text[-400:]}")


def _on_device(leaf: Any) -> Any:
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf
