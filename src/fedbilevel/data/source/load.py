"""Loading a data set by its name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fedbilevel.data.dataset import Dataset
from fedbilevel.data.error import DataError
from fedbilevel.data.source.folder import locate, missing, roots
from fedbilevel.data.source.registry import source_of


def load(
    name: str, dir: str | os.PathLike[str] | None = None, read: Mapping[str, Any] | None = None
) -> Dataset:
    """A data set by its name, read from files on this computer; nothing is downloaded or written.

    Args:
        name: one of `SOURCES`. `mnist-mini` comes with the package and works everywhere.
        dir: the only folder to look in. Default: the folder named by the environment variable
            `FEDBILEVEL_DATA`, then the user's cache folder, where `get` puts downloads. In a folder, files
            are looked for in a sub-folder named like the set, in the usual sub-folders, and at the top.
        read: how files are read, where that can be done in several ways: text of `shakespeare` has `length`,
            `stride` and `training` (see `fedbilevel.data.source.text.Roles`).

    Raises:
        DataMissingError: files are missing; the message says which, where they were looked for, and how to
            get them.
        DataError: the name or a setting is unknown, or a file is damaged.

    >>> mini = load("mnist-mini")
    >>> mini.train["inputs"].shape, mini.test["inputs"].shape, len(mini.classes)
    ((10000, 28, 28, 1), (2000, 28, 28, 1), 10)
    """
    source, folders = source_of(name), roots(dir)
    found = locate(source, folders)
    if found is None:
        raise missing(source, folders)
    form, paths = found
    dataset = form.reader(read or {})(*paths)
    _check_labels(dataset, ", ".join(map(str, paths)))
    return dataset


def _check_labels(dataset: Dataset, where: str) -> None:
    """A label without a class would only show up much later, as a wrong loss."""
    for part, columns in (("train", dataset.train), ("test", dataset.test)):
        labels = columns["labels"]
        if labels.size and not 0 <= labels.min() <= labels.max() < len(dataset.classes):
            raise DataError(
                f"the {part} labels of {dataset.name!r} lie in {labels.min()}..{labels.max()}, but it has "
                f"{len(dataset.classes)} classes; the files hold another set, or are damaged: {where}"
            )
