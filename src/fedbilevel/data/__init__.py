"""The clients' data: stored once, read in minibatches."""

from fedbilevel.data.batches import Batch
from fedbilevel.data.clients import Clients, DataError

__all__ = ["Batch", "Clients", "DataError"]
