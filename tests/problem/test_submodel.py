"""Which kernels a client holds, what they cost, and FedSep's decoder that learns which."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.fed.ledger import Ledger, metering
from fedbilevel.local.mask_net import MaskNet
from fedbilevel.local.submodel import Submodel
from fedbilevel.problem.base import ProblemError
from fedbilevel.problem.cnn4 import FourLayerCNN
from fedbilevel.problem.oracle import Client
from fedbilevel.problem.submodel import LEVELS, Kernels, held, kernels_in, ratios_setting, widths
from fedbilevel.tree import dot, norm, normal_like, row, scale, step, sub
from problem.narrow import HIDDEN, INPUTS, TwoLayers, clients, problem
from problem.second_order import stacked


@pytest.fixture
def kernels():
    return Kernels.of(TwoLayers(), problem().y0, (INPUTS,))


# --------------------------------------------------------------------- kernels


def test_a_mask_is_the_product_over_the_axes(kernels):
    keep = [np.array([1, 0, 1, 0, 0, 0, 0, 1])]
    mask = kernels.mask(problem().y0, keep)
    np.testing.assert_array_equal(mask["bias"], keep[0])
    np.testing.assert_array_equal(mask["first"], np.outer(np.ones(3), keep[0]))
    np.testing.assert_array_equal(mask["second"], np.outer(keep[0], np.ones(2)))
    assert kernels.extract(problem().y0, keep)["first"].shape == (3, 3)
    assert {k: int(v) for k, v in kernels.cost(keep).items()} == {
        "parameters": 3 + 9 + 6,
        "bytes": 4 * 18,
        "flops": 2 * 15,
    }


def test_a_flattened_image_has_a_copy_of_the_kernels_for_every_pixel():
    model = FourLayerCNN(filters=3, outputs=2, pooled=2)
    shapes = jax.eval_shape(lambda key: model.init(key, (12, 12, 1))[0], jr.key(0))
    kernels = Kernels.of(model, shapes, (12, 12, 1))
    keep = [np.array([0, 1, 0]) if name == "fourth" else np.ones(3) for name in kernels.names]
    mask = kernels.mask(shapes, keep)["head"]["weight"]
    np.testing.assert_array_equal(mask[:, 0], np.tile([0, 1, 0], 4))
    # Layers 1 to 3 as they are; the last has one kernel of 2 × 2 × 3, and the head its 4 pixels.
    assert int(kernels.cost(keep)["parameters"]) == 9 * 3 + 3 + 2 * (81 + 3) + 12 + 1 + 8 + 2


def test_soft_kernels_cost_as_much_as_they_are_held(kernels):
    half = [jnp.full(HIDDEN, 0.5)]
    assert (
        float(kernels.cost(half)["flops"]) == kernels.cost(0.5)["flops"] == 0.5 * kernels.cost(1.0)["flops"]
    )


def test_numbers_of_kernels_are_rounded_up():
    assert [held(8, ratio) for ratio in LEVELS] == [8, 4, 2, 1, 1]
    assert held(100, 0.07) == 7


def test_ratios_of_clients():
    drawn = widths("random", 200, seed=1)
    assert set(drawn) == set(LEVELS)
    assert drawn[:20] == widths("random", 20, seed=1) != widths("random", 20, seed=2)
    with pytest.raises(ValueError, match="ratios has 2 numbers, but there are 3 clients"):
        widths((1.0, 0.5), 3)
    for wrong in (0.0, 1.5, [0.5, -1.0]):
        with pytest.raises(ValueError, match="must be above 0 and at most 1"):
            Submodel(wrong)
    with pytest.raises(ValueError, match="ratios is 'randm'"):
        Submodel("randm")


def test_a_problem_without_a_model_to_slice_is_refused():
    with pytest.raises(ProblemError, match="no model that can be sliced was found"):
        kernels_in(fb.single_level(lambda x, samples: x @ x, jnp.ones(2)))
    with pytest.raises(ProblemError, match="they are not those of this model"):
        Kernels.of(TwoLayers(), {"a": jnp.zeros(2), "b": jnp.zeros(2), "c": jnp.zeros(2)})


# --------------------------------------------------------------------- decoder


def client(number=0):
    return Client(problem(), clients(), number, number, jr.key(7))


def test_the_small_network_starts_near_the_whole_model():
    net = MaskNet((4, 6), 5)
    masks = jax.jit(lambda key: net(net.init(key, jnp.float32)))(jr.key(0))
    assert [mask.shape for mask in masks] == [(4,), (6,)]
    assert all(bool(jnp.all((mask > 0.5) & (mask < 1))) for mask in masks)


def test_a_client_holds_its_share_and_learns_it_on_its_own_data():
    decoder = Submodel((0.5, 0.25, 1.0), mask_steps=40, refresh=2, mask_lr=0.05)
    memory, x = decoder.first_memory(problem()), decoder.first(problem(), ())

    @jax.jit
    def rounds(x, memory):
        with metering() as meter:
            first = decoder.decoded(client(0), x, memory, ())
        again = decoder.decoded(client(0), x, first.memory, ())
        other = decoder.decoded(client(1), x, memory, ()).y
        return first, again, other, meter.counts

    (y, first, held, _), (same, second, *_), other, counts = rounds(x, memory)
    held_by = [np.any(np.asarray(one["first"]) != 0, axis=0) for one in (y, other)]
    assert [own.sum() for own in held_by] == [4, 2]
    for name in x:
        kept = np.asarray(y[name]) != 0
        np.testing.assert_array_equal(np.asarray(y[name])[kept], np.asarray(x[name])[kept])
        np.testing.assert_array_equal(held[name], kept)
        np.testing.assert_array_equal(same[name], y[name])  # no refreshment in the second round
    assert int(second["rounds"]) == 2
    assert bool(jnp.all(first["phi"]["bias"] == second["phi"]["bias"]))
    assert bool(jnp.any(first["phi"]["bias"] != memory["phi"]["bias"]))
    assert Ledger.from_counts(jax.tree.map(np.asarray, counts)).calls == {"f_y": 40}


def test_width_ratios_may_be_numpys():
    assert ratios_setting(np.float32(0.5)) == ratios_setting(0.5) == 0.5
    assert ratios_setting(np.array([1.0, 0.5])) == ratios_setting([1, 0.5]) == (1.0, 0.5)
    assert ratios_setting("random") == "random"


@pytest.mark.parametrize("given", [None, "half", ["1/2", 1], True])
def test_other_width_ratios_are_refused(given):
    with pytest.raises(ValueError, match=r"ratios is .*; it must be numbers of at most 1, or"):
        ratios_setting(given)


def trained(me):
    """A model that fits the client's samples, so that its loss wants every unit."""
    batch = me.batch("upper", me.key)
    return jax.lax.fori_loop(0, 300, lambda _, y: step(y, 0.5, me.f_y((), y, batch)), problem().y0)


def test_masks_come_to_the_budget_although_the_loss_wants_every_unit(kernels):
    """By the paper's β and AdamW, begun anew in every refreshment. Negative control: β = 0 keeps all."""
    me, net = client(), MaskNet(kernels.sizes, 16)

    @jax.jit
    def share(penalty):
        decoder, x = Submodel(0.25, penalty=penalty), trained(me)
        start = decoder.first_memory(problem())["phi"]
        phi = jax.lax.fori_loop(0, 30, lambda _, phi: decoder._learnt(me, x, phi, 10), start)
        return [kernels.cost(net(phi))["flops"] / kernels.cost(1.0)["flops"] for phi in (start, phi)]

    before, after = share(10.0)
    assert before > 0.9
    assert 0.15 < after < 0.3
    assert share(0.0)[1] > 0.9


@pytest.mark.usefixtures("float64")
def test_encode_is_the_transpose_of_the_derivative_of_decode():
    """One learning step of size η: −Δx/η is the gradient of `f_m(y_m(x))`; without the second term not."""
    decoder = Submodel(0.25, full=True, soft=True)  # β, AdamW and its steps as in the paper
    me, x = client(), decoder.first(problem(), ())
    v = normal_like(jr.key(5), x)

    @jax.jit
    def compared(x, small):
        def value_and_slope(x):
            y = decoder.decode(me, x, x, ())
            batch = me.batch("upper", me.key)
            return y, me.f((), y, batch), me.f_y((), y, batch)

        # A loop, so that decoding is compiled once.
        points = stacked(x, step(x, -small, v), step(x, small, v))
        ys, values, slopes = jax.lax.map(value_and_slope, points)
        y, slope = row(ys, 0), row(slopes, 0)
        encoded = decoder.encode(me, x, y, scale(-0.1, slope), ())
        first_term = jax.tree.map(lambda y, x, d: y / x * d, y, x, slope)
        return scale(-10, encoded), first_term, (values[1] - values[2]) / (2 * small)

    gradient, first_term, difference = compared(x, 1e-5)
    np.testing.assert_allclose(dot(gradient, v), difference, rtol=1e-6)
    assert float(norm(sub(gradient, first_term))) > 1e-3 * float(norm(gradient))
    assert abs(float(dot(first_term, v)) - difference) > 1e-4 * abs(difference)


def test_settings_that_do_not_go_together_are_explained():
    with pytest.raises(ValueError, match="soft masks are only for `full`"):
        Submodel(0.5, soft=True)
    with pytest.raises(ValueError, match='average is "holders", but with `full` every number of x may move'):
        Submodel(0.5, full=True, average="holders")
