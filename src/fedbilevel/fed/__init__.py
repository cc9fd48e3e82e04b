"""The language: placed values, the verbs that move them, and the ledger of what they cost."""

from fedbilevel.fed.codec import Codec, Dense, Partial, RandomCodec, TopK
from fedbilevel.fed.cohort import Cohort
from fedbilevel.fed.compress import Quantized, RandomK
from fedbilevel.fed.federation import Federation
from fedbilevel.fed.ledger import Ledger, UncountedWorkError
from fedbilevel.fed.links import Complete, Given, Links, Network
from fedbilevel.fed.loop import branch, repeat
from fedbilevel.fed.place import At, Kept, PlacementError, Published
from fedbilevel.fed.program import Program, ProgramError

__all__ = [
    "At",
    "Codec",
    "Cohort",
    "Complete",
    "Dense",
    "Federation",
    "Given",
    "Kept",
    "Ledger",
    "Links",
    "Network",
    "Partial",
    "PlacementError",
    "Program",
    "ProgramError",
    "Published",
    "Quantized",
    "RandomCodec",
    "RandomK",
    "TopK",
    "UncountedWorkError",
    "branch",
    "repeat",
]
