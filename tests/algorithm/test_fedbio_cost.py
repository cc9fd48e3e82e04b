"""What FedBiO, its relatives and its baselines cost: the ledger against the closed form of each docstring."""

import dataclasses

import pytest

import fedbilevel as fb
from algorithm.quadratics import CLIENTS, DX, DY, SAMPLES, Running, clients_of, drawn

pytestmark = pytest.mark.usefixtures("float64")

SCALAR, POSITION = 8, 4  # bytes
SMALL = (1e-3, 1e-3, 1e-3)
ALL = DX + 2 * DY
SYNC, TERMS, UNEQUAL = 3, 3, (1, 4, 2, 6)


@dataclasses.dataclass
class Cost:
    """Of one client: exchanges, bytes each way, oracle calls, and how many batches they read."""

    exchanges: int
    down: int
    up: int
    calls: dict[str, int]
    batches: int


def same_both_ways(exchanges, scalars, calls, batches):
    return Cost(exchanges, SCALAR * scalars, SCALAR * scalars, calls, batches)


def global_calls(steps):
    """Every oracle once a step, each on a batch of its own."""
    return dict.fromkeys(("f_x", "f_y", "g_y", "g_xy", "g_yy"), steps), 5 * steps


def local_calls(steps, products):
    """Q products a step, not Q²/2; f_x and f_y read one batch together."""
    calls = dict.fromkeys(("f_x", "f_y", "g_y", "g_xy"), steps) | {"g_yy": products * steps}
    return calls, (3 + products) * steps


def commfedbio(Q, k, lower_steps):
    calls = {"g_y": lower_steps, "g_yy": Q, "f_y": Q, "f_x": 1, "g_xy": 1}
    up = SCALAR * (DX + DY) + Q * k * (SCALAR + POSITION)
    return Cost(Q + 2, SCALAR * (DX + (Q + 3) * DY), up, calls, sum(calls.values()))


def stocbio(Q, D):
    """As LFedNest: T + 1 exchanges with T = 1."""
    calls = {"g_y": D, "f_x": 1, "f_y": 1, "g_xy": 1, "g_yy": Q - 1}
    return Cost(2, SCALAR * (DX + 2 * DY), SCALAR * (DX + DY), calls, D + 2 + Q - 1)


NOTHING = Cost(0, 0, 0, {}, 0)
FIRST = Cost(0, SCALAR * ALL, 0, *global_calls(1))
FIRST_LOCAL = Cost(0, SCALAR * DX, 0, *local_calls(1, TERMS))
CASES = {
    "FedBiO": (fb.FedBiO(*SMALL, sync_every=5), NOTHING, same_both_ways(1, ALL, *global_calls(5))),
    "FedBiOLocal": (
        fb.FedBiOLocal(*SMALL, sync_every=SYNC, terms=TERMS),
        NOTHING,
        same_both_ways(1, DX, *local_calls(SYNC, TERMS)),
    ),
    "FedBiOAcc": (
        fb.FedBiOAcc(*SMALL, sync_every=SYNC, terms=TERMS),
        FIRST,
        same_both_ways(2, 2 * ALL, *global_calls(2 * SYNC)),
    ),
    "MRBO": (
        fb.MRBO(*SMALL, terms=TERMS),
        FIRST_LOCAL,
        same_both_ways(2, 2 * DX, *local_calls(2, TERMS)),
    ),
    "CommFedBiO": (fb.CommFedBiO(*SMALL, topk=2, terms=3, lower_steps=2), NOTHING, commfedbio(3, 2, 2)),
    "StocBiO": (
        fb.StocBiO(*SMALL[:2], lower_steps=4, terms=5, smoothness=9.0),
        NOTHING,
        stocbio(5, 4),
    ),
}


def in_all(cost, clients=CLIENTS):
    """What a ledger shows: totals over clients."""
    calls = {kind: times * clients for kind, times in cost.calls.items() if times}
    return cost.exchanges, cost.down * clients, cost.up * clients, calls, cost.batches * SAMPLES * clients


def totals(ledger):
    calls = {kind: times for kind, times in ledger.calls.items() if times}
    assert not ledger.edge
    return ledger.rounds, sum(ledger.down.values()), sum(ledger.up.values()), calls, ledger.samples


@pytest.mark.parametrize("case", CASES)
def test_start_and_steps_cost_what_the_docstring_says(case):
    algorithm, start, step = CASES[case]
    running = Running(clients_of(drawn()), algorithm).advance(2)
    assert totals(running.start) == in_all(start)
    assert [totals(ledger) for ledger in running.ledgers] == [in_all(step)] * 2


@pytest.mark.parametrize(
    ("method", "size", "calls"),
    [
        (fb.FedBiOAcc, ALL, global_calls),
        (fb.FedBiOAccLocal, DX, lambda steps: local_calls(steps, TERMS)),
    ],
)
def test_sampled_cohorts_download_once_more_and_start_with_everybody(method, size, calls):
    """Variables, averaged variables and momenta come down; at the start everyone sends its momenta."""
    algorithm = method(*SMALL, sync_every=SYNC, terms=TERMS, cohort=2)
    running = Running(clients_of(drawn()), algorithm).advance(2)
    assert totals(running.start) == in_all(same_both_ways(1, size, *calls(1)))
    step = Cost(2, 3 * SCALAR * size, 2 * SCALAR * size, *calls(2 * SYNC))
    assert [totals(ledger) for ledger in running.ledgers] == [in_all(step, clients=2)] * 2


def test_unequal_numbers_of_steps_are_billed_one_by_one():
    ledger = Running(clients_of(drawn()), fb.FedBiO(*SMALL, sync_every=UNEQUAL)).advance().ledgers[0]
    assert ledger.calls == dict.fromkeys(("f_x", "f_y", "g_y", "g_xy", "g_yy"), sum(UNEQUAL))
    assert ledger.samples == 5 * SAMPLES * sum(UNEQUAL)
    assert ledger.rounds == 1
    assert ledger.bytes == 2 * CLIENTS * SCALAR * ALL


def test_who_does_not_answer_sends_and_is_billed_nothing():
    """Of FedBiO under dropout: a message down to all, one up and I calls from those who answered."""
    algorithm = fb.FedBiO(*SMALL, sync_every=UNEQUAL)
    running, answering = Running(clients_of(drawn()), algorithm, dropout=0.5), set()
    for _ in range(8):
        ledger = running.advance().ledgers[-1]
        count, rest = divmod(sum(ledger.up.values()), SCALAR * ALL)
        assert rest == 0
        assert sum(ledger.down.values()) == CLIENTS * SCALAR * ALL
        smallest, largest = sum(sorted(UNEQUAL)[:count]), sum(sorted(UNEQUAL)[CLIENTS - count :])
        assert smallest <= ledger.calls["g_y"] <= largest
        answering.add(count)
    assert len(answering) > 1
