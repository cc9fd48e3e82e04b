"""What to cite: the BibTeX entries of the methods, problems and data that an experiment uses."""

from __future__ import annotations

import fnmatch
import importlib.resources
import re
from collections.abc import Iterable, Mapping

_ALWAYS = ("fedbilevel", "bradbury2018jax", "kidger2021equinox")

CITED: Mapping[str, tuple[str, ...]] = {
    # algorithms
    "FedNest": ("tarzanagh2022fednest",),
    "FedNestSGD": ("tarzanagh2022fednest",),
    "LFedNest": ("tarzanagh2022fednest",),
    "LFedNestSVRG": ("tarzanagh2022fednest",),
    "LFedNestNonAlt": ("tarzanagh2022fednest",),
    "FedBiO": ("li2023communication",),
    "FedBiOLocal": ("li2023communication",),
    "FedBiOAcc": ("li2023communication",),
    "FedBiOAccLocal": ("li2023communication",),
    "FedMBO": ("huang2023achieving",),
    "AggITD": ("xiao2023communication",),
    "SimFBO": ("yang2023simfbo",),
    "ShroFBO": ("yang2023simfbo",),
    "FedMSA": ("tarzanagh2023federated",),
    "F2SA": ("kwon2023fully",),
    "SOBA": ("dagreou2022framework",),
    "StocBiO": ("ji2021bilevel",),
    "MRBO": ("yang2021provably",),
    "CommFedBiO": ("li2022communication",),
    "FedAvg": ("mcmahan2017communication",),
    "FedAvgS": ("hou2021efficient", "deng2021local"),
    "FedGDAGT": ("sun2022communication",),
    "QFFL": ("li2020fair",),
    "FedProx": ("li2020federated",),
    "FedAvgPlus": ("jiang2019improving",),
    "PFedMe": ("dinh2020personalized",),
    "ClusteredFL": ("sattler2021clustered",),
    "FedEM": ("marfoq2021federated",),
    "FedSep": ("li2023resolving",),
    "CompressedFedAvg": ("stich2018sparsified", "alistarh2017qsgd"),
    "FetchSGD": ("rothchild2020fetchsgd",),
    "HeteroFL": ("diao2021heterofl",),
    "FederatedDropout": ("caldas2018expanding",),
    "FedRolex": ("alam2022fedrolex",),
    "ZeroFL": ("qiu2022zerofl",),
    "FedDST": ("bibikar2022federated",),
    "Flash": ("babakniya2022federated",),
    "FedDF": ("lin2020ensemble",),
    "DSFL": ("itahara2023distillation",),
    "FedET": ("cho2022heterogeneous",),
    "SGP": ("nedic2016stochastic", "assran2019stochastic"),
    "PDBO": ("terashita2022personalized",),
    "DSOBA": ("kong2024decentralized", "zhu2024sparkle", "nedic2017achieving", "yuan2019exact"),
    "MADSBO": ("chen2023decentralized",),
    # parts of algorithms
    "HGP": ("terashita2022personalized",),
    "VRHGP": ("terashita2022personalized",),
    "ITD": ("franceschi2017forward", "terashita2022personalized"),
    "ErdosRenyi": ("erdos1959random", "boyd2004fastest"),
    "GradientDecoder": ("li2023resolving",),
    "SketchLasso": ("li2023resolving",),
    "LinearSketch": ("li2023resolving",),
    "Submodel": ("li2023resolving",),
    "Adam": ("kingma2015adam",),
    # problems
    "HyperRepresentation": ("franceschi2018bilevel", "tarzanagh2022fednest"),
    "FewShot": ("franceschi2018bilevel",),
    "DataCleaning": ("franceschi2017forward", "li2023communication"),
    "FairClients": ("li2020fair", "li2023communication"),
    "AgnosticClients": ("mohri2019agnostic",),
    "LossTuning": ("kini2021label", "li2021autobalance", "tarzanagh2022fednest"),
    "Saddle": ("tarzanagh2022fednest",),
    "ClassWeights": ("terashita2022personalized", "duan2019astraea"),
    "Mixture": ("terashita2022personalized", "marfoq2021federated"),
    "WeightedMixture": ("terashita2022personalized", "marfoq2021federated", "duan2019astraea"),
    "PersonalLayers": ("arivazhagan2019federated",),
    "Interpolation": ("mansour2020three", "deng2020adaptive"),
    # models
    "ConvNet": ("wu2018group", "vinyals2016matching"),
    "TwoLayerCNN": ("marfoq2021federated",),
    "MobileNetV2": ("sandler2018mobilenetv2", "wu2018group"),
    "CharLSTM": ("hochreiter1997long", "caldas2018leaf"),
    "FourLayerCNN": ("li2023resolving",),
    "SlicedMLP": ("diao2021heterofl",),
    "ResNet": ("he2016deep", "diao2021heterofl"),
    # data
    "mnist": ("lecun1998gradient",),
    "mnist-mini": ("lecun1998gradient",),
    "fashion-mnist": ("xiao2017fashion",),
    "emnist-*": ("cohen2017emnist",),
    "cifar10": ("krizhevsky2009learning",),
    "cifar100": ("krizhevsky2009learning",),
    "omniglot": ("lake2015human",),
    "shakespeare": ("caldas2018leaf",),
    "ocr-letters": ("taskar2003max",),
    # partitions
    "Shards": ("mcmahan2017communication",),
    "Dirichlet": ("marfoq2021federated",),
    "Pachinko": ("reddi2021adaptive",),
    "LongTail": ("cui2019class", "tarzanagh2022fednest"),
    # software
    "optax": ("deepmind2020jax",),
}
"""Names that an experiment's configuration uses (`*` stands for anything), and the entries they need."""


def bibtex(names: Iterable[str]) -> str:
    """The BibTeX entries of what an experiment uses, each once, always in the same order.

    JAX, Equinox and this library are always among them. A name without an entry is not cited.

    Args:
        names: of algorithms, problems, data sets and partitions, as in a configuration.

    >>> print(bibtex(["F2SA"]).split("@")[-1].strip())
    inproceedings{kwon2023fully,
      title        = {A Fully First-Order Method for Stochastic Bilevel Optimization},
      author       = {Kwon, Jeongyeol and Kwon, Dohyun and Wright, Stephen and Nowak, Robert D.},
      booktitle    = {International Conference on Machine Learning},
      year         = {2023}
    }
    """
    needed = {*_ALWAYS, *(key for name in names for key in _keys(name))}
    return "\n".join(entry for key, entry in _entries().items() if key in needed)


def _keys(name: str) -> list[str]:
    return [key for pattern, keys in CITED.items() if fnmatch.fnmatchcase(name, pattern) for key in keys]


def _entries() -> dict[str, str]:
    """The entries of `references.bib` by key, each text ending in a line break."""
    text = importlib.resources.files(__package__).joinpath("references.bib").read_text("utf-8")
    found = re.finditer(r"^@\w+\{([^,\s]+),.*?^\}\n", text, re.MULTILINE | re.DOTALL)
    return {entry[1]: entry[0] for entry in found}
