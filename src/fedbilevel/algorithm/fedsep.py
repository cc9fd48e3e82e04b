"""FedSep: what travels and what learns are different variables, joined by a decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.interpreters.partial_eval import dce_jaxpr

from fedbilevel.algorithm.base import Algorithm, Info, check_has_y, check_lengths
from fedbilevel.data.clients import Clients
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.loop import branch
from fedbilevel.fed.place import Kept
from fedbilevel.fed.program import Program
from fedbilevel.local.decode import Decoded, Decoder, EachDecoder
from fedbilevel.local.learn import Learn
from fedbilevel.local.optimizer import SGD, Optimizer, optimizer
from fedbilevel.local.work import Amount, amount, check_amounts, of_client
from fedbilevel.number import whole
from fedbilevel.problem.base import Problem, ProblemError, objective
from fedbilevel.problem.oracle import Client
from fedbilevel.schedule import rate
from fedbilevel.tree import PyTree, add, copies, scale, sub


class Separated(NamedTuple):
    """What travels, what it decodes to, and what clients keep for their decoders."""

    x: PyTree
    y: Any
    memory: Kept | None


class PublicClient(Client):
    """What a decoder sees of a client where it needs none of its data: it has none, and no key."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.id = problem, 0


def _check_of_y_alone(me: Client) -> None:
    """Raise an error that explains if f reads x: a sketch is none, and only what y tells of x is encoded."""
    x0, y0, batch = me.problem.x0, me.problem.y0, me.batch("upper", me.key)
    traced = jax.make_jaxpr(lambda x: objective(me.problem, "upper", x, y0, batch))(x0)
    if any(dce_jaxpr(traced.jaxpr, [True])[1]):
        raise ProblemError(
            "FedSep minimises f(y(x)), but the upper objective reads x itself: its direct gradient would be "
            "lost. Use FedBiOLocal, or an f of y alone"
        )


class DecodeLearnEncode(Program):
    """`(x, shared, memory) ↦ ((Δx, held), y, memory)`: a client's round; y is () where nobody looks at it."""

    decoder: Decoder
    learn: Learn

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, shared, memory = values
        _check_of_y_alone(me)
        decoded = self.decoder.decoded(me.rekeyed(0), x, memory, shared)
        y, memory, held, _ = decoded
        change = sub(self._learnt(me.rekeyed(1), x, decoded), y)
        encoded = self.decoder.encode(me.rekeyed(2), x, y, change, shared)
        say = held if self.decoder.over_holders else ()
        return (encoded, say), y if self.decoder.shown else (), memory

    def _learnt(self, me: Client, x: PyTree, decoded: Decoded) -> PyTree:
        if decoded.part is None:
            return self.learn(me, x, decoded.y, decoded.held)
        return decoded.part.trained(lambda small: self.learn(me, x, small), decoded.y)


class EachDecodeLearnEncode(Program):
    """A client's whole round with a decoder of its own: returns `((Δx, held), (), ())`.

    What clients decode to may differ in shape, so nobody outside the client sees it.
    """

    decoders: EachDecoder
    learn: Learn

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, shared, _ = values

        def whole_round(place: int) -> Callable[[], PyTree]:
            own = DecodeLearnEncode(self.decoders.decoders[place], self.learn)
            return lambda: own(me, x, shared[place], ())[0]

        rounds = [whole_round(place) for place in range(len(self.decoders.decoders))]
        return branch(of_client(self.decoders.assignment, me.id), rounds), (), ()


def _over_holders(change: PyTree, held: PyTree) -> PyTree:
    """The mean over those who have a say, given that over all of the cohort and the share of those who do."""
    if not jax.tree.leaves(held):
        return change
    return jax.tree.map(lambda mean, share: mean / jnp.where(share > 0, share, 1), change, held)


def _rate_or_auto(value: Any) -> Any:
    if isinstance(value, str) and value == "auto":
        return value
    try:
        return rate(value)
    except ValueError as error:
        raise ValueError(f'{error}, or "auto": what the decoder says') from None


class FedSep(Algorithm[Separated]):
    """Clients decode what travels, x, to what learns, y; learn; and encode what they learnt.

        min_x mean_m f_m(y_m(x)) ,   y_m(x) = argmin_y g_m(x, y)

    A round: x is sent; client m decodes `y = Dec_m(x)`, makes I steps of its optimiser on f_m from there,
    and sends `Δx = (∂y_m/∂x)ᵀ (y^I − y)`; the server moves `x ← x + η_g mean Δx`. With one learning step of
    size η and an exact decoder, `−Δx/η` is the gradient of f_m(y_m(x)).

    `result.x` is what travels. `result.y` is what it decodes to, where everybody decodes alike; otherwise
    one row a client: what it decoded when it last took part. It is () where shapes differ between clients,
    and of `Submodel`, whose y are parts of x: they would take the memory of a whole model for each client.

    Args:
        decoder: how x and y are joined: `GradientDecoder`, `SketchLasso`, `LinearSketch`, `Submodel`.
        learn: the optimiser of a client's learning steps (`fedbilevel.SGD(0.1)`, or one of optax).
        learn_steps: I; a number, or a tuple with one for each client.
        server_lr: η_g; a number, an optax schedule of the round, or "auto": what the decoder says. Of a
            sketch it is d/p: only a p/d-th of what clients learn survives encoding and decoding.
        cohort: clients in a round; None: all.
        shared: what everybody makes from the decoder's seed, such as a stored sketch; None: made when it
            runs.

    Cost a round and client: one exchange, d_x scalars each way; I calls of f_y, and what the decoder asks of
    g.

    Reference: J. Li, H. Huang, Resolving the tug-of-war: a separation of communication and learning in
    federated learning, NeurIPS 2023, algorithm 1 (whose encoder is −∂y/∂x, and whose server subtracts: the
    same).
    """

    decoder: Decoder
    learn: Optimizer = eqx.field(converter=optimizer, default=SGD(0.1))
    learn_steps: Amount = eqx.field(static=True, converter=amount, default=5)
    server_lr: Any = eqx.field(converter=_rate_or_auto, default=1.0)
    cohort: int | None = eqx.field(static=True, converter=whole, default=None)
    shared: PyTree = None

    def __check_init__(self) -> None:
        check_amounts(self, "learn_steps")
        if not isinstance(self.decoder, Decoder):
            raise ValueError(
                f"decoder is {self.decoder!r}; it must be a decoder, such as fedbilevel.LinearSketch(1000)"
            )

    def on(self, problem: Problem) -> FedSep:
        check_has_y(problem)
        made = self.decoder.shared(problem) if self.shared is None else self.shared
        auto = isinstance(self.server_lr, str)  # an array has no truth value
        server_lr = self.decoder.server_lr(problem) if auto else self.server_lr
        return dataclasses.replace(self, shared=made, server_lr=server_lr)

    def made(self) -> PyTree:
        return () if self.shared is None else self.shared

    def unmade(self) -> FedSep:
        return dataclasses.replace(self, shared=None)

    def remarks(self, problem: Problem, clients: Clients) -> tuple[str, ...]:
        """What the decoder says."""
        return self.decoder.remarks(problem, clients)

    def init(self, fed: Federation, key: jax.Array) -> Separated:
        kinds = self.decoder.decoders if isinstance(self.decoder, EachDecoder) else ()
        for settings in (self, self.decoder, *kinds):
            check_lengths(settings, fed.n)
        shared = self.on(fed.problem).shared
        x = self.decoder.first(fed.problem, shared)
        memory = self.decoder.first_memory(fed.problem)
        kept = None if memory is None else fed.keep(copies(memory, fed.n))
        if self.decoder.alike:
            return Separated(x, self._decoded(fed, x, shared), kept)
        return Separated(x, fed.keep(copies(fed.problem.y0, fed.n)) if self.decoder.shown else (), kept)

    @property
    def _differ(self) -> bool:
        return isinstance(self.decoder, EachDecoder)

    def _decoded(self, fed: Federation, x: PyTree, shared: PyTree) -> PyTree:
        """What everybody decodes x to, by the server, for those who look at the run."""
        return self.decoder.decode(PublicClient(fed.problem), x, fed.problem.y0, shared)

    def step(self, fed: Federation, state: Separated, key: jax.Array) -> tuple[Separated, Info]:
        k_cohort, k_round = jr.split(key)
        cohort = fed.cohort(k_cohort, self.cohort)
        ready = self.on(fed.problem)
        shared, server_lr = ready.shared, ready.server_lr
        memory = cohort.agreed(()) if state.memory is None else cohort.take(state.memory)
        rounds: Any = EachDecodeLearnEncode if self._differ else DecodeLearnEncode
        program = rounds(self.decoder, Learn(self.learn, self.learn_steps))
        out = cohort.run(program, cohort.send(state.x, "x"), cohort.agreed(shared), memory, key=k_round)
        change = _over_holders(*cohort.mean(out[0], "x", codec=self.decoder.codec(fed.problem, fed.n)))
        x = self.decoder.allowed(fed.problem, add(state.x, scale(server_lr, change)))
        kept = None if state.memory is None else cohort.put(state.memory, out[2])
        if self.decoder.alike:
            return Separated(x, self._decoded(fed, x, shared), kept), {}
        return Separated(x, cohort.put(state.y, out[1]) if self.decoder.shown else (), kept), {}

    def solution(self, state: Separated) -> tuple[PyTree, PyTree]:
        # What a warm decoder remembers is what it decoded.
        return state.x, state.memory if self.decoder.warm else state.y
