"""Federated learning by distillation: what clients' models say about public samples teaches the others."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from fedbilevel.algorithm.base import Algorithm, Info, check_learns_y, check_lengths, decides
from fedbilevel.algorithm.baseline.consensus import Confident, Consensus, MeanLogits, SharpMean
from fedbilevel.algorithm.baseline.heterogeneous import Heterogeneous
from fedbilevel.algorithm.baseline.mask_rule import Leading, Train
from fedbilevel.data.clients import Clients
from fedbilevel.fed.codec import Partial
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.loop import repeat
from fedbilevel.fed.place import Kept
from fedbilevel.fed.program import Program
from fedbilevel.local.optimizer import Optimizer, optimizer
from fedbilevel.local.work import Amount, amount, check_amounts
from fedbilevel.name import check_choice
from fedbilevel.number import check_count, whole
from fedbilevel.problem.accuracy import Classifier, CrossEntropy
from fedbilevel.problem.base import Problem, ProblemError
from fedbilevel.problem.classification import InBlocks
from fedbilevel.problem.oracle import Client
from fedbilevel.problem.submodel import Kernels, Ratios, ratios_setting
from fedbilevel.tree import PyTree, copies, times


def _samples(public: Any) -> Any:
    """Public samples as an array."""
    if hasattr(public, "dtype"):
        return jnp.asarray(public)
    try:
        return jnp.asarray(np.asarray(public, float))
    except (TypeError, ValueError):
        kind = type(public).__name__
        raise ValueError(
            f"public is a {kind}; it must be an array (samples, *inputs), such as `fb.data.set_aside` gives"
        ) from None


class TrainAndTell(Program):
    """`(x, y, public) ↦ ({"y": θ, "held": mask}, what is sent of θ's logits on the public samples)`."""

    train: Train
    classifier: Classifier
    consensus: Consensus

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y, public = values
        trained, _ = self.train(me, x, y, ())
        part, theta = self.train.part(me), trained["y"]

        def logits(y: PyTree) -> jax.Array:
            return self.classifier(x, y, public)

        return trained, self.consensus.sent(logits(theta) if part is None else part.small(logits, theta))


class Distil(Program):
    """`(x, y, held, public, target) ↦ y`: steps of an optimiser on what `mismatch` says of y's logits.

    Only numbers that are held move. Every step draws so many public samples; None: it takes all. What the
    client holds is that of its training (`train`), and may be taught as a small model.
    """

    learn: Optimizer
    classifier: Classifier
    steps: int = eqx.field(static=True, converter=whole)
    batch: int | None = eqx.field(static=True, converter=whole)
    train: Train

    def __call__(self, me: Client, *values: Any) -> PyTree:
        x, y, held, *rest = values
        part = self.train.part(me)
        if part is None:
            return self.taught(me.key, x, y, held, *rest)
        return part.trained(lambda small: self.taught(me.key, x, small, _ones(small), *rest), y)

    def taught(self, key: jax.Array, *values: Any) -> PyTree:
        """y after the steps."""
        x, y, held, public, target = values

        def body(index: Any, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            rows = self._rows(jr.fold_in(key, index), public.shape[0])
            slope = jax.grad(lambda y: mismatch(self.classifier(x, y, public[rows]), target[rows]))(carry[0])
            return self.learn.step(carry[0], times(held, slope), carry[1])

        taught, _ = repeat(self.steps, body, (y, self.learn.init(y)))
        return taught

    def _rows(self, key: jax.Array, samples: int) -> Any:
        return slice(None) if self.batch is None else jr.permutation(key, samples)[: self.batch]


def mismatch(
    logits: Float[Array, "samples classes"], target: Float[Array, "samples classes"]
) -> Float[Array, ""]:
    """`−mean_s Σ_c target_sc log softmax(logits_s)_c`: up to a constant, the KL divergence from a target."""
    return -jnp.mean(jnp.sum(target * jax.nn.log_softmax(logits), axis=-1))


class Taught(NamedTuple):
    """Both variables, the server's model y among them, and the models that clients keep, if they do."""

    x: PyTree
    y: PyTree
    models: Kept | None


class Distillation(Algorithm[Taught]):
    """Clients train models of their own width; a consensus on public samples teaches the server's model y.

        θ_i = I steps of the optimiser on f_i(x0, ·) from m_i ⊙ y  (or from the client's own model)
        target = consensus of the logits of all θ_i on the public samples
        y ← D steps of the server's optimiser on  −mean_s Σ_c target_sc log softmax(logits_s(y))_c

    where m_i holds the first ρ_i of the kernels of every layer, as in `HeteroFL`. `FedDF`, `DSFL` and `FedET`
    are this with a consensus, and with or without models that travel. The public samples have no labels, and
    everybody has them before the first round. All kernels of y are taught, those that no client holds, too.

    Args:
        learn: the optimiser of clients' steps on their own data; it starts anew in a round.
        distil: the optimiser of the steps on public samples; it starts anew in a round.
        public: `(samples, *inputs)`, the public samples.
        consensus: what clients send, and the target that is made of it.
        exchange: "models": clients begin with their part of y, send it back, and it is averaged over those
            that hold it before the server distils. "logits": clients keep their models, which start as
            parts of y0; the target is sent to them, and they distil, too; no model ever travels.
        ratios, ratio_seed: ρ, the widths of clients, as for `Heterogeneous`.
        learn_steps: I; a number, or a tuple with one for each client.
        distil_steps: D, of the server and, if they distil, of the clients.
        distil_batch: public samples of a step; None: all.
        cohort: clients in a round; None: all.
        kernels: of the parameters y0; None: found in the problem's upper objective.
        narrow: clients compute with their small models themselves, as for `Heterogeneous`.
        classifier: `(x, y, inputs) ↦ logits`; None: that of the problem's upper objective, which must be a
            `CrossEntropy`.

    Cost a round and client, with P public samples and C classes: I calls of f_y, and P·C scalars up. For
    "models" two exchanges: x and the client's part of y down, that part up, and the logits; for "logits" one:
    P·C scalars down as well. Steps on public samples are no calls of the clients' oracles, and not counted.
    """

    learn: Optimizer = eqx.field(converter=optimizer)
    distil: Optimizer = eqx.field(converter=optimizer)
    public: jax.Array = eqx.field(converter=_samples)
    consensus: Consensus = eqx.field(default_factory=MeanLogits)
    exchange: Literal["models", "logits"] = eqx.field(static=True, default="models")
    ratios: Ratios = eqx.field(static=True, converter=ratios_setting, default="random")
    ratio_seed: int = eqx.field(static=True, converter=whole, default=0)
    learn_steps: Amount = eqx.field(static=True, converter=amount, default=5)
    distil_steps: int = eqx.field(static=True, converter=whole, default=5)
    distil_batch: int | None = eqx.field(static=True, converter=whole, default=None)
    cohort: int | None = eqx.field(static=True, converter=whole, default=None)
    kernels: Kernels | None = eqx.field(static=True, default=None)
    classifier: Classifier | None = None
    narrow: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        check_amounts(self, "learn_steps")
        check_count("distil_steps", self.distil_steps)
        check_choice("exchange", self.exchange, ("models", "logits"))
        samples = self.public.shape[0] if self.public.ndim > 1 else 0
        if not samples:
            raise ValueError(
                f"public has the shape {self.public.shape}; it must be (samples, *inputs), with a sample"
            )
        if self.distil_batch is not None and not 1 <= self.distil_batch <= samples:
            raise ValueError(
                f"distil_batch is {self.distil_batch}, but there are {samples} public samples: it must be "
                f"between 1 and {samples}, or None for all of them"
            )

    # ------------------------------------------------------------ what is done

    @property
    def _parts(self) -> Heterogeneous:
        """Training and averaging of parts of a model."""
        settings = (self.ratios, self.ratio_seed, self.learn_steps)
        return Heterogeneous(self.learn, Leading(), *settings, kernels=self.kernels, narrow=self.narrow)

    def _programs(self, fed: Federation) -> tuple[TrainAndTell, Distil]:
        classifier = _classifier(fed.problem) if self.classifier is None else self.classifier
        # All public samples are looked at: what a convolution makes of them at once does not fit into memory.
        train = self._parts._train(fed, 0)
        tell = TrainAndTell(train, InBlocks(classifier), self.consensus)
        return tell, Distil(self.distil, classifier, self.distil_steps, self.distil_batch, train)

    def remarks(self, problem: Problem, clients: Clients) -> tuple[str, ...]:
        """What the clients' models cost."""
        return self._parts.remarks(problem, clients)

    def init(self, fed: Federation, key: jax.Array) -> Taught:
        check_learns_y(fed.problem)
        check_lengths(self, fed.n)
        x, y = fed.problem.constraint(fed.problem.x0), fed.problem.y0
        return Taught(x, y, fed.keep(copies(y, fed.n)) if self.exchange == "logits" else None)

    def step(self, fed: Federation, state: Taught, key: jax.Array) -> tuple[Taught, Info]:
        k_cohort, k_train, k_distil, k_server = jr.split(key, 4)
        cohort, (tell, distil) = fed.cohort(k_cohort, self.cohort), self._programs(fed)
        if state.models is None:
            y, target = self._with_models(cohort, tell, state, k_train)
            models = None
        else:
            y, (models, target) = state.y, self._with_logits(cohort, tell, distil, state, (k_train, k_distil))
        y = distil.taught(k_server, state.x, y, _ones(y), self.public, target)
        return Taught(state.x, y, models), {}

    def _with_models(
        self, cohort: Cohort, tell: TrainAndTell, state: Taught, key: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        """The mean of what clients trained, and the target."""
        part = Partial(tell.train.parts.bytes())
        there = cohort.send(state.x, "x"), cohort.send(state.y, "y", codec=part), cohort.agreed(self.public)
        out = cohort.run(tell, *there, key=key)
        y = self._parts._averaged(state.y, cohort.mean(out[0], "y", codec=part))
        return y, self.consensus.target(cohort, out[1])

    def _with_logits(
        self,
        cohort: Cohort,
        tell: TrainAndTell,
        distil: Distil,
        state: Taught,
        keys: tuple[jax.Array, jax.Array],
    ) -> tuple[Kept, jax.Array]:
        """What clients keep after they, too, distilled, and the target."""
        assert state.models is not None
        x, public = cohort.agreed(state.x), cohort.agreed(self.public)
        out = cohort.run(tell, x, cohort.take(state.models), public, key=keys[0])
        target = self.consensus.target(cohort, out[1])
        theta, held, told = out[0]["y"], out[0]["held"], cohort.send(target, "logits")
        taught = cohort.run(distil, x, theta, held, public, told, key=keys[1])
        return cohort.put(state.models, taught), target

    def solution(self, state: Taught) -> tuple[PyTree, PyTree]:
        return state.x, state.y


def _ones(y: PyTree) -> PyTree:
    """All of y is held."""
    return jax.tree.map(jnp.ones_like, y)


def _classifier(problem: Problem) -> Classifier:
    if not isinstance(problem.upper, CrossEntropy):
        raise ProblemError(
            f"the upper objective is a {type(problem.upper).__name__}, which does not say what the logits "
            "are: use a problem such as fedbilevel.Classification, or give classifier="
        )
    return problem.upper.classifier


@decides("consensus", "exchange")
def FedDF(learn: Any, distil: Any, public: Any, **options: Any) -> Distillation:
    """The average model learns what the clients' mean logits say of public samples: see `Distillation`.

    Simplified: one model of the server, of which clients hold parts (the paper has one for every
    architecture, taught by all); a fixed number of steps, without early stopping on validation data; clients
    evaluate their models on the public samples and send the logits, where the paper's server does so itself
    with the models that it was sent: the same numbers, and P·C scalars more that are billed.

    Args:
        learn, distil, public, **options: as for `Distillation`.

    Reference: T. Lin, L. Kong, S. U. Stich, M. Jaggi, Ensemble distillation for robust model fusion in
    federated learning, NeurIPS 2020.
    """
    return Distillation(learn, distil, public, MeanLogits(), "models", **options)


@decides("consensus", "exchange")
def DSFL(learn: Any, distil: Any, public: Any, temperature: float = 0.1, **options: Any) -> Distillation:
    """Only probabilities on public samples travel; their sharpened mean teaches everybody.

        target = softmax(mean_i softmax(logits_i) / T)

    See `Distillation`. Simplified: all public samples are looked at in every round (the paper draws some).

    Args:
        learn, distil, public, **options: as for `Distillation`.
        temperature: T; the smaller, the less entropy is left.

    Reference: S. Itahara, T. Nishio, Y. Koda, M. Morikura, K. Yamamoto, Distillation-based semi-supervised
    federated learning for communication-efficient collaborative training with non-iid private data, IEEE
    Transactions on Mobile Computing 22(1), 2023.
    """
    return Distillation(learn, distil, public, SharpMean(temperature), "logits", **options)


@decides("consensus", "exchange")
def FedET(learn: Any, distil: Any, public: Any, diversity: float = 0.05, **options: Any) -> Distillation:
    """The clients that are sure decide the label of a public sample; those that disagree are heard a little.

    See `Distillation` and `Confident`, the consensus. Simplified: clients hold parts of the server's model
    (the paper's have architectures of their own, and get only the representation layers of the server's),
    so that its part is averaged, too, before the server distils.

    Args:
        learn, distil, public, **options: as for `Distillation`.
        diversity: λ, the weight of what those say that disagree.

    Reference: Y. J. Cho, A. Manoel, G. Joshi, R. Sim, D. Dimitriadis, Heterogeneous ensemble knowledge
    transfer for training large models in federated learning, IJCAI 2022.
    """
    return Distillation(learn, distil, public, Confident(diversity), "models", **options)
