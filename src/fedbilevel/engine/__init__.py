"""Where a federation runs."""

from fedbilevel.engine import conditions
from fedbilevel.engine.base import Engine, StepError, TooFewClientsError
from fedbilevel.engine.mesh.engine import Mesh
from fedbilevel.engine.mesh.join import LostProcessError, MeshError
from fedbilevel.engine.nvflare.engine import NVFlare
from fedbilevel.engine.nvflare.job import JobLostError
from fedbilevel.engine.process import Process
from fedbilevel.engine.simulator import Simulator, simulate

__all__ = [
    "Engine",
    "JobLostError",
    "LostProcessError",
    "Mesh",
    "MeshError",
    "NVFlare",
    "Process",
    "Simulator",
    "StepError",
    "TooFewClientsError",
    "conditions",
    "simulate",
]
