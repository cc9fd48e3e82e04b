"""`push` without the server: clients send each other their values, and the server hears who missed what.

Messages are acknowledged by the receivers' reports: what one did not get in time, or refused since it cannot
be right, the server fetches from the sender and passes on, in a second exchange. So a lost or damaged message
loses no mass while both ends can be reached. What is wrong at the sender is lost, and the report says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedbilevel.engine.base import TooFewClientsError
from fedbilevel.engine.handle import Ref, spec_of
from fedbilevel.engine.reply import Reply
from fedbilevel.engine.wire import WireError
from fedbilevel.fed.place import At
from fedbilevel.tree import all_finite

if TYPE_CHECKING:
    from fedbilevel.engine.remote_cohort import RemoteCohort

Pair = tuple[int, int]
"""Places of a receiver and a sender in the cohort."""


def push_directly(cohort: RemoteCohort, value: At, weights: Any) -> tuple[Ref, npt.NDArray[Any]]:
    """`out_i = Σ_j W_ij in_j`, where clients send each other; the result and who sent. One round trip."""
    senders, away = _senders(cohort, value)
    # Nobody waits for one that is behind; what it would give away stays with it.
    table = np.where(np.diag(away), 1.0, np.asarray(weights) * senders)
    ref = cohort.fed.numbers.new(value.value.spec, "what its peers sent")
    _ask(cohort, value, table, ref)
    missing, answered = _missed(cohort, senders, table)
    if len(answered) < cohort.fed.min_clients:
        raise TooFewClientsError(
            f"{len(answered)} of {cohort.size} clients took part in an exchange among peers, and min_clients "
            f"is {cohort.fed.min_clients}. Last reports: {'; '.join(cohort.fed.failures[-3:]) or 'none'}"
        )
    _relay(cohort, value, table, ref, missing)
    return ref, senders & np.array([place in answered for place in range(cohort.size)])


def _senders(cohort: RemoteCohort, value: At) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Who has a value and can be reached, now or (the second) later."""
    had = np.ones(cohort.size, bool) if value.present is None else np.asarray(value.present)
    alive, behind = cohort.fed.channel.alive, cohort.fed.channel.behind
    there = had & np.array([int(i) in alive for i in cohort.ids])
    late = np.array([int(i) in behind for i in cohort.ids])
    return there & ~late, there & late


def _ask(cohort: RemoteCohort, value: At, table: npt.NDArray[Any], ref: Ref) -> None:
    """Queue what every client sends, and what it waits for."""
    names = [cohort.fed.channel.peer(int(i)) for i in cohort.ids]
    number, seconds = next(cohort.fed.rounds), cohort.fed.channel.patience / 2
    for place, queue in cohort._queues():
        to = [names[k] for k in np.flatnonzero(table[:, place]) if k != place]
        heard = [[names[k], float(table[place, k])] for k in np.flatnonzero(table[place]) if k != place]
        queue.add("push", number, value.value.address, to)
        own = float(table[place, place])
        like = queue.like(value.value.spec)
        queue.add("receive", ref.number, number, value.value.address, own, heard, seconds, like)


def _missed(
    cohort: RemoteCohort, senders: npt.NDArray[Any], table: npt.NDArray[Any]
) -> tuple[dict[Pair, str], set[int]]:
    """Which letters were not used and why, as the receivers say; and which clients took part."""
    fed, places = cohort.fed, {int(i): place for place, i in enumerate(cohort.ids)}
    names = {fed.channel.peer(client): place for client, place in places.items()}
    missing: dict[Pair, str] = {}
    took_part = set()
    replies = fed.flush([i for i in places if i in fed.channel.alive], 0, "what its peers sent")
    for client, reply in replies.items():
        place = places[client]
        absent, broken = _said(reply)
        if broken and senders[place]:
            fed.report(client, broken, "what its peers sent")
        elif not broken:
            took_part.add(place)
        heard = {name: names[name] for name in absent if name in names}
        # A client that names one it does not hear is not given what that one sent to others.
        missing |= {(place, j): absent[name] for name, j in heard.items() if table[place, j] and j != place}
    return missing, took_part


def _said(reply: Reply) -> tuple[dict[str, str], str]:
    """Whose letters a client did not use and why ("": it got none), and why it had none itself."""
    try:
        absent, refused, broken = reply.missed()
    except WireError as error:
        return {}, str(error)
    return dict.fromkeys(absent, "") | refused, broken


def _relay(
    cohort: RemoteCohort, value: At, table: npt.NDArray[Any], ref: Ref, missing: dict[Pair, str]
) -> None:
    """Fetch what was lost or refused from the senders, and queue it for the receivers."""
    if not missing:
        return
    fed = cohort.fed
    found = fed.values([int(cohort.ids[sender]) for sender in sorted({j for _, j in missing})], value.value)
    # Of these alone: that nobody else's is finite is not known here.
    values = {client: value for client, value in found.items() if bool(all_finite(value))}
    for (receiver, sender), reason in missing.items():
        client, source = int(cohort.ids[receiver]), int(cohort.ids[sender])
        passed = source in values and client in fed.channel.alive
        _report(cohort, client, source, reason, passed)
        if passed:
            late = fed.numbers.new(spec_of(values[source]))
            fed.queues[client].put(late, values[source])
            fed.queues[client].add("add", ref.number, late.address, float(table[receiver, sender]))


def _report(cohort: RemoteCohort, client: int, source: int, reason: str, passed: bool) -> None:
    """Say whose message did not serve whom, and what became of it."""
    label, report = cohort.fed.channel.label, cohort.fed.report
    end = "the server passes it on" if passed else "its share is lost"
    if reason:
        report(source, f"{label(client)} refused its message, and {end}: {reason}")
    else:
        report(client, f"a message of {label(source)} got lost, and {end}")
