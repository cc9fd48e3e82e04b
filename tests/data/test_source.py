"""Data sets by name: which there are, where their files are looked for, what is said if they are missing."""

import gzip
import importlib.util
import os
import pathlib
import re
import sys
import types
from typing import Any

import numpy as np
import pytest

from data.source_files import write, write_idx_set
from fedbilevel.data.error import DataError
from fedbilevel.data.source import SOURCES, DataMissingError, load
from fedbilevel.data.source.archive import arrays
from fedbilevel.data.source.embedded import MINI, MINI_ARRAYS, MINI_HASH, content_hash
from fedbilevel.data.source.folder import cache_folder, roots

NAMES = [
    *("mnist-mini", "digits", "mnist", "fashion-mnist"),
    *("emnist-balanced", "emnist-byclass", "emnist-bymerge", "emnist-digits", "emnist-letters"),
    *("emnist-mnist", "emnist-mnist-10k", "cifar10", "cifar100", "omniglot", "shakespeare", "ocr-letters"),
]


@pytest.fixture(autouse=True)
def _no_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """No test sees the data of whoever runs it."""
    monkeypatch.delenv("FEDBILEVEL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# ------------------------------------------------------------------ the embedded set


def test_the_embedded_part_of_mnist_is_balanced_and_what_the_script_made() -> None:
    mini = load("mnist-mini")
    assert mini.train["inputs"].shape == (10_000, 28, 28, 1)
    assert mini.train["inputs"].dtype == np.float32
    assert (mini.train["inputs"].min(), mini.train["inputs"].max()) == (0, 1)
    assert np.bincount(mini.train["labels"]).tolist() == [1000] * 10
    assert np.bincount(mini.test["labels"]).tolist() == [200] * 10
    assert content_hash(dict(zip(MINI_ARRAYS, arrays(MINI, *MINI_ARRAYS), strict=True))) == MINI_HASH


def test_the_embedded_images_show_their_digits() -> None:
    """The nearest class mean is right for four of five images; for shuffled labels for one of ten."""
    mini = load("mnist-mini")
    train, test = (part["inputs"].reshape(-1, 784) for part in (mini.train, mini.test))
    means = np.stack([train[mini.train["labels"] == digit].mean(0) for digit in range(10)])
    guess = np.argmin((means**2).sum(1) - 2 * test @ means.T, axis=1)
    assert np.mean(guess == mini.test["labels"]) > 0.78


def test_a_content_hash_sees_values_shapes_and_names() -> None:
    first = {"a": np.zeros((2, 3), np.uint8)}
    others = [{"b": first["a"]}, {"a": np.zeros((3, 2), np.uint8)}, {"a": np.eye(2, 3, dtype=np.uint8)}]
    assert len({content_hash(columns) for columns in [first, *others]}) == 4


def test_digits_are_scaled_and_divided_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    images, target = np.arange(1440 * 64).reshape(1440, 8, 8) % 17, np.arange(1440) % 10
    bunch = types.SimpleNamespace(images=images.astype(float), target=target)
    module: Any = types.ModuleType("sklearn.datasets")
    module.load_digits = lambda: bunch
    monkeypatch.setitem(sys.modules, "sklearn", types.ModuleType("sklearn"))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", module)
    digits = load("digits")
    np.testing.assert_array_equal(digits.train["inputs"][..., 0] * 16, images[:1437])
    assert digits.test["labels"].tolist() == [7, 8, 9]


def test_digits_come_from_scikit_learn() -> None:
    pytest.importorskip("sklearn")
    digits = load("digits")
    assert digits.train["inputs"].shape == (1437, 8, 8, 1)
    assert digits.train["inputs"].max() == 1
    assert len(digits.test["labels"]) == 360


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataMissingError, match="pip install scikit-learn"):
        load("digits")


# ------------------------------------------------------------------ the registry


def test_every_set_is_described() -> None:
    assert list(SOURCES) == NAMES
    for name, source in SOURCES.items():
        assert source.name == name
        assert all((source.description, source.licence, source.reference, source.size, source.how_to_get))
        assert "\n" not in source.description


def test_downloads_are_by_https_and_checked_where_a_checksum_is_known() -> None:
    for source in SOURCES.values():
        for download in source.downloads:
            assert all(url.startswith("https://") for url in download.urls)
            assert download.md5 is None or re.fullmatch("[0-9a-f]{32}", download.md5)
    assert [name for name, source in SOURCES.items() if not source.verified] == ["ocr-letters"]


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("minst", "'mnist'"),
        ("CIFAR10", "'cifar10'"),
        ("omniglott", "'omniglot'"),
        ("emnist", "'emnist-byclass'"),
    ],
)
def test_a_mistyped_name_is_told_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(
        DataError, match=f"no data set '{wrong}'. Did you mean .*{nearest}.*The data sets are"
    ):
        load(wrong)


def test_a_name_like_no_other_is_told_all() -> None:
    with pytest.raises(DataError, match=r"no data set 'zzz'\. The data sets are mnist-mini, digits, mnist,"):
        load("zzz")


# ------------------------------------------------------------------ where files are looked for


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("place", ["", "mnist", "MNIST/raw", "mnist/MNIST/raw"])
def test_files_are_found_at_the_top_and_in_the_usual_folders(
    tmp_path: pathlib.Path, place: str, ending: str
) -> None:
    written = write_idx_set(tmp_path / place, ending=ending)
    assert load("mnist", tmp_path).train["labels"].tolist() == written["y_train"].tolist()


def test_the_environment_comes_before_the_cache_and_a_given_folder_is_the_only_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = write_idx_set(cache_folder())
    assert load("mnist").train["labels"].tolist() == cached["y_train"].tolist()
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path / "own"))
    assert load("mnist").train["labels"].tolist() == cached["y_train"].tolist(), (
        "the cache is the last resort"
    )
    own = write_idx_set(tmp_path / "own")
    assert load("mnist").train["labels"].tolist() == own["y_train"].tolist()
    with pytest.raises(DataMissingError):
        load("mnist", tmp_path / "elsewhere")


def test_a_folder_that_bears_the_name_comes_before_the_top(tmp_path: pathlib.Path) -> None:
    write_idx_set(tmp_path)
    written = write_idx_set(tmp_path / "fashion-mnist")
    assert load("fashion-mnist", tmp_path).train["labels"].tolist() == written["y_train"].tolist()


def test_a_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert cache_folder() == pathlib.Path.home() / ".cache" / "fedbilevel"
    assert roots("~/data") == (pathlib.Path.home() / "data",)


def test_loading_writes_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx_set(tmp_path / "data")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    before = sorted(tmp_path.rglob("*"))
    load("mnist", tmp_path / "data")
    load("mnist-mini")
    with pytest.raises(DataMissingError):
        load("cifar10")
    assert sorted(tmp_path.rglob("*")) == before


# ------------------------------------------------------------------ what is missing or damaged


def test_missing_files_are_named_with_the_folders_and_the_command(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path))
    with pytest.raises(DataMissingError) as caught:
        load("mnist")
    message = str(caught.value)
    for part in ("train-images-idx3-ubyte", "t10k-labels-idx1-ubyte", f"\n  {tmp_path}\n", "MNIST/raw"):
        assert part in message
    assert f"{cache_folder()} (no such folder)" in message
    assert "`fedbilevel data get mnist`" in message


def test_an_incomplete_set_is_told_what_it_lacks(tmp_path: pathlib.Path) -> None:
    write_idx_set(tmp_path / "mnist")
    os.remove(tmp_path / "mnist" / "t10k-labels-idx1-ubyte")
    with pytest.raises(DataMissingError, match=r"Incomplete: .*/mnist lacks t10k-labels-idx1-ubyte\n"):
        load("mnist", tmp_path)


def test_a_set_without_download_says_what_to_put_where(tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        DataMissingError, match="How to get it: put a text of lines `play TAB role TAB speech`"
    ):
        load("shakespeare", tmp_path)


def test_mnist_is_not_taken_for_fashion_mnist(tmp_path: pathlib.Path) -> None:
    write_idx_set(tmp_path)
    labels = bytes([5, 0, 4, 1, 9, 2, 1, 3, 1, 4, 3, 5])  # how MNIST begins
    write(tmp_path / "train-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\x0c" + labels)
    assert load("mnist", tmp_path).size == 12
    with pytest.raises(DataError, match="holds the labels of 'mnist', not of 'fashion-mnist'"):
        load("fashion-mnist", tmp_path)


DAMAGED = {
    "cut": (lambda raw: raw[:-1], r"header promises 9,424 bytes, it has 9,423"),
    "too long": (lambda raw: raw + b"x", r"header promises 9,424 bytes, it has 9,425"),
    "a web page": (lambda raw: b"<html>not found</html>", "begins with two zero bytes"),
    "empty": (lambda raw: b"", "begins with two zero bytes"),
    "header only": (lambda raw: raw[:6], "header promises"),
    "cut gzip": (lambda raw: gzip.compress(raw)[:-20], "cannot be unpacked"),
    "spoilt gzip": (lambda raw: gzip.compress(raw)[:40] + b"spoilt" + gzip.compress(raw)[46:], "unpacked"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_named(tmp_path: pathlib.Path, case: str) -> None:
    damage, message = DAMAGED[case]
    write_idx_set(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"{path} is damaged or of another format: .*{message}"):
        load("mnist", tmp_path)


def test_files_that_do_not_belong_together_are_refused(tmp_path: pathlib.Path) -> None:
    write_idx_set(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes((tmp_path / "train-labels-idx1-ubyte").read_bytes())
    with pytest.raises(
        DataError, match=r"\(5, 28, 28\) and .*t10k-labels-idx1-ubyte \(12,\).*not belong together"
    ):
        load("mnist", tmp_path)


def test_labels_without_a_class_are_refused(tmp_path: pathlib.Path) -> None:
    write_idx_set(tmp_path)
    write(tmp_path / "t10k-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\x05" + bytes([0, 1, 2, 3, 10]))
    with pytest.raises(DataError, match=r"test labels of 'mnist' lie in 0\.\.10, but it has 10 classes"):
        load("mnist", tmp_path)


def test_the_script_chooses_evenly_spaced_samples_of_every_digit() -> None:
    path = pathlib.Path(__file__).parents[2] / "scripts" / "build_mnist_mini.py"
    spec = importlib.util.spec_from_file_location("build_mnist_mini", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rows = script.spaced(np.repeat(np.arange(10), 6), 2)
    assert rows.tolist() == [first + offset for first in range(0, 60, 6) for offset in (0, 3)]
