"""What an experiment file can name: every kind of thing, by its name in the Python API.

A new method, problem or partition is one line here (and one in `citation.py`, if it has a reference).
"""

from __future__ import annotations

import dataclasses
import inspect
import traceback
import typing
from collections.abc import Callable, Mapping
from typing import Any

import optax

from fedbilevel import adjoint, algorithm, local, problem
from fedbilevel.data import partition, random_shares, split
from fedbilevel.data.source import SOURCES
from fedbilevel.engine import conditions
from fedbilevel.experiment.best import Best
from fedbilevel.experiment.engines import ENGINES
from fedbilevel.fed import links
from fedbilevel.name import nearest
from fedbilevel.portable import PortableError, imported
from fedbilevel.problem import cleaning, convolution, fairness, few_shot, loss_tuning, model, representation

Factory = Callable[..., Any]


SURROUNDINGS = (
    *("key", "seed", "inputs", "classes", "clients"),
    *("test", "balance", "samples", "truth", "public"),
)
"""Arguments of a problem or method that the data or the run decide, if the file does not."""


class ConfigError(ValueError):
    """An experiment file, or an option of the command line, cannot be understood."""


def _piecewise_constant(init_value: float, boundaries_and_scales: Mapping[str, float]) -> Any:
    """A step size that is multiplied by a factor at certain steps: optax's, with the keys of a TOML table.

    Args:
        init_value: the first value.
        boundaries_and_scales: step -> factor, such as `{ 500 = 0.1, 550 = 0.1 }`.
    """
    try:
        table = {int(step): factor for step, factor in boundaries_and_scales.items()}
    except (AttributeError, ValueError):
        raise ConfigError(
            f"boundaries_and_scales is {boundaries_and_scales!r}; it must be a table such as {{ 500 = 0.1 }}"
        ) from None
    return optax.piecewise_constant_schedule(init_value, table)


ALGORITHMS: Mapping[str, Factory] = {
    "FedNest": algorithm.FedNest,
    "FedNestSGD": algorithm.FedNestSGD,
    "LFedNest": algorithm.LFedNest,
    "LFedNestSVRG": algorithm.LFedNestSVRG,
    "LFedNestNonAlt": algorithm.LFedNestNonAlt,
    "FedBiO": algorithm.FedBiO,
    "FedBiOLocal": algorithm.FedBiOLocal,
    "FedBiOAcc": algorithm.FedBiOAcc,
    "FedBiOAccLocal": algorithm.FedBiOAccLocal,
    "FedMBO": algorithm.FedMBO,
    "AggITD": algorithm.AggITD,
    "SimFBO": algorithm.SimFBO,
    "ShroFBO": algorithm.ShroFBO,
    "FedMSA": algorithm.FedMSA,
    "F2SA": algorithm.F2SA,
    "SOBA": algorithm.SOBA,
    "StocBiO": algorithm.StocBiO,
    "MRBO": algorithm.MRBO,
    "CommFedBiO": algorithm.CommFedBiO,
    "FedAvg": algorithm.FedAvg,
    "FedAvgS": algorithm.FedAvgS,
    "FedGDAGT": algorithm.FedGDAGT,
    "QFFL": algorithm.QFFL,
    "Local": algorithm.Local,
    "FedProx": algorithm.FedProx,
    "FedAvgPlus": algorithm.FedAvgPlus,
    "PFedMe": algorithm.PFedMe,
    "ClusteredFL": algorithm.ClusteredFL,
    "FedEM": algorithm.FedEM,
    "FedSep": algorithm.FedSep,
    "CompressedFedAvg": algorithm.CompressedFedAvg,
    "FetchSGD": algorithm.FetchSGD,
    "HeteroFL": algorithm.HeteroFL,
    "FederatedDropout": algorithm.FederatedDropout,
    "FedRolex": algorithm.FedRolex,
    "Homogeneous": algorithm.Homogeneous,
    "ZeroFL": algorithm.ZeroFL,
    "FedDST": algorithm.FedDST,
    "Flash": algorithm.Flash,
    "FedDF": algorithm.FedDF,
    "DSFL": algorithm.DSFL,
    "FedET": algorithm.FedET,
    "SGP": algorithm.SGP,
    "PDBO": algorithm.PDBO,
    "DSOBA": algorithm.DSOBA,
    "MADSBO": algorithm.MADSBO,
}

PROBLEMS: Mapping[str, Factory] = {
    "HyperRepresentation": representation.HyperRepresentation,
    "LossTuning": loss_tuning.LossTuning,
    "DataCleaning": cleaning.DataCleaning,
    "FairClients": fairness.FairClients,
    "AgnosticClients": fairness.AgnosticClients,
    "FewShot": few_shot.FewShot,
    "Classification": problem.Classification,
    "ServerModel": problem.ServerModel,
    "ClassWeights": problem.ClassWeights,
    "Mixture": problem.Mixture,
    "WeightedMixture": problem.WeightedMixture,
    "PersonalLayers": problem.PersonalLayers,
    "Interpolation": problem.Interpolation,
    "Quadratic": problem.Quadratic.random,
    "Saddle": problem.Saddle.random,
    "Composition": problem.Composition.random,
    "Nonconvex": problem.Nonconvex.random,
}

MODELS: Mapping[str, Factory] = {
    "MLP": model.MLP,
    "Linear": model.Linear,
    "ConvNet": convolution.ConvNet,
    "TwoLayerCNN": convolution.TwoLayerCNN,
    "MobileNetV2": problem.MobileNetV2,
    "CharLSTM": problem.CharLSTM,
    "FourLayerCNN": problem.FourLayerCNN,
    "SlicedMLP": problem.SlicedMLP,
    "ResNet": problem.ResNet,
    "ResNet18": problem.ResNet18,
}

PARTITIONS: Mapping[str, Factory] = {
    kind.__name__: kind
    for kind in (
        partition.Iid,
        partition.Shards,
        partition.ClassesPerClient,
        random_shares.Dirichlet,
        random_shares.Pachinko,
        partition.Natural,
        random_shares.QuantitySkew,
    )
}

CONSTRAINTS: Mapping[str, Factory] = {
    "Simplex": problem.Simplex,
    "Box": problem.Box,
    "Positive": problem.Positive,
}

SCHEDULES: Mapping[str, Factory] = {
    name: getattr(optax, name)
    for name in (
        "constant_schedule",
        "cosine_decay_schedule",
        "exponential_decay",
        "linear_schedule",
        "polynomial_schedule",
        "warmup_cosine_decay_schedule",
    )
} | {"piecewise_constant_schedule": _piecewise_constant}

LINKS: Mapping[str, Factory] = {
    "Complete": links.Complete,
    "Ring": links.Ring,
    "ErdosRenyi": links.ErdosRenyi,
    "Stochastic": links.Stochastic,
    "Given": links.Given,
}

OPTIMIZERS: Mapping[str, Factory] = {"Adam": local.Adam, "SGD": local.SGD, "PerBlock": local.PerBlock}

DECODERS: Mapping[str, Factory] = {
    "GradientDecoder": local.GradientDecoder,
    "SketchLasso": local.SketchLasso,
    "LinearSketch": local.LinearSketch,
    "Submodel": local.Submodel,
    "EachDecoder": local.EachDecoder,
}

ADJOINTS: Mapping[str, Factory] = {
    "HGP": adjoint.HGP,
    "VRHGP": adjoint.VRHGP,
    "RecurrentBackpropagation": adjoint.RecurrentBackpropagation,
    "ITD": algorithm.ITD,
}

CONDITIONS: Mapping[str, Factory] = {
    "Bernoulli": conditions.Bernoulli,
    "OnOff": conditions.OnOff,
    "DayNight": conditions.DayNight,
    "Trace": conditions.Trace,
    "Speed": conditions.Speed,
    "Link": conditions.Link,
    "LogNormal": conditions.LogNormal,
}

PARTS: Mapping[str, Factory] = {
    "Split": split.Split,
    "LongTail": split.LongTail,
    "LabelNoise": split.LabelNoise,
    "Best": Best,
}


def _itself(word: str) -> Factory:
    """What a word stands for that a setting knows itself, in the place of a table."""
    return lambda: word


WORDS: Mapping[str, Factory] = {word: _itself(word) for word in ("first", "last")}
"""Of PDBO's inner step sizes."""

INSIDE: Mapping[str, Mapping[str, Factory]] = {
    "partition": PARTITIONS,
    "constraint": CONSTRAINTS,
    "links": LINKS,
    "adjoint": ADJOINTS,
    "decoder": DECODERS,
    **dict.fromkeys(("learn", "distil"), OPTIMIZERS),
    **dict.fromkeys(("availability", "speed", "link"), CONDITIONS),
    **dict.fromkeys(("model", "backbone", "head"), MODELS),
    **dict.fromkeys(("lr", "upper_lr", "lower_lr"), SCHEDULES),
    "adjoint_lr": {**SCHEDULES, **WORDS},
}
"""What the table of a certain name inside another one may be."""

NESTED: Mapping[str, Factory] = {
    **MODELS,
    **PARTITIONS,
    **CONSTRAINTS,
    **SCHEDULES,
    **OPTIMIZERS,
    **DECODERS,
    **CONDITIONS,
    **PARTS,
}
"""What any other table inside a table may be."""

GROUPS: Mapping[str, Mapping[str, Any]] = {
    "algorithms": ALGORITHMS,
    "problems": PROBLEMS,
    "models": MODELS,
    "data": SOURCES,
    "partitions": PARTITIONS,
    "engines": ENGINES,
    "schedules": SCHEDULES,
    "constraints": CONSTRAINTS,
    "links": LINKS,
    "optimizers": OPTIMIZERS,
    "adjoints": ADJOINTS,
    "decoders": DECODERS,
    "conditions": CONDITIONS,
    "parts": PARTS,
}
"""What `fedbilevel list` shows."""


def find(kind: Any, group: Mapping[str, Factory], what: str) -> Factory:
    """A factory by name; `module:name` is one of your own."""
    if isinstance(kind, str) and kind in group:
        return group[kind]
    if isinstance(kind, str) and ":" in kind:
        return _own(kind)
    raise ConfigError(
        f"there is no {what} {kind!r}{nearest(kind, group) or '.'} There are: {', '.join(group)}; "
        "or `module:name` for one of your own."
    )


def _own(kind: str) -> Factory:
    """What `module:name` names; whatever goes wrong in that module is said with its place."""
    try:
        return imported(kind)
    except PortableError as error:
        raise ConfigError(f"{kind!r} cannot be imported: {error}") from None
    except (Exception, SystemExit) as error:
        searched = error.name if isinstance(error, ModuleNotFoundError) else ":"
        missing = kind.startswith((f"{searched}:", f"{searched}."))
        why = f"{error}. {_SEARCHED}" if missing else f"{type(error).__name__}: {error}{_place(error)}"
        raise ConfigError(f"{kind!r} cannot be imported: {why}") from None


_SEARCHED = (
    "It is looked for in the current folder, beside the experiment file that a command names, and on "
    "PYTHONPATH; `resume` knows of no file, and needs one of the others"
)


def _place(error: BaseException) -> str:
    """Where in a user's module something went wrong; a syntax error says it itself."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    known = not isinstance(error, SyntaxError) and bool(frames)
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if known else ""


def types_of(factory: Factory) -> dict[str, Any]:
    """The annotations of a factory, and of the class that it makes."""
    try:
        own = typing.get_type_hints(factory)
    except (NameError, TypeError):  # a factory of one's own may be annotated as it likes, or not at all
        return {}
    made = factory if isinstance(factory, type) else own.get("return")
    return {**(typing.get_type_hints(made) if isinstance(made, type) else {}), **own}


def parameters(factory: Factory) -> dict[str, inspect.Parameter]:
    """The arguments of a factory by name; `**options` stand for the optional ones of the class it makes.

    Example:
        >>> "cohort" in parameters(algorithm.LFedNest)
        True
    """
    found = dict(inspect.signature(factory).parameters)
    open_ended = [name for name, p in found.items() if p.kind is inspect.Parameter.VAR_KEYWORD]
    for name in open_ended:
        del found[name]
        made = types_of(factory).get("return")
        if isinstance(made, type) and dataclasses.is_dataclass(made):
            theirs = inspect.signature(made).parameters.items()  # what they need, the factory gives them
            found = {**{name: p for name, p in theirs if p.default is not inspect.Parameter.empty}, **found}
    decided = getattr(factory, "decided", ())
    return {name: p for name, p in found.items() if name not in decided}
