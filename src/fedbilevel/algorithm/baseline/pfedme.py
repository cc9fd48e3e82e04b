"""pFedMe: personal models near a common one, by Moreau envelopes."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.random as jr

from fedbilevel.algorithm.base import Algorithm, Info, check_lengths, with_server
from fedbilevel.algorithm.baseline.local import first_own
from fedbilevel.data.batches import Batch
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.links import Complete, Links
from fedbilevel.fed.loop import repeat
from fedbilevel.fed.place import Kept
from fedbilevel.fed.program import Program
from fedbilevel.local.work import Amount, Work, amount, check_amounts
from fedbilevel.number import check_count, check_not_negative, whole
from fedbilevel.problem.oracle import Client
from fedbilevel.schedule import Rate, rate
from fedbilevel.tree import PyTree, add, scale, step, sub


class Moreau(NamedTuple):
    """x at the clients, the server's w, and every client's own θ."""

    x: Kept
    w: PyTree
    theta: Kept


class MoreauSteps(Program):
    """`(x, w) ↦ (w_i, θ_i)`: local steps on the Moreau envelope of g_i; see `PFedMe`."""

    lower_lr: Any
    outer_lr: Any
    lam: Any
    inner_steps: int = eqx.field(static=True, converter=whole)
    work: Work

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, start = values

        def body(batch: Batch, factor: Any, carry: Any) -> Any:
            w, theta = carry

            def inner(index: Any, theta: PyTree) -> PyTree:
                pull = scale(self.lam, sub(theta, w))
                return step(theta, self.lower_lr, add(me.g_y(x, theta, batch), pull))

            theta = repeat(self.inner_steps, inner, theta)
            return step(w, self.outer_lr * self.lam * factor, sub(w, theta)), theta

        return self.work.run(me, me.key, body, (start, start))


class PFedMe(Algorithm[Moreau]):
    """Every client has a model θ_i of its own, drawn to a common w; w minimises the mean Moreau envelope.

        min_w mean_i min_θ g_i(x0, θ) + (λ/2)‖θ − w‖²

    A step: the server sends w; every client starts at `w_i = θ_i = w` and repeats R times, each time on
    another batch

        θ_i ← θ_i − α (∇_y g_i(x0, θ_i) + λ (θ_i − w_i))      K times, on that one batch
        w_i ← w_i − η λ (w_i − θ_i)

    and the server takes `w ← (1 − β) w + β mean w_i`. θ_i goes on from batch to batch within a round.
    `result.y` has one row a client: the θ_i of the last round in which it took part.

    Args:
        lower_lr: α, step size for θ, below `2/(λ + the largest eigenvalue of H_i)`; a number or an optax
            schedule of the step.
        lam: λ; large: all models alike, small: every client by itself.
        inner_steps: K, steps on θ for each step of w_i.
        outer_lr: η, step size for w_i; `η λ` should not exceed 1 where R > 1 (with R = 1 it extrapolates,
            as β does).
        beta: β; 1 is the plain average, more extrapolates.
        steps: R, a number or a tuple with one for each client.
        epochs: shuffled passes over the data in the place of steps.
        cohort: clients in a round; None: all.
        links: must be complete, since it needs a server; others are refused with a `CannotRunError`.

    Cost a step and client: one exchange, `d_y` scalars each way, R K calls of g_y.

    Reference: C. T. Dinh, N. H. Tran, T. D. Nguyen, Personalized federated learning with Moreau envelopes,
    NeurIPS 2020, algorithm 1.
    """

    lower_lr: Rate = eqx.field(converter=rate)
    lam: Any = 15.0
    inner_steps: int = eqx.field(static=True, converter=whole, default=5)
    outer_lr: Rate = eqx.field(converter=rate, default=0.005)
    beta: Any = 1.0
    steps: Amount = eqx.field(static=True, converter=amount, default=1)
    epochs: Amount | None = eqx.field(static=True, converter=amount, default=None)
    cohort: int | None = eqx.field(static=True, converter=whole, default=None)
    links: Links = Complete()

    def __check_init__(self) -> None:
        check_amounts(self, "steps", "epochs")
        check_count("inner_steps", self.inner_steps)
        check_not_negative(self, "lam", "beta")

    def among(self, n: int) -> Any:
        return with_server(self, n)

    def init(self, fed: Federation, key: jax.Array) -> Moreau:
        check_lengths(self, fed.n)
        x, theta = first_own(fed)
        return Moreau(x, fed.problem.y0, theta)

    def step(self, fed: Federation, state: Moreau, key: jax.Array) -> tuple[Moreau, Info]:
        k_cohort, k_steps = jr.split(key)
        cohort, work = fed.cohort(k_cohort, self.cohort), Work("lower", self.steps, self.epochs)
        program = MoreauSteps(self.lower_lr, self.outer_lr, self.lam, self.inner_steps, work)
        out = cohort.run(program, cohort.take(state.x), cohort.send(state.w, "w"), key=k_steps)
        w = step(state.w, self.beta, sub(state.w, cohort.mean(out[0], "w")))
        return Moreau(state.x, w, cohort.put(state.theta, out[1])), {}

    def solution(self, state: Moreau) -> tuple[PyTree, PyTree]:
        return state.x, state.theta
