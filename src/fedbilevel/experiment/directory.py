"""A run's folder: settings, manifest, the history as it grows, and checkpoints.

    config.toml        the settings, complete; can be run itself
    manifest.json      versions, seed, hash of the settings, status
    history.jsonl      one row an evaluation
    clients.jsonl      the clients' own values, where the problem has client metrics
    checkpoint-<step>-<hash>.npz
    result.npz         the end
    .lock              held while the run goes on (see `claim`)

A checkpoint's name holds the hash of its content, so a damaged one is recognised; it appears under its
name only when it is complete. Whenever a run is killed, going on from the newest sound checkpoint gives
the same bits as a run that was not.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import pathlib
import platform
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from fedbilevel.experiment.config import Plan
from fedbilevel.experiment.jsonl import line
from fedbilevel.experiment.loop import Evaluation
from fedbilevel.experiment.record import History, Result, load, written
from fedbilevel.experiment.recorded import FORMAT, RunError
from fedbilevel.portable import PortableError

log = logging.getLogger("fedbilevel")

_CHECKPOINT = re.compile(r"checkpoint-(\d+)-([0-9a-f]{16})\.npz")
_DRAFT = re.compile(
    r"\.\.?(checkpoint\.npz|result\.npz|config\.toml|(manifest|history|clients)\.jsonl?)(\.\d+)?"
)
NOT_APPLICABLE = "n/a"
"""The status of a run that there cannot be: its manifest has the `reason`, its history no rows."""

_PACKAGES = ("fedbilevel", "jax", "jaxlib", "numpy", "equinox", "optax")


class Directory:
    """One run's folder.

    Args:
        path: the folder; made if it is not there.
        keep: how many checkpoints are kept, beside that of the best row.
        every: evaluations between two checkpoints.
    """

    def __init__(self, path: pathlib.Path, keep: int = 2, every: int = 1) -> None:
        if keep < 1 or every < 1:
            raise RunError(f"checkpoint.keep is {keep}, checkpoint.every {every}; they must be at least 1")
        self.path, self.keep, self.every = path, keep, every
        self._since, self._rows = 0.0, 0

    # ------------------------------------------------------------- beginning

    def is_done(self, plan: Plan) -> bool:
        """Whether this very run has ended here; one that has ended by itself goes on for more steps."""
        facts = self.manifest()
        if facts.get("config_hash") != plan.hash or not (self.path / "result.npz").exists():
            return False
        ended = facts["status"] in ("stopped", "diverged")
        enough = facts["status"] == "done" and facts["steps"] >= plan.config["steps"]
        return (ended or enough) and self._is_sound(self.path / "result.npz")

    def _is_sound(self, file: pathlib.Path) -> bool:
        try:
            load(file)
        except PortableError as error:
            log.warning("%s is damaged and made again (%s)", file, error)
            return False
        return True

    def begin(self, plan: Plan, *, again: bool = False) -> Result | None:
        """Make the folder ready, and return what an earlier run of the same plan has reached there."""
        earlier = self.manifest()
        # A run that broke off at once is not worth an error.
        fruitless = not any(self._checkpoints()) and not (self.path / "result.npz").exists()
        if earlier and not again and not fruitless and earlier.get("config_hash") != plan.hash:
            raise RunError(
                f"{self.path} holds a run with other settings, or of other code (modules that its settings "
                "name have changed). Choose another folder with --out, or replace it with --again."
            )
        if again or fruitless:
            self._clear()
        start = self.last() if earlier and not again else None
        if start is not None and start.steps > plan.config["steps"]:
            raise RunError(
                f"{self.path} has a run of {start.steps} steps already, more than the {plan.config['steps']} "
                "asked for. Ask for more, choose another folder with --out, or begin anew with --again."
            )
        if start is not None:
            self._warn_of_versions(earlier, plan)
        self.path.mkdir(parents=True, exist_ok=True)
        self._write("config.toml", plan.toml())
        self.note(**_facts(plan), status="running")
        self._write_again(History() if start is None else start.history)
        self._tidy(start)
        return start

    def _warn_of_versions(self, earlier: dict[str, Any], plan: Plan) -> None:
        """Other versions may round differently: say so, since the same bits are promised."""
        before, now = earlier.get("versions", {}), _facts(plan)["versions"]
        other = [
            f"{name} {before[name]} (now {now[name]})"
            for name in now
            if before.get(name, now[name]) != now[name]
        ]
        if other:
            log.warning("%s was begun with %s: its bits may differ from here on", self.path, ", ".join(other))

    def _clear(self) -> None:
        for name in ("history.jsonl", "clients.jsonl", "manifest.json", "result.npz"):
            (self.path / name).unlink(missing_ok=True)
        for file, *_ in self._checkpoints():
            file.unlink()

    def _write_again(self, history: History) -> None:
        """Rows as the checkpoint has them: those behind it come again, and what a kill cut off is complete.

        The seconds of a row are known only to the file; where it has lost them, those before count on.
        """
        spent = {row["step"]: row["seconds"] for row in self._readable("history.jsonl")}
        seconds, rows = 0.0, []
        for row in history:
            seconds = spent.get(row["step"], seconds)
            rows.append(row | {"seconds": seconds})
        self._write("history.jsonl", "".join(map(line, rows)))
        values = [
            _client_row(row["step"], each) for row, each in zip(history, history.per_client, strict=True)
        ]
        if any(history.per_client):
            self._write("clients.jsonl", "".join(map(line, values)))
        else:
            (self.path / "clients.jsonl").unlink(missing_ok=True)
        self._rows, self._since = len(rows), time.monotonic() - seconds

    def _readable(self, name: str) -> Iterator[dict[str, Any]]:
        """The rows of a file up to the first that cannot be read."""
        file = self.path / name
        for text in file.read_text(errors="replace").splitlines() if file.exists() else []:
            try:
                row = json.loads(text)
                yield {"step": row["step"], "seconds": row["seconds"]}
            except (ValueError, KeyError, TypeError):
                return

    def _tidy(self, start: Result | None) -> None:
        """Remove what a killed run left half done."""
        for draft in self.path.glob(".*"):
            if _DRAFT.fullmatch(draft.name):
                draft.unlink()
        if start is not None:
            self._prune(start)

    # --------------------------------------------------------------- running

    def record(self, seen: Evaluation) -> None:
        """Write a new row and a checkpoint."""
        seconds = round(time.monotonic() - self._since, 3)
        self._append("history.jsonl", seen.row | {"seconds": seconds})
        if seen.clients:
            self._append("clients.jsonl", _client_row(seen.row["step"], seen.clients))
        self._rows += 1
        if (self._rows - 1) % self.every == 0:
            self._save(seen.result())

    def finish(self, result: Result, status: str) -> None:
        """Write the result and say how the run ended."""
        result.save(self.path / "result.npz")
        self.note(status=status, steps=result.steps, notes=list(result.notes), failures=list(result.failures))

    def result(self) -> Result:
        """What `finish` wrote."""
        return load(self.path / "result.npz")

    def note(self, **facts: Any) -> None:
        """Add facts to the manifest."""
        self._write("manifest.json", json.dumps(self.manifest() | facts, indent=2) + "\n")

    def manifest(self) -> dict[str, Any]:
        """What the manifest says; empty if there is none."""
        file = self.path / "manifest.json"
        if not file.exists():
            return {}
        try:
            facts = json.loads(file.read_text())
        except ValueError as error:
            raise RunError(f"{file} cannot be read: {error}") from None
        if not isinstance(facts, dict):
            raise RunError(f"{file} holds no JSON object: it is no manifest of a run")
        return facts

    # ----------------------------------------------------------- checkpoints

    def _save(self, result: Result) -> None:
        if result.diverged:
            return  # going on from before it diverges again, and ends like a run that was not killed
        draft = result.save(self.path / ".checkpoint.npz")
        draft.replace(self.path / f"checkpoint-{result.steps:08}-{_hash(draft)}.npz")
        self._prune(result)

    def _prune(self, result: Result) -> None:
        """Delete all checkpoints but the newest and that of the best row."""
        kept = {step for _, step, _ in list(self._checkpoints())[: self.keep]}
        if result.best is not None:
            kept.add(result.best.step)
        for file, step, _ in list(self._checkpoints()):
            if step not in kept:
                file.unlink()

    def _checkpoints(self) -> Iterator[tuple[pathlib.Path, int, str]]:
        """File, step and hash of every checkpoint, the newest first."""
        files = self.path.glob("checkpoint-*.npz") if self.path.exists() else []
        matches = [(file, _CHECKPOINT.fullmatch(file.name)) for file in files]
        found = [(file, int(match[1]), match[2]) for file, match in matches if match]
        return iter(sorted(found, key=lambda item: item[1], reverse=True))

    def last(self) -> Result | None:
        """The newest checkpoint that is sound; what is said of damaged ones is one line each."""
        for file, _, digest in self._checkpoints():
            try:
                if _hash(file) != digest:
                    raise PortableError("its content does not match its name")
                return load(file)
            except (OSError, PortableError) as error:
                log.warning("%s is damaged and not used (%s); going on from the one before", file, error)
        end = self.path / "result.npz"
        result = load(end) if end.exists() and self._is_sound(end) else None
        return None if result is None or result.diverged else result

    # ----------------------------------------------------------------- files

    def _write(self, name: str, text: str) -> None:
        with written(self.path / name) as file:
            file.write(text.encode())

    def _append(self, name: str, row: dict[str, Any]) -> None:
        with open(self.path / name, "a") as file:
            file.write(line(row))


def _client_row(step: float, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"step": step} | {name: np.asarray(column).tolist() for name, column in values.items()}


def _hash(file: pathlib.Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]


def _facts(plan: Plan) -> dict[str, Any]:
    """What a manifest says of a run before it starts."""
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {
        "format": FORMAT,
        "name": plan.config["name"],
        "variant": plan.variant or plan.config["name"],
        "seed": plan.seed,
        "config_hash": plan.hash,
        "precision": plan.config["precision"],
        "prng": str(jax.random.key_impl(jax.random.key(0))),
        "versions": {"python": platform.python_version()} | versions,
        "platform": f"{platform.system()} {platform.machine()}, JAX on {jax.default_backend()}",
    }
