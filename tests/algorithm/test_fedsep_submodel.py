"""FedSep whose clients train the kernels that they need most: what is held, kept, and billed."""

import dataclasses
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithm.baseline.fedavg import FedAvg
from fedbilevel.algorithm.fedsep import DecodeLearnEncode, FedSep
from fedbilevel.local import Submodel
from fedbilevel.local.learn import Learn
from fedbilevel.problem.oracle import Client
from fedbilevel.problem.submodel import kernels_in
from problem.narrow import CLASSES, HIDDEN, INPUTS, Features, Sigmoids, TwoLayers, clients, problem

RATIOS = (1.0, 0.5, 0.25)
CLIENTS = len(RATIOS)
ROUNDS = 4
LEARN_STEPS, MASK_STEPS = 2, 3


def method(ratios, learn_steps=LEARN_STEPS, cohort=None, **options):
    decoder = Submodel(ratios, **{"mask_steps": MASK_STEPS, "mask_lr": 0.1} | options)
    return FedSep(decoder, fb.SGD(0.5), learn_steps=learn_steps, cohort=cohort)


def solved(algorithm, steps, **options):
    return fb.solve(problem(), clients(), algorithm, steps, **{"every": steps} | options)


@pytest.fixture(scope="module")
def rounds():
    """What there is before the first round, and after each of some: one program."""
    with jax.enable_x64(True):
        seen = []
        solved(method(RATIOS), ROUNDS, every=1, callback=lambda now: seen.append(now.result()))
        return seen


def row(stacked, id):
    """What one client has."""
    return jax.tree.map(lambda leaf: leaf[id], stacked)


@eqx.filter_jit
def held(decoder, data):
    """Which hidden units each client holds in its first round, `(clients, units)`."""
    x, memory = problem().y0, decoder.first_memory(problem())

    def own(id):
        me = Client(problem(), data, id, id, jr.key(0))
        return decoder.decoded(me, x, memory, ()).held["bias"]

    return jax.vmap(own)(jnp.arange(CLIENTS))


def assert_same(a, b):
    for own, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.usefixtures("float64")
def test_with_whole_models_it_is_federated_averaging():
    part, whole = solved(method(1.0, 3), 2), solved(FedAvg(0.5, level="lower", steps=3), 2)
    for own, other in zip(jax.tree.leaves(part.x), jax.tree.leaves(whole.y), strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-12)
    assert float(jnp.max(jnp.abs(part.x["first"] - problem().y0["first"]))) > 0.1
    assert (part.ledger.down["x"], part.ledger.up["x"]) == (whole.ledger.down["y"], whole.ledger.up["y"])


@pytest.mark.usefixtures("float64")
def test_the_whole_model_comes_down_and_sub_models_go_up(rounds):
    kernels, spent = kernels_in(problem()), rounds[-1].ledger
    parts = [kernels.cost(ratio)["bytes"] for ratio in RATIOS]
    assert parts == [8 * 48, 8 * 24, 8 * 12]
    assert spent.down == {"x": ROUNDS * CLIENTS * parts[0]}
    masks = 2 * HIDDEN // 8  # a bit for each unit, of the two clients that do not hold all
    assert spent.up == {"x": ROUNDS * (sum(parts) + masks)}
    assert spent.rounds == ROUNDS
    refreshed = 2  # the first round and the third
    assert spent.calls == {"f_y": CLIENTS * (ROUNDS * LEARN_STEPS + refreshed * MASK_STEPS)}
    assert rounds[-1].y == (), "a whole model for each client"


def test_masks_are_learnt_in_every_second_round(rounds):
    for number, (old, new) in enumerate(itertools.pairwise(rounds)):
        both = (jax.tree.leaves(own.state.memory.value["phi"]) for own in (old, new))
        changes = [np.abs(p - q).max() for p, q in zip(*both, strict=True)]
        assert (max(changes) > 0) == (number % 2 == 0)
    assert rounds[-1].state.memory.value["rounds"].tolist() == [ROUNDS] * CLIENTS


@pytest.mark.usefixtures("float64")
def test_a_mean_over_all_or_over_those_who_hold_a_unit(rounds):
    over_all, over_holders = rounds[1], solved(method(RATIOS, average="holders"), 1)
    holders = np.asarray(held(method(RATIOS).decoder, clients())).sum(axis=0)
    assert set(holders) == {1, 2, 3}
    x0 = problem().y0
    for name in x0:
        share = holders / CLIENTS if name != "second" else holders[:, None] / CLIENTS
        np.testing.assert_allclose(over_holders.x[name] - x0[name], (over_all.x[name] - x0[name]) / share)
    assert over_all.ledger == over_holders.ledger


@pytest.mark.usefixtures("float64")
def test_one_client_changes_its_own_kernels_and_its_own_mask():
    algorithm = method(RATIOS, cohort=1)
    fed, seen = fb.Simulator().federation(problem(), clients()), set()
    before, step = algorithm.init(fed, jr.key(9)), jax.jit(lambda s, k: algorithm.step(fed, s, k)[0])
    for seed in range(4):
        after = step(before, jr.key(seed))
        (id,) = np.flatnonzero(np.asarray(after.memory.value["rounds"])).tolist()
        moved = jax.tree.map(lambda p, q: p != q, after.x, before.x)
        own = moved["bias"]
        assert moved["second"].all(axis=1).tolist() == moved["second"].any(axis=1).tolist() == own.tolist()
        assert int(own.sum()) == HIDDEN * RATIOS[id]
        for other in set(range(CLIENTS)) - {id}:
            assert_same(row(before.memory.value, other), row(after.memory.value, other))
        seen.add(id)
    assert len(seen) > 1


def test_masks_follow_the_data_and_the_ratio():
    decoder = Submodel((0.5, 0.5, 0.25), mask_steps=40, penalty=1.0, mask_lr=0.1)
    first = jax.tree.map(lambda leaf: leaf[: len(leaf) // CLIENTS], clients().upper.flat)
    copies = fb.Clients(jax.tree.map(lambda leaf: np.stack([np.asarray(leaf)] * CLIENTS), first))
    own, same = (np.asarray(held(decoder, data)) for data in (clients(), copies))
    assert own.sum(axis=1).tolist() == same.sum(axis=1).tolist() == [HIDDEN // 2, HIDDEN // 2, HIDDEN // 4]
    assert own[0].tolist() != own[1].tolist()
    assert same[0].tolist() == same[1].tolist() == own[0].tolist(), "the same data, another mask"


# ------------------------------------------------------------------ what is held is known, not guessed


def silent():
    """Half of the hidden units have no weights on their inputs."""
    known = problem()
    return known.at((), known.y0 | {"first": known.y0["first"].at[:, : HIDDEN // 2].set(0)})


@pytest.mark.parametrize("make", [silent, lambda: problem(Features())])
def test_every_kernel_of_a_whole_model_moves(make):
    known = make()
    run = fb.solve(known, clients(), method(1.0, learn_steps=1, mask_steps=1), 1, every=1)
    moved = jax.tree.map(lambda a, b: np.asarray(a != b), run.x, known.y0)
    assert all(leaf.all() for leaf in jax.tree.leaves(moved))


@pytest.mark.usefixtures("float64")
def test_what_a_client_does_not_hold_takes_no_part_in_its_learning():
    """The change is that of the small model alone, though a sigmoid of nothing is one half."""
    known = problem(Sigmoids())
    kernels, decoder, steps = kernels_in(known), Submodel(0.5, mask_steps=2), 3
    me, x = Client(known, clients(), 0, 0, jr.key(0)), known.y0

    @jax.jit
    def round():
        memory = decoder.first_memory(known)
        out = DecodeLearnEncode(decoder, Learn(fb.SGD(0.5), steps))(me, x, (), memory)
        return out[0][0], decoder.decoded(me.rekeyed(0), x, memory, ()).held["bias"]

    @jax.jit
    def by_itself(small):
        batch, y = me.batch("upper", jr.key(0)).samples, small
        for _ in range(steps):
            y = jax.tree.map(lambda p, d: p - 0.5 * d, y, jax.grad(known.upper, argnums=1)((), y, batch))
        return jax.tree.map(jnp.subtract, y, small)

    change, keep = round()
    alone = by_itself(kernels.extract(x, [keep]))
    for own, other in zip(
        jax.tree.leaves(kernels.extract(change, [keep])), jax.tree.leaves(alone), strict=True
    ):
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-12)
    assert not np.any(jax.tree.leaves(kernels.extract(change, [1 - keep]))[0])
    assert float(jnp.max(jnp.abs(change["second"]))) > 0.01


def test_wrong_numbers_of_ratios_are_explained():
    with pytest.raises(ValueError, match="ratios has 2 numbers, but there are 3 clients"):
        solved(method((1.0, 0.5)), 1)


@pytest.mark.parametrize("given", ["test", "client"])
@pytest.mark.parametrize("model", [TwoLayers(), fb.SlicedMLP((HIDDEN, CLASSES))])
def test_metrics_of_a_y_that_is_not_there_are_explained(given, model):
    inputs = np.random.default_rng(1).normal(size=(9, INPUTS))
    columns = {"inputs": inputs, "labels": np.arange(9) % CLASSES}
    options = {"test": columns} if given == "test" else {}
    known = fb.Classification(model, inputs=(INPUTS,), classes=CLASSES, **options)
    with pytest.raises(ValueError, match=r"y is \(\): none is kept.*take the problem ServerModel"):
        fb.solve(known, clients(), method(0.5), 0)


def test_metrics_of_one_row_a_client_are_explained():
    columns = {"inputs": np.zeros((9, INPUTS)), "labels": np.arange(9) % CLASSES}
    known = fb.Classification(TwoLayers(), inputs=(INPUTS,), classes=CLASSES, test=columns, client_metrics={})
    warm = FedSep(fb.LinearSketch(4, start="warm"), fb.SGD(0.1))
    with pytest.raises(ValueError, match=r"y has one row a client.*take the problem ServerModel"):
        fb.solve(known, clients(), warm, 0)


LEARNERS = {
    "HeteroFL": lambda: fb.HeteroFL(fb.SGD(0.1), ratios=0.5),
    "CompressedFedAvg": lambda: fb.CompressedFedAvg(fb.SGD(0.1)),
    "FedDF": lambda: fb.FedDF(fb.SGD(0.1), fb.SGD(0.1), np.zeros((2, INPUTS)), ratios=0.5),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_who_learns_y_is_told_that_the_server_model_looks_at_x(name):
    """Else all of its metrics would stay where they began."""
    known = fb.ServerModel(TwoLayers(), inputs=(INPUTS,), classes=CLASSES)
    with pytest.raises(ValueError, match=r"metrics .* are those of a model x.*Use Classification"):
        fb.solve(known, clients(), LEARNERS[name](), 1)


def test_flops_may_be_many():
    """More than a whole number of 32 bits can tell."""
    kernels = dataclasses.replace(kernels_in(problem(), (INPUTS,)), uses=(0, 2**28, 2**28))
    result = solved(method(RATIOS, kernels=kernels), 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.x))


def test_all_methods_report_the_same_cost_at_the_same_width():
    kernels, data = kernels_in(problem(), (INPUTS,)), clients()
    rows = [kernels.cost(ratio) for ratio in RATIOS]
    lines = method(RATIOS).remarks(problem(), data)
    for line, ratio, row in zip(lines, RATIOS, rows, strict=True):
        for part in (f"width {ratio:g}, 1 clients", f"{row['parameters']} parameters", "MFLOPs a sample"):
            assert part in line
        assert f"{row['flops'] / 1e6:.3g} MFLOPs" in line
        assert f"{row['bytes'] / 1e6:.3g} MB" in line
    makers = (fb.HeteroFL, fb.FederatedDropout, fb.FedRolex)
    assert {make(fb.SGD(0.1), ratios=RATIOS).remarks(problem(), data) for make in makers} == {lines}
    taught = fb.FedDF(fb.SGD(0.1), fb.SGD(0.1), np.zeros((2, INPUTS)), ratios=RATIOS)
    assert taught.remarks(problem(), data) == lines
    single = fb.FedDST(fb.SGD(0.1), ratios=RATIOS).remarks(problem(), data)
    assert [line.split(", ")[:3] for line in single] == [line.split(", ")[:3] for line in lines]
    assert not any("FLOPs" in line for line in single), "those depend on which weights are held"


def test_the_server_model_is_what_is_tested():
    """The metrics look at x, whatever y is."""
    inputs = np.random.default_rng(1).normal(size=(9, INPUTS))
    labels = np.arange(9) % CLASSES
    known = fb.ServerModel(
        TwoLayers(), inputs=(INPUTS,), classes=CLASSES, test={"inputs": inputs, "labels": labels}
    )
    y = known.y0
    logits = np.tanh(inputs @ np.asarray(y["first"]) + np.asarray(y["bias"])) @ np.asarray(y["second"])
    right = np.mean(np.argmax(logits, axis=-1) == labels)
    assert 0 < right < 1
    accuracy = known.metrics["test_accuracy"]
    assert float(accuracy(y, ())) == pytest.approx(right)
    opposite = y | {"second": -y["second"]}
    assert float(accuracy(opposite, y)) == pytest.approx(1 - right)
    at_clients = known.client_metrics["accuracy"]
    assert float(at_clients(opposite, (), accuracy.samples)) == pytest.approx(1 - right)
