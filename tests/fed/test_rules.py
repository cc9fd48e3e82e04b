"""The rules of the language: whatever breaks one is an error that says what to do."""

import operator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jaxtyping
import numpy as np
import pytest

from fedbilevel import Clients, Problem, Simulator, tree
from fedbilevel.fed import At, PlacementError, Program, ProgramError, UncountedWorkError
from fedbilevel.fed.ledger import metering

KEY = jr.key(0)


def distance(x: Any, y: Any, samples: Any) -> Any:
    return jnp.mean((samples - y) ** 2) + x * y


class Echo(Program):
    def __call__(self, me: Any, *values: Any) -> Any:
        return values[0]


class Table(Program):
    rows: Any

    def __call__(self, me: Any, *values: Any) -> Any:
        return self.rows


class InsideRawJax(Program):
    """Calls a counted oracle where its calls would be counted once."""

    how: str = eqx.field(static=True)

    def __call__(self, me: Any, *values: Any) -> Any:
        batch = me.batch("lower", me.key)

        def slope(y: Any) -> Any:
            return me.g_y(0.0, y, batch)

        wrapped = {
            "fori_loop": lambda y: jax.lax.fori_loop(0, 3, lambda i, y: slope(y), y),
            "scan": lambda y: jax.lax.scan(lambda y, _: (slope(y), None), y, None, length=3)[0],
            "while_loop": lambda y: jax.lax.while_loop(lambda y: y < 0, slope, y),
            "cond": lambda y: jax.lax.cond(y > 0, slope, lambda y: y, y),
            "vmap": lambda y: jax.vmap(slope)(jnp.stack([y, y])),
            "grad": jax.grad(slope),
        }
        return wrapped[self.how](jnp.asarray(1.0))


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: Any) -> None:
    """As in a user's process: no type checker steps in before the library's own messages."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="module")
def fed() -> Any:
    problem = Problem(distance, distance, x0=0.0, y0=0.0)
    return Simulator().federation(problem, Clients(lower=jnp.arange(6.0).reshape(3, 2)))


@pytest.fixture(scope="module")
def at(fed: Any) -> At:
    return fed.everyone.deal(jnp.arange(3.0), "v")


# ----------------------------------------------------- client values are opaque

BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.matmul,
    operator.pow,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
]


@pytest.mark.parametrize("operation", BINARY, ids=lambda operation: operation.__name__)
def test_arithmetic_on_a_client_value_is_refused(at: At, operation: Any) -> None:
    others = (2.0, np.ones(3), jnp.ones(3), at)
    for left, right in [(at, other) for other in others] + [(other, at) for other in others]:
        with pytest.raises(PlacementError, match=r"cohort\.run\(program.*cohort\.mean"):
            operation(left, right)


@pytest.mark.parametrize("operation", [operator.eq, operator.ne], ids=["eq", "ne"])
def test_comparing_a_client_value_is_refused(at: At, operation: Any) -> None:
    with pytest.raises(PlacementError, match=r"cohort\.run\(program.*cohort\.mean"):
        operation(at, 1.0)


@pytest.mark.parametrize(
    "use",
    [operator.neg, operator.pos, abs, float, int, bool, len, jnp.sum, jnp.asarray, np.asarray, np.sum],
    ids=lambda use: use.__name__,
)
def test_reading_a_client_value_on_the_server_is_refused(at: At, use: Any) -> None:
    with pytest.raises(PlacementError, match=r"cohort\.run\(program.*cohort\.mean"):
        use(at)


def test_tree_arithmetic_on_a_client_value_is_refused(at: At) -> None:
    for use in (tree.norm, lambda at: tree.add(at, at), lambda at: tree.scale(0.5, at)):
        with pytest.raises(PlacementError):
            use(at)


def test_a_client_value_is_not_unpacked_but_indexed(fed: Any) -> None:
    pair = fed.everyone.send((1.0, 2.0), "pair")
    with pytest.raises(PlacementError, match=r"value\[0\], value\[1\]"):
        _first, _second = pair
    assert fed.everyone.mean(pair[1], "v") == 2.0


# ------------------------------------------------------------- local programs


def test_a_program_with_a_closure_is_refused(fed: Any, at: At) -> None:
    captured = jnp.ones(3)

    class Closure(Program):
        def __call__(self, me: Any, *values: Any) -> Any:
            return values[0] + captured

    with pytest.raises(ProgramError, match=r"Closure closes over \['captured'\].*cohort\.send"):
        fed.everyone.run(Closure(), at, key=KEY)


def test_a_captured_value_in_a_nested_function_is_found(fed: Any, at: At) -> None:
    hidden = 3.0

    class Nested(Program):
        def __call__(self, me: Any, *values: Any) -> Any:
            return (lambda v: v * hidden)(values[0])

    with pytest.raises(ProgramError, match="hidden"):
        fed.everyone.run(Nested(), at, key=KEY)


@pytest.mark.parametrize("function", [lambda me, v: v, distance, Echo], ids=["lambda", "function", "class"])
def test_only_a_program_object_can_be_run(fed: Any, at: At, function: Any) -> None:
    with pytest.raises(ProgramError, match=r"class Name\(fedbilevel\.fed\.Program\)"):
        fed.everyone.run(function, at, key=KEY)


def test_an_array_in_a_program_is_refused_and_a_scalar_is_not(fed: Any, at: At) -> None:
    with pytest.raises(ProgramError, match=r"Table has an array in its field rows.*cohort\.send"):
        fed.everyone.run(Table(jnp.ones(2)), at, key=KEY)
    assert fed.everyone.mean(fed.everyone.run(Table(2.5), at, key=KEY), "v") == 2.5


@pytest.mark.parametrize("how", ["fori_loop", "scan", "while_loop", "cond", "vmap", "grad"])
def test_counted_work_in_raw_jax_is_refused(fed: Any, how: str) -> None:
    with pytest.raises(UncountedWorkError, match=r"g_y.*fedbilevel\.fed\.repeat"):
        fed.everyone.run(InsideRawJax(how), key=KEY)


def test_an_exchange_in_a_raw_loop_is_refused(fed: Any, at: At) -> None:
    def body(carry: Any, _: Any) -> Any:
        return fed.everyone.mean(at, "v"), None

    with metering(), pytest.raises(UncountedWorkError, match=r"fed\.loop"):
        jax.lax.scan(body, jnp.zeros(()), None, length=2)


# ------------------------------------------------------------------ placement


@pytest.mark.parametrize("verb", ["run", "mean", "gather", "put"])
def test_a_value_of_one_cohort_is_refused_in_another(fed: Any, at: At, verb: str) -> None:
    other = fed.sample(KEY, 2)
    uses = {
        "run": lambda: other.run(Echo(), at, key=KEY),
        "mean": lambda: other.mean(at, "v"),
        "gather": lambda: other.gather(at, "v"),
        "put": lambda: other.put(fed.keep(jnp.zeros(3)), at),
    }
    with pytest.raises(PlacementError, match=r"value of cohort everyone was used in cohort sample.*publish"):
        uses[verb]()


def test_two_samples_are_two_cohorts_even_with_one_key(fed: Any) -> None:
    value = fed.sample(KEY, 2).send(1.0, "v")
    with pytest.raises(PlacementError, match="used in cohort sample"):
        fed.sample(KEY, 2).mean(value, "v")


@pytest.mark.parametrize("verb", ["run", "mean", "gather"])
def test_a_server_value_must_be_sent_first(fed: Any, verb: str) -> None:
    value = jnp.ones(3)
    uses = {
        "run": lambda: fed.everyone.run(Echo(), value, key=KEY),
        "mean": lambda: fed.everyone.mean(value, "v"),
        "gather": lambda: fed.everyone.gather(value, "v"),
    }
    with pytest.raises(PlacementError, match=r"Send it first: `cohort\.send\(value, label\)`"):
        uses[verb]()


def test_a_kept_value_must_be_taken_first(fed: Any) -> None:
    kept = fed.keep(jnp.zeros(3))
    with pytest.raises(PlacementError, match=r"cohort\.take\(kept\)"):
        fed.everyone.run(Echo(), kept, key=KEY)
    with pytest.raises(PlacementError, match=r"cohort\.take\(kept\)"):
        fed.everyone.mean(kept, "v")


def test_only_a_kept_value_can_be_taken(fed: Any, at: At) -> None:
    with pytest.raises(PlacementError, match=r"made by `fed\.keep`; got At"):
        fed.everyone.take(at)


@pytest.mark.parametrize("verb", ["send", "deal"])
def test_what_lives_on_clients_cannot_be_sent(fed: Any, at: At, verb: str) -> None:
    placed = [at, {"inside": (at, 1.0)}, fed.keep(jnp.zeros(3)), fed.publish(1.0, "v")]
    for value in placed:
        with pytest.raises(PlacementError, match=f"`{verb}` takes server values.*`mean` first"):
            getattr(fed.everyone, verb)(value, "v")


@pytest.mark.parametrize("value", [jnp.zeros((2, 3)), jnp.zeros(()), {"a": jnp.zeros(3), "b": jnp.zeros(4)}])
def test_deal_needs_one_row_a_client(fed: Any, value: Any) -> None:
    with pytest.raises(ValueError, match=r"one row for each of the 3 clients.*a leaf has shape"):
        fed.everyone.deal(value, "v")


@pytest.mark.parametrize("size", [0, -1, 4])
@pytest.mark.parametrize("verb", ["cohort", "sample"])
def test_a_cohort_has_between_one_and_all_clients(fed: Any, verb: str, size: int) -> None:
    with pytest.raises(ValueError, match=rf"cohort of {size} .*between 1 and 3"):
        getattr(fed, verb)(KEY, size)


def test_a_cohort_of_all_or_none_given_is_everyone(fed: Any) -> None:
    assert fed.cohort(KEY, None).token == fed.cohort(KEY, 3).token == fed.everyone.token
    assert fed.cohort(KEY, 2).size == 2


def test_a_sent_value_cannot_be_the_carry_of_a_loop(fed: Any) -> None:
    sent = fed.everyone.send(1.0, "v")
    with pytest.raises(PlacementError, match="Send a server value inside the body"):
        fed.loop(2, lambda i, value: fed.everyone.run(Echo(), value, key=KEY), sent)


def test_a_loop_that_changes_the_structure_of_its_carry_is_refused(fed: Any) -> None:
    with pytest.raises(TypeError, match="must return what it got"):
        fed.loop(2, lambda i, pair: [pair[1], pair[0]], (1.0, 2.0))
