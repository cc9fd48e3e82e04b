"""Where a federation runs."""

from fedbilevel.engine.base import Engine, TooFewClientsError
from fedbilevel.engine.process import Process
from fedbilevel.engine.simulator import Simulator, simulate

__all__ = ["Engine", "Process", "Simulator", "TooFewClientsError", "simulate"]
