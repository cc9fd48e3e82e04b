"""Decoders: with one learning step of size η, −Δx/η is the gradient of `h_m(x) = f_m(y_m(x))`."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fedbilevel as fb
from fedbilevel.fed.ledger import metering
from fedbilevel.local.decode import EachDecoder, GradientDecoder
from fedbilevel.local.sketch_decoder import LinearSketch, SketchLasso
from fedbilevel.problem.oracle import Client
from fedbilevel.tree import row

pytestmark = pytest.mark.usefixtures("float64")

ETA = 0.1


def learn(me, x, y):
    """Δy of one step."""
    gradient = me.f_y(x, y, me.batch("upper", jr.key(0)))
    return jax.tree.map(lambda leaf: -ETA * leaf, gradient)


def slope(decoder, me, x, shared, start):
    """`−Δx/η`."""
    y = decoder.decode(me, x, start, shared)
    return -decoder.encode(me, x, y, learn(me, x, y), shared) / ETA


def differences(h, x, width):
    """The gradient of h by central differences."""
    away = width * jnp.eye(x.size)
    values = jax.vmap(h)(jnp.concatenate([x + away, x - away]))
    return (values[: x.size] - values[x.size :]) / (2 * width)


def relative(a, b):
    return np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b))


# ----------------------------------------------------------- gradient decoder

DX, DY = 3, 4


@functools.cache
def quadratic():
    with jax.enable_x64(True):
        return fb.Quadratic.random(jr.key(1), clients=2, dx=DX, dy=DY, coupling=0.0, lower="local")


def quadratic_client(place):
    return Client(quadratic().problem(), quadratic().clients(), place, place, jr.key(place))


def quadratic_value(place):
    """`h_i(x)` in closed form."""
    own = quadratic()
    A, B, b, c, D = (leaf[place] for leaf in (own.A, own.B, own.b, own.c, own.D))

    def h(x):
        gap = jnp.linalg.solve(A, B @ x + b) - c
        return gap @ D @ gap / 2

    return h


@pytest.mark.parametrize("start", ["cold", "warm"])
def test_gradient_decoder_gives_the_gradient_of_h(start):
    decoder = GradientDecoder(lower_lr=0.2, lower_steps=200, terms=200, start=start)
    x = jnp.array([0.5, -1.0, 2.0])
    quadratic()  # made here, since it is kept: what is made inside a program must not be
    found = jax.jit(lambda place, x: slope(decoder, quadratic_client(place), x, (), jnp.ones(DY)))
    for place in range(2):
        assert relative(found(place, x), differences(quadratic_value(place), x, 1e-4)) <= 1e-8


@pytest.mark.parametrize("terms", [0, 1, 5])
def test_the_series_has_one_term_more_than_its_number(terms):
    """`Bᵀ A⁻¹(I − (I − τA)^{Q+1}) Δy`, since J = −Bᵀ; τ is not γ."""
    decoder = GradientDecoder(lower_lr=0.2, lower_steps=1, terms=terms, adjoint_lr=0.15)
    me, change = quadratic_client(0), jnp.arange(1.0, DY + 1)
    found = decoder.encode(me, jnp.ones(DX), jnp.zeros(DY), change, ())
    A, B = np.asarray(quadratic().A[0]), np.asarray(quadratic().B[0])
    left = np.linalg.matrix_power(np.eye(DY) - 0.15 * A, terms + 1)
    exact = B.T @ np.linalg.solve(A, change - left @ change)
    assert relative(found, exact) <= 1e-12


def test_the_gradient_decoder_is_billed():
    """I_dec of g_y, Q of g_yy and one of g_xy."""
    decoder = GradientDecoder(lower_lr=0.2, lower_steps=(3, 7), terms=5)
    me = quadratic_client(1)
    with metering() as meter:
        y = decoder.decode(me, jnp.ones(DX), jnp.zeros(DY), ())
        decoder.encode(me, jnp.ones(DX), y, y, ())
    calls = {entry.label: int(times) for entry, times in meter.counts.items() if entry.kind == "call"}
    assert calls == {"g_y": 7, "g_yy": 5, "g_xy": 1}


def test_a_warm_decoder_remembers_and_a_cold_one_does_not():
    me, x, far = quadratic_client(0), jnp.ones(DX), 100 * jnp.ones(DY)
    ends = {}
    for start in ("cold", "warm"):
        decoder = GradientDecoder(0.1, 1, 1, start=start)
        y, memory, *_ = decoder.decoded(me, x, far if start == "warm" else (), ())
        ends[start] = float(jnp.linalg.norm(y))
        assert (memory is y) == (start == "warm")
        assert (decoder.first_memory(me.problem) is None) == (start == "cold")
    assert ends["cold"] < 10 < ends["warm"]


# ------------------------------------------------------------ sketch decoders

SIZE, D, PENALTY = 16, 40, 0.4
Y0 = {"b": np.array([0.4, -0.2, 0.3, 0.1]), "w": np.random.default_rng(0).normal(size=(6, 6))}
TARGET = np.random.default_rng(1).normal(size=D)


def curved(x, y, samples):
    """Smooth and not quadratic; of y alone."""
    gap = ravel_pytree(y)[0] - TARGET
    return jnp.sum(jnp.log(jnp.cosh(gap))) + 0.1 * jnp.mean(samples) * jnp.sum(gap**2)


def sketch_client(id=0):
    problem = fb.Problem(curved, curved, x0=jnp.zeros(()), y0=Y0)
    return Client(problem, fb.Clients(lower=jnp.ones((3, 1))), id, id, jr.key(id))


LASSO = functools.partial(SketchLasso, SIZE, penalty=PENALTY, lower_steps=4000, cg_iterations=60)
LINEAR = functools.partial(LinearSketch, SIZE, cg_iterations=60)
SKETCHED = {
    "lasso, offset": LASSO(),
    "lasso, cold": LASSO(start="cold"),
    "lasso, warm": LASSO(start="warm"),
    "lasso, accelerated": LASSO(method="fista"),
    "lasso, srht": LASSO(sketch="srht"),
    "lasso, sparse": LASSO(sketch="sparse"),
    "lasso, made anew": LASSO(memory=0),
    "lasso, own": LASSO(own_sketches=True),
    "linear, offset": LINEAR(),
    "linear, cold": LINEAR(start="cold"),
    "linear, warm": LINEAR(start="warm"),
    "linear, own": LINEAR(own_sketches=True),
    "linear, srht": LINEAR(sketch="srht"),
}


def is_unique(S, theta, omega):
    """Whether θ solves the LASSO, which has one solution, and is away from kinks."""
    slope, on = S.T @ (omega - S @ theta) / PENALTY, abs(theta) > 1e-12
    solved = np.max(abs(slope[on] - np.sign(theta[on]))) <= 1e-9
    apart = np.max(abs(slope[~on])) < 0.999 and np.min(abs(theta[on])) > 1e-3
    return solved and apart and np.linalg.svd(S[:, on], compute_uv=False)[-1] > 0.01


def on_sketch(decoder, me):
    """All that the test needs, in one program: S, θ and ω of the LASSO, −Δx/η, and its differences.

    x and its neighbours are decoded together, so that decoding is compiled once.
    """
    shared, start, width = decoder.shared(me.problem), me.problem.y0, 1e-5
    x = decoder.first(me.problem, shared) + np.random.default_rng(2).normal(size=SIZE)
    away, batch = width * jnp.eye(SIZE), me.batch("upper", jr.key(0))
    points = jnp.concatenate([x + away, x - away, x[None]])
    ys = jax.vmap(lambda x: decoder.decode(me, x, start, shared))(points)
    values = jax.vmap(lambda y: me.f((), y, batch))(ys)
    y = row(ys, -1)
    found = -decoder.encode(me, x, y, learn(me, x, y), shared) / ETA
    S = jax.vmap(decoder.here(me, shared).operator.adjoint)(jnp.eye(SIZE))
    flat = ravel_pytree(y)[0]
    offset = decoder.start == "offset"
    theta, omega = (flat - ravel_pytree(start)[0], x - shared.image) if offset else (flat, x)
    return S, theta, omega, found, (values[:SIZE] - values[SIZE:-1]) / (2 * width)


@pytest.mark.parametrize("case", SKETCHED)
def test_sketch_decoders_give_the_gradient_of_h(case):
    decoder, me = SKETCHED[case], sketch_client(id=2)
    out = jax.jit(lambda: on_sketch(decoder, me))()
    S, theta, omega, found, exact = (np.asarray(part) for part in out)
    assert isinstance(decoder, LinearSketch) or is_unique(S, theta, omega)
    assert found.shape == (SIZE,)
    assert relative(found, exact) <= 1e-6


@pytest.mark.parametrize("start", ["offset", "warm"])
@pytest.mark.parametrize("make", [LINEAR, functools.partial(LASSO, lower_steps=1)])
def test_the_first_x_decodes_to_about_y0(make, start):
    """Exactly with an offset; to within a threshold if warm."""
    decoder, me = make(start=start), sketch_client()
    shared = decoder.shared(me.problem)
    x = decoder.first(me.problem, shared)
    y, memory, held, _ = decoder.decoded(me, x, me.problem.y0, shared)
    gap = np.max(abs(ravel_pytree(y)[0] - ravel_pytree(Y0)[0]))
    assert gap <= (1e-12 if start == "offset" or make is LINEAR else PENALTY)
    assert jax.tree.structure(y) == jax.tree.structure(me.problem.y0)
    assert (memory == ()) == (start == "offset")
    assert held is None
    assert decoder.alike == (start == "offset")


def test_the_linear_sketch_is_its_closed_form():
    """`θ₀ + Sᵀ(SSᵀ)⁻¹(ω − Sθ₀)` and `(SSᵀ)⁻¹SΔθ`."""
    decoder, me = LINEAR(), sketch_client()
    shared = decoder.shared(me.problem)
    S, theta = np.asarray(decoder.kind().stored(D, jnp.float64)), np.asarray(ravel_pytree(Y0)[0])
    x, change = jnp.arange(1.0, SIZE + 1), np.random.default_rng(3).normal(size=D)
    y = ravel_pytree(decoder.decode(me, x, None, shared))[0]
    assert relative(y, theta + S.T @ np.linalg.solve(S @ S.T, x - S @ theta)) <= 1e-10
    tree = ravel_pytree(me.problem.y0)[1](jnp.asarray(change))
    assert relative(decoder.encode(me, x, y, tree, shared), np.linalg.solve(S @ S.T, S @ change)) <= 1e-10


def test_where_nothing_is_active_a_change_still_gets_through():
    """At the first x of an offset the decoder is flat, and its derivative would keep it there for ever."""
    me = sketch_client()
    steps = {}
    for when_flat in ("linear", "zero"):
        decoder = LASSO(when_flat=when_flat)
        shared = decoder.shared(me.problem)
        x = decoder.first(me.problem, shared)
        steps[when_flat] = decoder.encode(me, x, me.problem.y0, me.problem.y0, shared)
    assert np.array_equal(steps["zero"], np.zeros(SIZE))
    linear = LINEAR()
    assert relative(steps["linear"], linear.encode(me, x, None, me.problem.y0, shared)) <= 1e-10


def test_types_of_the_leaves_are_kept():
    y0 = {"half": jnp.ones(7, jnp.float16), "single": jnp.ones(9, jnp.float32)}
    me = Client(fb.Problem(curved, curved, 0.0, y0), fb.Clients(lower=jnp.ones((1, 1))), 0, 0, jr.key(0))
    for decoder in (SketchLasso(4, penalty=0.01), LinearSketch(4)):
        shared = decoder.shared(me.problem)
        x = decoder.first(me.problem, shared)
        y = decoder.decode(me, x, y0, shared)
        assert {name: leaf.dtype.name for name, leaf in y.items()} == {"half": "float16", "single": "float32"}
        assert x.dtype == decoder.encode(me, x, y, y0, shared).dtype == jnp.float32


# ------------------------------------------------------- one decoder for each


def test_each_client_has_its_own_decoder():
    decoders = LINEAR(), LINEAR(start="cold")
    both = EachDecoder(decoders, assignment=(0, 1, 1))
    shared = both.shared(sketch_client().problem)
    x = both.first(sketch_client().problem, shared)
    for id in range(3):
        me, own = sketch_client(id), decoders[(0, 1, 1)[id]]
        mine = shared[(0, 1, 1)[id]]
        y = both.decode(me, x, Y0, shared)
        assert relative(ravel_pytree(y)[0], ravel_pytree(own.decode(me, x, Y0, mine))[0]) == 0
        change = me.problem.y0
        assert relative(both.encode(me, x, y, change, shared), own.encode(me, x, y, change, mine)) == 0


# --------------------------------------------------------------------- errors


def made(decoder):
    return decoder.shared(sketch_client().problem)


WRONG = {
    "steps too long": (
        lambda: made(LASSO(lower_lr=5.0)),
        "lower_lr is 5, but .* diverge from 1.9/‖S‖² = .* on",
    ),
    "own, steps too long": (lambda: made(LASSO(lower_lr=5.0, own_sketches=True)), "lower_lr is 5, but"),
    "too large": (lambda: made(SketchLasso(41, 0.1)), "give a size of at most 40"),
    "no such sketch": (lambda: LASSO(sketch="gausian"), "did you mean 'gaussian'"),
    "no such method": (lambda: LASSO(method="fist"), "did you mean 'fista'"),
    "no such start": (lambda: LINEAR(start="warmer"), "did you mean 'warm'"),
    "own but not offset": (lambda: LASSO(own_sketches=True, start="cold"), 'use start="offset"'),
    "a negative penalty": (lambda: SketchLasso(3, -0.1), "penalty is -0.1"),
    "no steps": (lambda: GradientDecoder(0.1, 0, 1), "lower_steps is 0"),
    "no step size": (lambda: GradientDecoder(0.0, 1, 1), "lower_lr is 0.0; it must be a number above 0"),
    "negative terms": (lambda: GradientDecoder(0.1, 1, -1), "terms is -1"),
    "a decoder too many": (
        lambda: EachDecoder((LINEAR(),), (0, 1)),
        "there are 1: give whole numbers counted from 0",
    ),
    "a warm one among several": (
        lambda: EachDecoder((LINEAR(start="warm"),), (0,)).first_memory(sketch_client().problem),
        "LinearSketch keeps something between rounds",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_explained(case):
    make, words = WRONG[case]
    with pytest.raises(ValueError, match=words):
        make()


def test_a_step_size_just_below_the_bound_is_taken():
    bound = made(LASSO()).bound
    made(LASSO(lower_lr=1.89 / float(bound)))
    made(LASSO(lower_lr=1 / float(bound), method="fista"))
    with pytest.raises(ValueError, match="steps by 'fista' may diverge from 1/‖S‖² ="):
        made(LASSO(lower_lr=1.5 / float(bound), method="fista"))
