"""Images in the formats in which they are distributed come out as they were written."""

import pathlib
import pickle
import string
from typing import Any

import numpy as np
import pytest

from data.source_files import idx_bytes, numbers, pixels, python2_pickle, write, write_drawing, write_idx_set
from fedbilevel.data.dataset import Table
from fedbilevel.data.error import DataError
from fedbilevel.data.source import load
from fedbilevel.data.source.omniglot import Folders, reduced

RANDOM = np.random.default_rng(1)


def assert_holds(columns: Table, images: np.ndarray, **integers: Any) -> None:
    """The columns hold these images of bytes and these integers, and nothing else."""
    assert columns["inputs"].dtype == np.float32
    assert columns["inputs"].flags.c_contiguous
    np.testing.assert_array_equal(columns["inputs"], images.astype(np.float32) / np.float32(255))
    assert set(columns) == {"inputs", *integers}
    for name, values in integers.items():
        assert columns[name].dtype == np.int32
        np.testing.assert_array_equal(columns[name], values)


# ------------------------------------------------------------------ MNIST and its relatives


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files(tmp_path: pathlib.Path, name: str) -> None:
    written = write_idx_set(tmp_path, ending=".gz")
    dataset = load(name, tmp_path)
    assert_holds(dataset.train, written["x_train"][..., None], labels=written["y_train"])
    assert_holds(dataset.test, written["x_test"][..., None], labels=written["y_test"])
    assert dataset.name == name
    assert dataset.classes[9] == {"mnist": "9", "fashion-mnist": "Ankle boot"}[name]


SPLITS = {"balanced": 47, "byclass": 62, "bymerge": 47, "digits": 10, "letters": 26, "mnist": 10}


@pytest.mark.parametrize("split", SPLITS)
def test_emnist_is_set_upright_and_counts_from_zero(tmp_path: pathlib.Path, split: str) -> None:
    prefixes = f"emnist-{split}-train", f"emnist-{split}-test"
    written = write_idx_set(tmp_path / "emnist" / "gzip", prefixes, ".gz", SPLITS[split])
    first = 0
    if split == "letters":
        first = 1
        for part, prefix in zip(("train", "test"), prefixes, strict=True):
            path = tmp_path / "emnist" / "gzip" / f"{prefix}-labels-idx1-ubyte.gz"
            write(path, idx_bytes(written[f"y_{part}"] + first))
    dataset = load(f"emnist-{split}", tmp_path)
    assert_holds(dataset.train, written["x_train"].transpose(0, 2, 1)[..., None], labels=written["y_train"])
    assert_holds(dataset.test, written["x_test"].transpose(0, 2, 1)[..., None], labels=written["y_test"])
    assert len(dataset.classes) == SPLITS[split]


def test_emnist_classes_are_in_the_order_of_its_mapping(tmp_path: pathlib.Path) -> None:
    for split in ("byclass", "balanced"):
        write_idx_set(tmp_path, (f"emnist-{split}-train", f"emnist-{split}-test"))
    both = string.digits + string.ascii_uppercase
    assert "".join(load("emnist-byclass", tmp_path).classes) == both + string.ascii_lowercase
    assert "".join(load("emnist-balanced", tmp_path).classes) == both + "abdefghnqrt"


def test_the_test_part_of_emnist_is_a_set_of_its_own(tmp_path: pathlib.Path) -> None:
    images, labels = pixels(10, 28, 28), numbers(10, 10)
    np.savez(tmp_path / "emnist_mnist_test.npz", x=images, y=labels)
    archived = load("emnist-mnist-10k", tmp_path)
    upright = images.transpose(0, 2, 1)[..., None]
    assert_holds(archived.train, upright[:8], labels=labels[:8])
    assert_holds(archived.test, upright[8:], labels=labels[8:])
    write(tmp_path / "idx" / "emnist-mnist-test-images-idx3-ubyte", idx_bytes(images))
    write(tmp_path / "idx" / "emnist-mnist-test-labels-idx1-ubyte", idx_bytes(labels))
    same = load("emnist-mnist-10k", tmp_path / "idx")
    assert_holds(same.test, upright[8:], labels=labels[8:])


# ------------------------------------------------------------------ CIFAR

BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def channels_last(flat: np.ndarray) -> np.ndarray:
    return flat.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


@pytest.fixture
def batches() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """CIFAR-10's six files: pixels of four images, channel by channel, and labels."""
    return {batch: (pixels(4, 3072), numbers(4, 10)) for batch in BATCHES}


def assert_is_cifar10(root: pathlib.Path, batches: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    dataset = load("cifar10", root)
    images, labels = (np.concatenate([batches[name][i] for name in BATCHES[:5]]) for i in (0, 1))
    assert_holds(dataset.train, channels_last(images), labels=labels)
    assert_holds(dataset.test, channels_last(batches["test_batch"][0]), labels=batches["test_batch"][1])
    assert (dataset.name, dataset.classes[3]) == ("cifar10", "cat")


def test_cifar10_binary(tmp_path: pathlib.Path, batches: Any) -> None:
    for batch, (images, labels) in batches.items():
        raw = np.column_stack([labels, images]).tobytes()
        write(tmp_path / "cifar-10-batches-bin" / f"{batch}.bin", raw)
    assert_is_cifar10(tmp_path, batches)


def python3_pickle(protocol: int) -> Any:
    return lambda content: pickle.dumps({k.encode(): v for k, v in content.items()}, protocol)


@pytest.mark.parametrize(
    "dump", [python2_pickle, *map(python3_pickle, (2, 3, 4))], ids=["original", "2", "3", "4"]
)
def test_cifar10_python(tmp_path: pathlib.Path, batches: Any, dump: Any) -> None:
    for batch, (images, labels) in batches.items():
        content = {
            "batch_label": "a batch",
            "labels": labels.tolist(),
            "data": images,
            "filenames": ["a.png"],
        }
        write(tmp_path / "cifar10" / "cifar-10-batches-py" / batch, dump(content))
    assert_is_cifar10(tmp_path, batches)


def test_cifar100_has_superclasses_in_every_form(tmp_path: pathlib.Path) -> None:
    images, fine, coarse = pixels(9, 3072), numbers(9, 100), numbers(9, 20)
    for part, rows in (("train", slice(6)), ("test", slice(6, 9))):
        records = np.column_stack([coarse[rows], fine[rows], images[rows]]).astype(np.uint8)
        write(tmp_path / "binary" / "cifar-100-binary" / f"{part}.bin", records.tobytes())
        content = {
            "data": images[rows],
            "fine_labels": fine[rows].tolist(),
            "coarse_labels": coarse[rows].tolist(),
        }
        write(tmp_path / "python" / "cifar-100-python" / part, python2_pickle(content))
    (tmp_path / "archive").mkdir()
    stored = images.reshape(-1, 3, 32, 32)
    train = {"x_train": stored[:6], "y_train": fine[:6], "c_train": coarse[:6]}
    test = {"x_test": stored[6:], "y_test": fine[6:], "c_test": coarse[6:]}
    np.savez(tmp_path / "archive" / "cifar100_6k.npz", **train, **test)
    for form, name in (("binary", "cifar100"), ("python", "cifar100"), ("archive", "cifar100_6k")):
        dataset = load("cifar100", tmp_path / form)
        assert dataset.name == name, "a part of the images is not called like all of them"
        assert_holds(dataset.train, channels_last(images[:6]), labels=fine[:6], coarse=coarse[:6])
        assert_holds(dataset.test, channels_last(images[6:]), labels=fine[6:], coarse=coarse[6:])
    assert (dataset.classes[0], dataset.classes[47], dataset.classes[99]) == ("apple", "maple_tree", "worm")


def test_cifar10_archive(tmp_path: pathlib.Path) -> None:
    images, labels = pixels(5, 3, 32, 32), numbers(5, 10)
    columns = {"x_train": images[:3], "y_train": labels[:3], "x_test": images[3:], "y_test": labels[3:]}
    np.savez(tmp_path / "cifar10_12k.npz", **columns)
    dataset = load("cifar10", tmp_path)
    assert_holds(dataset.train, channels_last(images[:3]), labels=labels[:3])
    assert_holds(dataset.test, channels_last(images[3:]), labels=labels[3:])
    np.savez(tmp_path / "cifar10_12k.npz", x_train=images)
    with pytest.raises(
        DataError, match=r"cifar10_12k.npz is damaged.*y_train.*it should hold x_train, y_train"
    ):
        load("cifar10", tmp_path)
    raw = (tmp_path / "cifar10_12k.npz").read_bytes()
    (tmp_path / "cifar10_12k.npz").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(DataError, match=r"cifar10_12k.npz is damaged.*no complete NumPy archive"):
        load("cifar10", tmp_path)


def test_a_cut_cifar_file_is_named(tmp_path: pathlib.Path, batches: Any) -> None:
    for batch, (images, labels) in batches.items():
        write(tmp_path / f"{batch}.bin", np.column_stack([labels, images]).tobytes())
    (tmp_path / "data_batch_3.bin").write_bytes(b"x" * 5000)
    with pytest.raises(
        DataError, match=r"data_batch_3.bin is damaged.*5,000 bytes are not a number of records"
    ):
        load("cifar10", tmp_path)


# ------------------------------------------------------------------ Omniglot

DRAWN = {
    "images_background": ("Greek/character01", "Greek/character02", "Latin/character01"),
    "images_evaluation": ("Angelic/character01",),
}


@pytest.fixture
def drawings(tmp_path: pathlib.Path) -> dict[str, np.ndarray]:
    """Original folders with three drawers, and the ink of every file."""
    ink = {}
    for part, characters in DRAWN.items():
        for number, character in enumerate(characters):
            for drawer in (1, 2, 3):
                drawing = RANDOM.random((105, 105)) < 0.2
                write_drawing(
                    tmp_path / "omniglot" / part / character / f"{number:04}_{drawer:02}.png", drawing
                )
                ink[f"{character}/{drawer}"] = drawing
    return ink


def test_omniglot_folders(tmp_path: pathlib.Path, drawings: dict[str, np.ndarray]) -> None:
    dataset = load("omniglot", tmp_path)
    stacked = np.stack(list(drawings.values()))
    np.testing.assert_array_equal(dataset.train["inputs"], reduced(stacked[:9], 28))
    np.testing.assert_array_equal(dataset.test["inputs"], reduced(stacked[9:], 28))
    assert dataset.train["labels"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert dataset.train["coarse"].tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert dataset.train["owner"].tolist() == [0, 1, 2] * 3
    assert dataset.test["labels"].tolist() == [3, 3, 3]
    assert dataset.test["coarse"].tolist() == [2, 2, 2]
    assert dataset.classes == (*DRAWN["images_background"], *DRAWN["images_evaluation"])
    assert dataset.owners == ("drawer 1", "drawer 2", "drawer 3")


def test_omniglot_in_full_size(tmp_path: pathlib.Path, drawings: dict[str, np.ndarray]) -> None:
    folders = [tmp_path / "omniglot" / part for part in DRAWN]
    whole = Folders(side=105)(*folders).test["inputs"]
    np.testing.assert_array_equal(whole[..., 0], np.stack(list(drawings.values()))[9:])


def test_the_archive_of_omniglot_gives_what_the_folders_give(
    tmp_path: pathlib.Path, drawings: dict[str, np.ndarray]
) -> None:
    (tmp_path / "archive").mkdir()
    np.savez_compressed(
        tmp_path / "archive" / "omniglot.npz",
        x_bits=np.packbits(np.stack(list(drawings.values())).reshape(4, 3, -1), axis=2),
        char_alphabet=np.array([0, 0, 1, 2], np.uint8),
        alphabets=np.array(["Greek", "Latin", "Angelic"]),
        char_split=np.array([0, 0, 0, 1], np.uint8),
        char_names=np.array(["character01", "character02", "character01", "character01"]),
    )
    one, other = load("omniglot", tmp_path), load("omniglot", tmp_path / "archive")
    assert (one.classes, one.owners) == (other.classes, other.owners)
    for left, right in ((one.train, other.train), (one.test, other.test)):
        assert left.keys() == right.keys()
        for name in left:
            assert left[name].dtype == right[name].dtype
            np.testing.assert_array_equal(left[name], right[name])


def test_reducing_averages_areas() -> None:
    image = RANDOM.random((1, 6, 6)) < 0.5
    blocks = image.reshape(1, 3, 2, 3, 2).mean((2, 4))
    np.testing.assert_allclose(reduced(image, 3)[..., 0], blocks, rtol=1e-6)
    # 3 pixels to 2: the middle one belongs half to each.
    row = np.array([[[1, 0, 0], [1, 0, 0], [1, 0, 0]]])
    np.testing.assert_allclose(reduced(row, 2)[0, :, :, 0], [[2 / 3, 0], [2 / 3, 0]], rtol=1e-6)
    drawing = RANDOM.random((1, 105, 105)) < 0.1
    np.testing.assert_allclose(reduced(drawing, 28).mean(), drawing.mean(), rtol=1e-5)
    assert reduced(np.ones((1, 105, 105)), 28).max() == 1


def test_a_damaged_drawing_is_named(tmp_path: pathlib.Path, drawings: dict[str, np.ndarray]) -> None:
    path = tmp_path / "omniglot" / "images_evaluation" / "Angelic" / "character01" / "0000_02.png"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"0000_02.png is damaged.*no complete PNG"):
        load("omniglot", tmp_path)
    write_drawing(path, np.zeros((28, 28), bool))
    with pytest.raises(DataError, match=r"0000_02.png is damaged.*shape \(28, 28\), not \(105, 105\)"):
        load("omniglot", tmp_path)
    path.rename(path.with_name("mine.png"))
    write_drawing(path.with_name("mine.png"), np.zeros((105, 105), bool))
    with pytest.raises(DataError, match=r"mine.png should end in the drawer's number"):
        load("omniglot", tmp_path)


def test_empty_folders_of_omniglot_are_refused(tmp_path: pathlib.Path) -> None:
    for part in DRAWN:
        (tmp_path / part).mkdir()
    with pytest.raises(DataError, match="images_background holds no files Alphabet/character01"):
        load("omniglot", tmp_path)


# ------------------------------------------------------------------ OCR letters


def test_ocr_letters_as_text_and_as_archive(tmp_path: pathlib.Path) -> None:
    bits, labels = RANDOM.integers(0, 2, (6, 128), np.uint8), np.array([14, 0, 25, 3, 3, 7], np.uint8)
    word, fold = np.array([1, 1, 4, 4, 4, 9]), np.array([3, 3, 0, 0, 0, 9])
    lines = [
        "\t".join(
            map(str, [row + 1, string.ascii_lowercase[labels[row]], -1, word[row], 1, fold[row], *bits[row]])
        )
        for row in range(6)
    ]
    write(tmp_path / "text" / "letter.data.gz", "".join(f"{line}\t\n" for line in lines).encode())
    (tmp_path / "archive").mkdir()
    columns = {"x_bits": np.packbits(bits, axis=1), "y": labels, "word": word, "fold": fold}
    np.savez(tmp_path / "archive" / "ocr_letters.npz", **columns)
    images = 255 * bits.reshape(-1, 16, 8, 1).astype(int)
    for form in ("text", "archive"):
        dataset = load("ocr-letters", tmp_path / form)
        train, test = [0, 1, 5], [2, 3, 4]
        assert_holds(dataset.train, images[train], labels=labels[train], owner=[0, 0, 2])
        assert_holds(dataset.test, images[test], labels=labels[test], owner=[1, 1, 1])
        assert dataset.owners == ("word 1", "word 4", "word 9")
        assert dataset.classes == tuple(string.ascii_lowercase)


def test_damaged_letters_are_refused(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "letter.data", b"1\ta\t2\n1\tb\n")
    with pytest.raises(DataError, match=r"letter.data is damaged.*not 134 fields"):
        load("ocr-letters", tmp_path)
