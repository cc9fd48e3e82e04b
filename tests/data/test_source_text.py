"""Shakespeare's roles: windows of characters, one client a role."""

import json
import pathlib

import numpy as np
import pytest

from data.source_files import write
from fedbilevel.data.dataset import Dataset
from fedbilevel.data.error import DataError
from fedbilevel.data.source import load
from fedbilevel.data.source.text import Roles

LONG = "It is the east, and Juliet is the sun; arise, fair sun, and kill the envious moon. " * 8


def text_of(dataset: Dataset, codes: np.ndarray) -> str:
    return "".join(dataset.classes[code] for code in codes)


def role_file(path: pathlib.Path, *speeches: tuple[str, str, str]) -> pathlib.Path:
    return write(path, "".join("\t".join(speech) + "\n" for speech in speeches).encode())


ENDINGS = ["_roles.tsv", "_roles.txt.gz", "_roles.tsv.txt.gz", ".tsv", ".txt"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_windows_are_stretches_of_a_roles_text_with_the_next_character(
    tmp_path: pathlib.Path, ending: str
) -> None:
    half = len(LONG) // 2
    speeches = ("romeo", "ROMEO", LONG[:half]), ("romeo", "NURSE", "Madam!"), ("romeo", "ROMEO", LONG[half:])
    role_file(tmp_path / f"shakespeare{ending}", *speeches)
    dataset = load("shakespeare", tmp_path)
    whole = f"{LONG[:half]}\n{LONG[half:]}"
    cut = int(0.8 * len(whole))
    assert dataset.owners == ("romeo/ROMEO",), "the nurse says too little"
    for columns, text in ((dataset.train, whole[:cut]), (dataset.test, whole[cut:])):
        starts = range(0, len(text) - 80, 10)
        assert [text_of(dataset, row) for row in columns["inputs"]] == [text[s : s + 80] for s in starts]
        assert text_of(dataset, columns["labels"]) == "".join(text[s + 80] for s in starts)
        assert columns["owner"].tolist() == [0] * len(starts)
        assert {column.dtype for column in columns.values()} == {np.dtype(np.int32)}
    assert dataset.classes == tuple(sorted(set(whole + "Madam!")))


def test_the_same_name_in_two_plays_is_two_roles(tmp_path: pathlib.Path) -> None:
    path = role_file(
        tmp_path / "shakespeare.tsv", ("a", "KING", LONG), ("b", "KING", LONG), ("a", "KING", LONG)
    )
    dataset = load("shakespeare", path.parent)
    assert dataset.owners == ("a/KING", "b/KING")
    first, second = np.bincount(dataset.train["owner"])
    assert first > second
    assert (np.diff(dataset.train["owner"]) >= 0).all()


def test_length_stride_and_share_are_settings(tmp_path: pathlib.Path) -> None:
    path = role_file(tmp_path / "roles.tsv", ("a", "X", "abcdefghij"), ("a", "Y", "abc"), ("a", "Z", "abcd"))
    dataset = Roles(length=2, stride=1, training=0.8)(path)
    assert dataset.owners == ("a/X", "a/Z"), "80 % of three characters are no window of two and one more"
    windows = ["ab", "bc", "cd", "de", "ef", "fg", "ab"]
    assert [text_of(dataset, row) for row in dataset.train["inputs"]] == windows
    assert text_of(dataset, dataset.train["labels"]) == "cdefghc"
    assert len(dataset.test["labels"]) == 0


def test_load_reads_windows_of_a_given_length(tmp_path: pathlib.Path) -> None:
    role_file(tmp_path / "shakespeare.tsv", ("a", "X", LONG))
    dataset = load("shakespeare", tmp_path, read={"length": 200, "stride": 50})
    cut = int(0.8 * len(LONG))
    starts = range(0, cut - 200, 50)
    assert [text_of(dataset, row) for row in dataset.train["inputs"]] == [LONG[s : s + 200] for s in starts]


REFUSED = {
    "lenght": (200, r"'lenght' is no setting.*there are length, stride, training; did you mean 'length'"),
    "length": (0, "length is 0; it must be a whole number of at least 1"),
    "stride": (True, "stride is True; it must be a whole number of at least 1"),
    "training": (1.5, r"training is 1\.5; it must be a share above 0 and at most 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_make_no_sense_are_refused(tmp_path: pathlib.Path, name: str) -> None:
    role_file(tmp_path / "shakespeare.tsv", ("a", "X", LONG))
    value, message = REFUSED[name]
    with pytest.raises(DataError, match=message):
        load("shakespeare", tmp_path, read={name: value})


def test_what_is_read_in_one_way_only_takes_no_settings() -> None:
    with pytest.raises(DataError, match=r"'length' is no setting.*read in one way only: leave it out"):
        load("mnist-mini", read={"length": 200})


def test_every_code_point_is_one_character(tmp_path: pathlib.Path) -> None:
    path = role_file(tmp_path / "roles.tsv", ("a", "X", "é𝄞aé𝄞a"))
    dataset = Roles(length=1, stride=1, training=1)(path)
    assert dataset.classes == ("a", "é", "𝄞")
    assert dataset.train["labels"].tolist() == [2, 0, 1, 2, 0]


def leaf(folder: pathlib.Path, name: str, **users: dict[str, list[str]]) -> None:
    content = {"users": list(users), "num_samples": [len(u["y"]) for u in users.values()], "user_data": users}
    write(folder / name, json.dumps(content).encode())


@pytest.mark.parametrize("place", ["", "shakespeare/data"])
def test_leafs_json_is_taken_as_it_is(tmp_path: pathlib.Path, place: str) -> None:
    train, test = (tmp_path / place / part for part in ("train", "test"))
    leaf(train, "all_data_0.json", HAMLET={"x": ["to be", "o be "], "y": [" ", "o"]})
    leaf(train, "all_data_1.json", OPHELIA={"x": ["my lo"], "y": ["r"]})
    leaf(test, "all_data_0.json", HAMLET={"x": ["be or"], "y": ["!"]}, GHOST={"x": ["swear"], "y": ["."]})
    dataset = load("shakespeare", tmp_path)
    assert dataset.owners == ("HAMLET", "OPHELIA", "GHOST")
    assert [text_of(dataset, row) for row in dataset.train["inputs"]] == ["to be", "o be ", "my lo"]
    assert text_of(dataset, dataset.train["labels"]) == " or"
    assert dataset.train["owner"].tolist() == [0, 0, 1]
    assert [text_of(dataset, row) for row in dataset.test["inputs"]] == ["be or", "swear"]
    assert dataset.test["owner"].tolist() == [0, 2]


DAMAGED = {
    "fields": (b"a\tX\thello\na\tX\n", "line 2 has 2 fields, not play TAB role TAB speech"),
    "encoding": (b"a\tX\t\xff\xfe\n", "no UTF-8 text"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_role_text_is_refused(tmp_path: pathlib.Path, case: str) -> None:
    raw, message = DAMAGED[case]
    write(tmp_path / "shakespeare.tsv", raw)
    with pytest.raises(DataError, match=f"shakespeare.tsv is damaged.*{message}"):
        load("shakespeare", tmp_path)


@pytest.mark.parametrize("raw", [b"", b"a\tX\tshort\n"])
def test_a_text_without_a_window_is_refused(tmp_path: pathlib.Path, raw: bytes) -> None:
    write(tmp_path / "shakespeare.tsv", raw)
    with pytest.raises(DataError, match=r"shakespeare.tsv has no role with text for one window of 80"):
        load("shakespeare", tmp_path)


@pytest.mark.parametrize(
    "raw", [b"{", b"[]", b'{"users": []}', b'{"user_data": {"a": {"x": ["b"]}}}', b'{"user_data": {"a": 1}}']
)
def test_damaged_json_is_refused(tmp_path: pathlib.Path, raw: bytes) -> None:
    for part in ("train", "test"):
        write(tmp_path / part / "data.json", raw)
    with pytest.raises(DataError, match=r"train/data.json is damaged.*no JSON of LEAF"):
        load("shakespeare", tmp_path)


def test_json_of_unequal_windows_and_empty_folders_are_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    with pytest.raises(DataError, match=r"train holds no \.json files"):
        load("shakespeare", tmp_path)
    leaf(tmp_path / "train", "a.json", A={"x": ["ab"], "y": ["c"]})
    leaf(tmp_path / "test", "a.json", A={"x": ["abc"], "y": ["d"]})
    with pytest.raises(DataError, match=r"have the lengths \[3, 4\]; need one length"):
        load("shakespeare", tmp_path)
