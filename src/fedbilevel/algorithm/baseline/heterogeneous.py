"""Model-heterogeneous federated learning: every client trains the part of the model that it can hold."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.algorithm.base import Algorithm, Info, check_learns_y, check_lengths, decides
from fedbilevel.algorithm.baseline.coordinate_rule import LargestForward, PruneAndGrow, Sensitive
from fedbilevel.algorithm.baseline.mask_rule import (
    KernelRule,
    Leading,
    MaskRule,
    Parts,
    Random,
    Rolling,
    Train,
)
from fedbilevel.data.clients import Clients
from fedbilevel.fed.codec import Partial
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.place import Kept
from fedbilevel.local.learn import Learn
from fedbilevel.local.optimizer import Optimizer, optimizer
from fedbilevel.local.work import Amount, amount, check_amounts
from fedbilevel.number import check_count, whole
from fedbilevel.problem.base import Problem
from fedbilevel.problem.submodel import Kernels, Ratios, described, kernels_in, ratios_setting, widths
from fedbilevel.tree import PyTree


class WholeModel(NamedTuple):
    """Both variables, the whole model y among them; what clients keep; and how many rounds were made."""

    x: PyTree
    y: PyTree
    memory: Kept | None
    time: jax.Array


class Heterogeneous(Algorithm[WholeModel]):
    """Clients train parts of the model y on `f_i(x0, ·)`; every number is averaged over those that held it.

        θ_i = I steps of the optimiser on f_i from m_i ⊙ y      y ← y + Σ m_i ⊙ (θ_i − y) / Σ m_i

    where m_i is client i's mask of zeros and ones (numbers that nobody held stay), weighted if clients are.
    The rule that chooses the masks is all that differs between the methods: `HeteroFL`, `FederatedDropout`,
    `FedRolex`, `Homogeneous`, `ZeroFL`, `FedDST` and `Flash` are this with a rule. At the same width ratio ρ
    all hold the same number of parameters. With ρ = 1 for all it is FedAvg.

    Args:
        learn: the optimiser of the local steps, such as `fedbilevel.Adam(1e-4)`; it starts anew in a round.
        rule: which part a client holds.
        ratios: ρ, the share of the kernels of every layer that a client holds: one number, a tuple with one
            for each client, or "random": each client's is drawn once from 1, 1/2, 1/4, 1/8, 1/16.
        ratio_seed: draws them.
        learn_steps: I; a number, or a tuple with one for each client.
        average: "holders", as above, or "all": the sum is divided by the number of all clients of the cohort.
        cohort: clients in a round; None: all.
        kernels: of the parameters y0; None: found in the problem's upper objective, if its model is one that
            can be sliced, such as `ResNet18` or `FourLayerCNN`.
        narrow: train the small model itself, with ρ² of the arithmetic, in the place of the whole one times a
            mask: the same to rounding, and faster where clients are computed one at a time
            (`Simulator(chunk=1)`, and every client that is a process of its own), at the price of a program
            for every width. Only where whole kernels are held.

    Cost a round and client: one exchange, I calls of f_y; x and the client's part of y down, that part up:
    `kernels.cost(ρ)["bytes"]`, about ρ² of the whole. Where single weights are held (see the rules), one bit
    for each weight of the model says which they are.
    """

    learn: Optimizer = eqx.field(converter=optimizer)
    rule: MaskRule
    ratios: Ratios = eqx.field(static=True, converter=ratios_setting, default="random")
    ratio_seed: int = eqx.field(static=True, converter=whole, default=0)
    learn_steps: Amount = eqx.field(static=True, converter=amount, default=5)
    average: Literal["holders", "all"] = eqx.field(static=True, default="holders")
    cohort: int | None = eqx.field(static=True, converter=whole, default=None)
    kernels: Kernels | None = eqx.field(static=True, default=None)
    narrow: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        check_amounts(self, "learn_steps")
        if self.narrow and not isinstance(self.rule, KernelRule):
            raise ValueError(
                "narrow is True, but this method holds single weights, which make no small model"
            )
        if self.average not in ("holders", "all"):
            raise ValueError(f'average is {self.average!r}; it must be "holders" or "all"')

    def _train(self, fed: Federation, time: Any) -> Train:
        kernels = kernels_in(fed.problem) if self.kernels is None else self.kernels
        parts = Parts(kernels, widths(self.ratios, fed.n, self.ratio_seed))
        return Train(self.rule, parts, Learn(self.learn, self.learn_steps), time, self.narrow)

    def remarks(self, problem: Problem, clients: Clients) -> tuple[str, ...]:
        """What the clients' models cost. Of single weights there are as many, whose FLOPs depend on which."""
        shape = clients.input_shape("upper") if isinstance(self.rule, KernelRule) else None
        kernels = kernels_in(problem, shape) if self.kernels is None else self.kernels
        return described(kernels, widths(self.ratios, clients.n, self.ratio_seed))

    def init(self, fed: Federation, key: jax.Array) -> WholeModel:
        check_learns_y(fed.problem)
        check_lengths(self, fed.n)
        work = self._train(fed, 0)
        y, memory = self.rule.first(fed, work.parts, work, key)
        return WholeModel(fed.problem.constraint(fed.problem.x0), y, memory, jnp.zeros((), jnp.int32))

    def step(self, fed: Federation, state: WholeModel, key: jax.Array) -> tuple[WholeModel, Info]:
        k_cohort, k_train = jr.split(key)
        cohort, work = fed.cohort(k_cohort, self.cohort), self._train(fed, state.time)
        down, up = Partial(self.rule.down(work.parts)), Partial(self.rule.up(work.parts))
        memory = cohort.agreed(()) if state.memory is None else cohort.take(state.memory)
        there = cohort.send(state.x, "x"), cohort.send(state.y, "y", codec=down), memory
        out = cohort.run(work, *there, key=k_train)
        y = self._averaged(state.y, cohort.mean(out[0], "y", codec=up))
        kept = None if state.memory is None else cohort.put(state.memory, out[1])
        return WholeModel(state.x, y, kept, state.time + 1), {}

    def _averaged(self, y: PyTree, mean: PyTree) -> PyTree:
        def new(y: jax.Array, theta: jax.Array, held: jax.Array) -> jax.Array:
            share = jnp.where(held > 0, held, 1) if self.average == "holders" else 1
            return y + (theta - held * y) / share

        return jax.tree.map(new, y, mean["y"], mean["held"])

    def solution(self, state: WholeModel) -> tuple[PyTree, PyTree]:
        return state.x, state.y


@decides("rule")
def HeteroFL(learn: Any, **options: Any) -> Heterogeneous:
    """Every client holds the first ρ of the kernels of every layer, always: see `Heterogeneous`.

    Small models are parts of large ones, so the first kernels are trained by all and the last by the largest
    clients only.

    Reference: E. Diao, J. Ding, V. Tarokh, HeteroFL: computation and communication efficient federated
    learning for heterogeneous clients, ICLR 2021.
    """
    return Heterogeneous(learn, Leading(), **options)


@decides("rule")
def FederatedDropout(learn: Any, **options: Any) -> Heterogeneous:
    """Every client draws ρ of the kernels of every layer, anew in every round: see `Heterogeneous`.

    Reference: S. Caldas et al., Expanding the reach of federated learning by reducing client resource
    requirements, arXiv:1812.07210, 2018 (one ratio for all clients there, and a lossy codec, left out here).
    """
    return Heterogeneous(learn, Random(), **options)


@decides("rule")
def FedRolex(learn: Any, **options: Any) -> Heterogeneous:
    """Every client holds a window of ρ of the kernels, which moves on by one a round: see `Heterogeneous`.

    In as many rounds as a layer has kernels, each is held equally often by every client.

    Reference: S. Alam, L. Liu, M. Yan, M. Zhang, FedRolex: model-heterogeneous federated learning with
    rolling sub-model extraction, NeurIPS 2022.
    """
    return Heterogeneous(learn, Rolling(), **options)


@decides("rule", "ratios")
def Homogeneous(learn: Any, ratio: float = 1.0, **options: Any) -> Heterogeneous:
    """FedAvg on a model of one width for all; the rest of y is zero: see `Heterogeneous`.

    Args:
        learn, **options: as for `Heterogeneous`.
        ratio: ρ of all clients; in FedSep's table 1 is the "largest" and 1/16 the "smallest".
    """
    return Heterogeneous(learn, Leading(), ratio, **options)


@decides("rule")
def ZeroFL(learn: Any, **options: Any) -> Heterogeneous:
    """The loss sees the largest weights of every layer only, all are trained, the largest are sent.

    Simplified: backward passes use dense activations (the paper's are sparse, which saves arithmetic, not
    traffic); what is sent are the largest weights ("top-K weights"); the whole model comes down, which a
    client needs to train all weights.

    Reference: X. Qiu et al., ZeroFL: efficient on-device training for federated learning with local sparsity,
    ICLR 2022.
    """
    return Heterogeneous(learn, LargestForward(), **options)


@decides("rule")
def FedDST(
    learn: Any, regrown: float = 0.1, until: int = 1000, every: int = 10, **options: Any
) -> Heterogeneous:
    """Own sparse masks, of which the smallest weights are exchanged for those of the largest slope.

    Simplified: masks start random with the same density as a narrow model, not by the Erdős–Rényi kernel
    rule; they are exchanged before a client's steps, not between them, by the slope of one minibatch (one
    call of f_y more, in every round); weights that are new start at zero; every client keeps its own mask,
    there is none of the server.

    Args:
        learn, **options: as for `Heterogeneous`.
        regrown: the share of the held weights that is exchanged at first; it falls to 0 as half a cosine.
        until: the round from which on masks stay.
        every: rounds between two exchanges.

    Reference: S. Bibikar, H. Vikalo, Z. Wang, X. Chen, Federated dynamic sparse training: computing less,
    communicating less, yet learning better, AAAI 2022.
    """
    check_count("until", until)
    check_count("every", every)
    return Heterogeneous(learn, PruneAndGrow(regrown, until, every), **options)


@decides("rule")
def Flash(learn: Any, warm_steps: int = 10, warm_cohort: int | None = None, **options: Any) -> Heterogeneous:
    """Fixed sparse masks, whose density in every layer is what clients found it to need in a warm-up.

    Some clients train the whole model for some steps before the first round, and report how the largest of
    its weights divide among the layers; the server averages models and shares, and holds the largest weights
    of every layer in those shares. The warm-up costs each of them a whole model each way; every client gets a
    mask, once: one bit for each weight.

    Simplified: the warm-up trains densely (the paper's clients already search a sparse model); the masks stay
    (its variant with masks that are fixed after the first stage).

    Args:
        learn, **options: as for `Heterogeneous`.
        warm_steps: steps of the warm-up.
        warm_cohort: clients that make it, drawn at random; None: all.

    Reference: S. Babakniya et al., Federated sparse training: lottery aware model compression for resource
    constrained edge, arXiv:2208.13092, 2022.
    """
    check_count("warm_steps", warm_steps)
    if warm_cohort is not None:
        check_count("warm_cohort", warm_cohort)
    return Heterogeneous(learn, Sensitive(warm_steps, warm_cohort), **options)
