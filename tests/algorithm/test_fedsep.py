"""FedSep: closed forms of its round, cohorts, what clients keep, and what it costs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithm.fedsep import FedSep
from fedbilevel.local import EachDecoder, GradientDecoder, LinearSketch, SketchLasso
from fedbilevel.local.decode import Decoder
from fedbilevel.problem.base import ProblemError

N, DX, DY, LR = 4, 3, 5, 0.05
ACCURATE = {"lower_lr": 0.4, "lower_steps": 400, "terms": 400, "adjoint_lr": 0.25}


def drawn():
    return fb.Quadratic.random(jr.key(5), N, DX, DY)


def solved(algorithm, steps=1, **options):
    known = drawn()
    return fb.solve(problem_of(known), known.clients(**options), algorithm, steps, every=steps)


class Linear(Decoder):
    """`y = W x` with a W of k rows."""

    rows: int = eqx.field(static=True)

    def weights(self):
        return jr.normal(jr.key(self.rows), (self.rows, DX))

    def first(self, problem, shared):
        return jnp.ones(DX)

    def shared(self, problem):
        return ()

    def decode(self, me, x, start, shared):
        return self.weights() @ x

    def encode(self, me, x, y, change, shared):
        return self.weights().T @ change


@pytest.mark.usefixtures("float64")
def test_clients_may_learn_models_of_different_shapes():
    """With decoders of their own; by hand for two rounds of three steps."""

    def pull(x, y, samples):
        return jnp.sum((y - jnp.mean(samples)) ** 2) / 2

    data, kinds, steps, x = np.arange(8.0).reshape(4, 2, 1), (2, 7, 7, 2), 3, np.ones(DX)
    decoder = EachDecoder((Linear(2), Linear(7)), (0, 1, 1, 0))
    method = FedSep(decoder, fb.SGD(LR), learn_steps=steps)
    result = fb.solve(fb.Problem(pull, pull, (), jnp.zeros(2)), fb.Clients(data), method, 2)
    for _ in range(2):
        weights = [np.asarray(Linear(rows).weights()) for rows in kinds]
        ways = [((1 - LR) ** steps - 1) * (W @ x - own.mean()) for W, own in zip(weights, data, strict=True)]
        x = x + np.mean([W.T @ way for W, way in zip(weights, ways, strict=True)], axis=0)
    np.testing.assert_allclose(result.x, x, atol=1e-12)


def test_one_decoder_is_one_of_them_and_other_things_are_refused():
    assert EachDecoder(LinearSketch(3), 0).decoders == EachDecoder((LinearSketch(3),), 0).decoders
    with pytest.raises(ValueError, match="decoders is 3; it must be a tuple of decoders"):
        EachDecoder(3, 0)


def distance(x, y, samples):
    """f_i, which does not look at x, whatever its shape: `½ (y − c_i)ᵀD_i(y − c_i)`."""
    gap = y - samples["c"]
    return jnp.mean(jnp.einsum("si,sij,sj->s", gap, samples["D"], gap)) / 2


def problem_of(known, y0=(0.0,) * DY):
    return fb.Problem(distance, known.problem(metrics={}).lower, jnp.ones(DX), jnp.asarray(y0, float))


def of_client(known, i, x):
    """h_i(x) = f_i(y_i*(x)), from the definitions."""
    gap = jnp.linalg.solve(known.A[i], known.B[i] @ x + known.b[i]) - known.c[i]
    return gap @ known.D[i] @ gap / 2


def closed_form(known, i, x, steps):
    """Δx_i = −η B_iᵀA_i⁻¹ Σ_{j<I} (I − ηD_i)^j D_i (y_i* − c_i)."""
    A, B, b, D, c = (np.asarray(getattr(known, name)[i]) for name in "ABbDc")
    slope = D @ (np.linalg.solve(A, B @ x + b) - c)
    total = sum(np.linalg.matrix_power(np.eye(DY) - LR * D, j) @ slope for j in range(steps))
    return -LR * B.T @ np.linalg.solve(A, total)


@pytest.mark.usefixtures("float64")
def test_one_learning_step_is_one_gradient_step_on_h():
    known = drawn()
    slopes = [jax.grad(lambda x, i=i: of_client(known, i, x))(jnp.ones(DX)) for i in range(N)]
    run = solved(FedSep(GradientDecoder(**ACCURATE), fb.SGD(LR), learn_steps=1, server_lr=0.7))
    np.testing.assert_allclose(run.x, 1 - 0.7 * LR * np.mean(slopes, axis=0), rtol=0, atol=1e-12)
    assert np.linalg.norm(run.x - 1) > 1e-3


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("steps", [2, 10])
def test_many_learning_steps_are_the_closed_form(steps):
    known, x = drawn(), np.ones(DX)
    for _ in range(3):
        x = x + np.mean([closed_form(known, i, x, steps) for i in range(N)], axis=0)
    run = solved(FedSep(GradientDecoder(**ACCURATE), fb.SGD(LR), learn_steps=steps), 3)
    np.testing.assert_allclose(run.x, x, rtol=0, atol=1e-9)


@pytest.mark.usefixtures("float64")
def test_a_short_series_is_another_method():
    known, ones = drawn(), np.ones(DX)
    right = np.mean([closed_form(known, i, ones, 2) for i in range(N)], axis=0)
    rough = GradientDecoder(**ACCURATE | {"terms": 1})
    found = solved(FedSep(rough, fb.SGD(LR), learn_steps=2)).x - 1
    assert np.linalg.norm(found - right) > 1e-2 * np.linalg.norm(right)


@pytest.mark.usefixtures("float64")
def test_steps_of_ones_own_and_cohorts():
    known, steps = drawn(), (1, 4, 2, 3)
    algorithm = FedSep(GradientDecoder(**ACCURATE), fb.SGD(LR), learn_steps=steps, cohort=2)
    fed = fb.Simulator().federation(problem_of(known), known.clients())
    start, step = algorithm.init(fed, jr.key(9)), jax.jit(lambda s, k: algorithm.step(fed, s, k)[0])
    for number in range(3):
        key = jr.key(number)
        ids = np.asarray(fed.cohort(jr.split(key)[0], 2).ids)
        state = step(start, key)
        expected = np.mean([closed_form(known, i, np.ones(DX), steps[i]) for i in ids], axis=0)
        np.testing.assert_allclose(state.x, 1 + expected, rtol=0, atol=1e-12)


# ------------------------------------------------------------------ what clients keep


def decoded(known, i, x, y, steps, lr=0.1):
    A, B, b = (np.asarray(getattr(known, name)[i]) for name in "ABb")
    for _ in range(steps):
        y = y - lr * (A @ y - B @ x - b)
    return y


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("start", ["warm", "cold"])
def test_a_warm_client_goes_on_where_its_own_last_decoding_ended(start):
    known, decoder = drawn(), GradientDecoder(0.1, 2, 3, start=start)
    algorithm = FedSep(decoder, fb.SGD(LR), learn_steps=1, cohort=2)
    fed = fb.Simulator().federation(problem_of(known), known.clients())
    state, own = algorithm.init(fed, jr.key(0)), np.zeros((N, DY))
    step = jax.jit(lambda s, k: algorithm.step(fed, s, k)[0])
    for number in range(6):
        ids, x = np.asarray(fed.cohort(jr.split(jr.key(number))[0], 2).ids), np.asarray(state.x)
        state = step(state, jr.key(number))
        for i in ids:
            begin = own[i] if start == "warm" else np.zeros(DY)
            own[i] = decoded(known, i, x, begin, 2)
        np.testing.assert_allclose(algorithm.solution(state)[1].value, own, rtol=0, atol=1e-12)
        assert (state.memory is None) == (start == "cold")
        assert (state.y == ()) == (start == "warm"), "kept twice"


# ------------------------------------------------------------------ sketches


def matrix(decoder, d=DY):
    """The decoder's sketch as a matrix."""
    sketch = decoder.kind()
    stored = sketch.stored(d, jnp.result_type(float))
    return np.stack([np.asarray(sketch.apply(row, stored)) for row in jnp.eye(d)], axis=1)


def change_of_y(known, i, y, steps=2):
    """By how much a client's learning steps move y (f does not see x)."""
    D, c = np.asarray(known.D[i]), np.asarray(known.c[i])
    own = y
    for _ in range(steps):
        own = own - LR * D @ (own - c)
    return own - y


Y0 = np.array([0.3, -1.0, 0.5, 2.0, -0.2])


def sketched(decoder, steps, **options):
    known, algorithm = drawn(), FedSep(decoder, fb.SGD(LR), learn_steps=2, **options)
    return fb.solve(problem_of(known, Y0), known.clients(), algorithm, steps)


@pytest.mark.usefixtures("float64")
def test_a_linear_sketch_moves_in_the_span_of_its_rows():
    decoder, known = LinearSketch(3), drawn()
    S = matrix(decoder)
    omega, inverse = S @ Y0, np.linalg.pinv(S)
    for _ in range(3):
        y = Y0 + inverse @ (omega - S @ Y0)
        omega = omega + np.mean([inverse.T @ change_of_y(known, i, y) for i in range(N)], axis=0)
    run = sketched(decoder, 3)
    np.testing.assert_allclose(run.x, omega, rtol=0, atol=1e-9)
    np.testing.assert_allclose(run.y, Y0 + inverse @ (omega - S @ Y0), rtol=0, atol=1e-9)


@pytest.mark.usefixtures("float64")
def test_with_a_decoder_for_each_kind_of_client_it_is_the_mean_of_their_own_changes():
    kinds, assignment, known = (LinearSketch(3, seed=1), LinearSketch(3, seed=2)), (0, 1, 1, 0), drawn()
    S = [matrix(kind) for kind in kinds]
    omega = S[0] @ Y0  # the first decoder's
    for _ in range(2):
        total = []
        for i, kind in enumerate(assignment):
            inverse = np.linalg.pinv(S[kind])
            y = Y0 + inverse @ (omega - S[kind] @ Y0)
            total.append(inverse.T @ change_of_y(known, i, y))
        omega = omega + np.mean(total, axis=0)
    run = sketched(EachDecoder(kinds, assignment), 2)
    np.testing.assert_allclose(run.x, omega, rtol=0, atol=1e-9)
    alone = sketched(kinds[0], 2)
    assert np.linalg.norm(alone.x - omega) > 1e-3, "the assignment does not matter"


@pytest.mark.usefixtures("float64")
def test_the_first_model_is_the_problems_own():
    """Decoded as an offset, `ω₁ = Sθ₀` gives θ₀ itself: a network that is alive."""
    decoder = SketchLasso(2, 0.01)
    known = drawn()
    fed = fb.Simulator().federation(problem_of(known, Y0), known.clients())
    state = FedSep(decoder, fb.SGD(LR)).init(fed, jr.key(0))
    np.testing.assert_allclose(state.y, Y0, rtol=0, atol=1e-12)
    np.testing.assert_allclose(state.x, matrix(decoder) @ Y0, rtol=0, atol=1e-12)


def draws_in_a_step(algorithm, problem, clients):
    """How often normal numbers are drawn in the program of one step."""
    fed = fb.Simulator().federation(problem, clients)
    state = algorithm.init(fed, jr.key(0))
    program = jax.make_jaxpr(lambda state, key: algorithm.step(fed, state, key)[0].x)(state, jr.key(0))
    return str(program).count("erf_inv")


def test_the_sketch_is_made_once_and_not_in_every_step():
    known = drawn()
    problem = problem_of(known)
    plain = FedSep(SketchLasso(2, 0.01), fb.SGD(LR))
    made = plain.on(problem)
    assert made.shared.stored.shape == (2, DY)
    np.testing.assert_allclose(made.shared.stored, matrix(SketchLasso(2, 0.01)), rtol=0, atol=1e-6)
    assert made.on(problem).shared is made.shared, "made again"
    assert draws_in_a_step(plain, problem, known.clients()) > 0
    assert draws_in_a_step(made, problem, known.clients()) == 0


# ------------------------------------------------------------------ cost, mistakes


def test_what_a_round_costs():
    spent = solved(FedSep(GradientDecoder(0.1, 3, 2), fb.SGD(LR), learn_steps=4, cohort=3), 2).ledger
    assert spent.rounds == 2
    assert spent.up == spent.down == {"x": 2 * 3 * 4 * DX}
    assert spent.calls == {kind: 2 * 3 * n for kind, n in {"g_y": 3, "f_y": 4, "g_yy": 2, "g_xy": 1}.items()}


@pytest.mark.parametrize("decoder", [SketchLasso(1, 0.01), LinearSketch(4)], ids=["lasso", "linear"])
def test_of_a_sketch_only_its_own_numbers_travel(decoder):
    spent = sketched(decoder, 2).ledger
    assert spent.up == spent.down == {"x": 2 * N * 4 * decoder.size}
    assert spent.calls == {"f_y": 2 * N * 2}


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="learn_steps"):
        FedSep(LinearSketch(2), fb.SGD(LR), learn_steps=0)
    with pytest.raises(ValueError, match="learn_steps has 2 numbers, but there are 4 clients"):
        solved(FedSep(GradientDecoder(0.1, 1, 1), fb.SGD(LR), learn_steps=(1, 2)))
    for wrong in ("SketchLasso", LinearSketch):
        with pytest.raises(ValueError, match=r"decoder is .*; it must be a decoder, such as"):
            FedSep(wrong, fb.SGD(LR))
    with pytest.raises(ValueError, match="a sketch of size 6 of a vector of 5 numbers would be larger"):
        sketched(LinearSketch(6), 1)


@jax.jit
def compiled_distance(x, y, samples):
    return distance(x, y, samples)


def traced(upper, decoder):
    """A round on a problem with this f, traced and not run."""
    known = drawn()
    problem = fb.Problem(upper, problem_of(known).lower, jnp.ones(DX), jnp.zeros(DY))
    fed, algorithm = fb.Simulator().federation(problem, known.clients()), FedSep(decoder, fb.SGD(LR))
    return jax.eval_shape(lambda key: algorithm.step(fed, algorithm.init(fed, key), key)[0], jr.key(0))


@pytest.mark.parametrize("decoder", [GradientDecoder(0.1, 1, 1), LinearSketch(DX), LinearSketch(2)])
def test_an_f_that_reads_x_is_refused(decoder):
    """Its direct gradient would be lost; and of a sketch, f would see ω in the place of x."""

    def with_a_term_in_x(x, y, samples):
        return distance(x, y, samples) + jnp.sum((x - jnp.ones(DX)) ** 2)

    with pytest.raises(ProblemError, match=r"the upper objective reads x itself.*Use FedBiOLocal"):
        traced(with_a_term_in_x, decoder)
    assert traced(compiled_distance, decoder).x.shape == (getattr(decoder, "size", DX),)


def test_x_stays_where_it_may_be():
    """From the start; a sketch of y is no x that the problem knows, and stays as it is."""
    known, bounds = drawn(), (0.2, 0.9)
    open_problem = problem_of(known)
    bounded = fb.Problem(
        distance, open_problem.lower, open_problem.x0, open_problem.y0, constraint=fb.Box(*bounds)
    )
    method = FedSep(GradientDecoder(0.1, 3, 2), fb.SGD(LR), server_lr=100.0)
    seen = []
    fb.solve(
        bounded, known.clients(), method, 2, every=1, callback=lambda now: seen.append(np.asarray(now.x))
    )
    np.testing.assert_array_equal(seen[0], np.full(DX, np.float32(0.9)))
    assert all(np.all((x >= np.float32(0.2)) & (x <= np.float32(0.9))) for x in seen)
    assert np.any(seen[-1] != seen[0])
    sketch = FedSep(LinearSketch(2), fb.SGD(LR))
    np.testing.assert_array_equal(
        *(fb.solve(p, known.clients(), sketch, 1).x for p in (bounded, open_problem))
    )


def test_an_automatic_server_step_is_what_the_decoder_says():
    auto, given = (
        solved(FedSep(LinearSketch(2), fb.SGD(LR), server_lr=rate), 2) for rate in ("auto", DY / 2)
    )
    np.testing.assert_array_equal(auto.x, given.x)
    with pytest.raises(ValueError, match=r'a step size is .fast.*or "auto"'):
        FedSep(LinearSketch(2), fb.SGD(LR), server_lr="fast")


def test_an_automatic_server_step_of_many_decoders_is_their_common_one():
    def step_of(*decoders):
        each = FedSep(EachDecoder(decoders, (0, 1, 0, 1)), fb.SGD(LR), server_lr="auto")
        return each.on(problem_of(drawn())).server_lr

    assert step_of(LinearSketch(2, seed=1), LinearSketch(2, seed=2)) == DY / 2
    with pytest.raises(ValueError, match="the decoders say different ones"):
        step_of(LinearSketch(2), LinearSketch(3))


@pytest.mark.parametrize(
    ("name", "decoder"),
    [
        ("lower_steps", GradientDecoder(0.1, (1, 2), 1)),
        ("assignment", EachDecoder((LinearSketch(3, seed=1), LinearSketch(3, seed=2)), (0, 1))),
        ("lower_steps", EachDecoder((GradientDecoder(0.1, (1, 2), 1, start="cold"),), 0)),
    ],
)
def test_numbers_of_clients_inside_a_decoder_are_checked(name, decoder):
    fed = fb.Simulator().federation(problem_of(drawn()), drawn().clients())
    with pytest.raises(ValueError, match=f"{name} has 2 numbers, but there are 4 clients"):
        FedSep(decoder, fb.SGD(LR)).init(fed, jr.key(0))
