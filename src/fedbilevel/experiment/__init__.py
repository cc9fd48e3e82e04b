"""Running, recording and diagnosing: what ties problems, algorithms and engines together."""

from fedbilevel.experiment.best import Best, BestPoint
from fedbilevel.experiment.diagnose import Diagnosis, diagnose
from fedbilevel.experiment.loop import Evaluation
from fedbilevel.experiment.record import History, Result, load
from fedbilevel.experiment.run import solve
from fedbilevel.experiment.suspicion import AdjointWarning, DataWarning, DivergenceWarning
from fedbilevel.experiment.sweep import Job, sweep

__all__ = [
    "AdjointWarning",
    "Best",
    "BestPoint",
    "DataWarning",
    "Diagnosis",
    "DivergenceWarning",
    "Evaluation",
    "History",
    "Job",
    "Result",
    "diagnose",
    "load",
    "solve",
    "sweep",
]
