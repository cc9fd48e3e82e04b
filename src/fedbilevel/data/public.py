"""Public samples: some of a data set, without labels, that no client owns and everybody has."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from fedbilevel.data.dataset import Dataset
from fedbilevel.data.error import DataError


def set_aside(dataset: Dataset, samples: int, seed: int = 0) -> tuple[Dataset, npt.NDArray[Any]]:
    """A data set without some of its training samples, and the inputs of these: nobody sees their labels.

    What methods that distil on public samples need (`FedDF`, `DSFL`, `FedET`). Federate the data set that
    comes back, so that no client has a public sample.

    Args:
        dataset: a loaded one, or your own.
        samples: how many, drawn at random.
        seed: of the draw.

    Returns:
        The rest of the data set, in its order, and `(samples, *inputs)`.

    Example:
        >>> columns = {"inputs": np.arange(6.0).reshape(6, 1), "labels": np.array([0, 1, 1, 0, 1, 0])}
        >>> rest, public = set_aside(Dataset("mine", columns, columns, ("no", "yes")), 2)
        >>> rest.size, public.shape
        (4, (2, 1))
    """
    if type(samples) is not int or not 1 <= samples < dataset.size:
        raise DataError(
            f"{samples!r} public samples are asked for, of {dataset.size} training samples; it must be a "
            "whole number of at least 1 that leaves some to the clients"
        )
    # Another stream than those of `federate`, which may have the same seed.
    order = np.random.default_rng((seed, 1)).permutation(dataset.size)
    public, rest = order[:samples], np.sort(order[samples:])
    train = {name: column[rest] for name, column in dataset.train.items()}
    return dataclasses.replace(dataset, train=train), dataset.train["inputs"][public]
