"""The clients' data: where they come from, how clients share them, and how they are read in minibatches."""

from fedbilevel.data.batches import Batch
from fedbilevel.data.clients import Clients
from fedbilevel.data.dataset import Dataset
from fedbilevel.data.describe import Statistics, describe
from fedbilevel.data.error import DataError
from fedbilevel.data.federate import federate
from fedbilevel.data.partition import ClassesPerClient, Iid, Natural, Shards
from fedbilevel.data.public import set_aside
from fedbilevel.data.random_shares import Dirichlet, Pachinko, QuantitySkew
from fedbilevel.data.source import SOURCES, DataMissingError, get, load
from fedbilevel.data.split import LabelNoise, LongTail, Split

__all__ = [
    "SOURCES",
    "Batch",
    "ClassesPerClient",
    "Clients",
    "DataError",
    "DataMissingError",
    "Dataset",
    "Dirichlet",
    "Iid",
    "LabelNoise",
    "LongTail",
    "Natural",
    "Pachinko",
    "QuantitySkew",
    "Shards",
    "Split",
    "Statistics",
    "describe",
    "federate",
    "get",
    "load",
    "set_aside",
]
