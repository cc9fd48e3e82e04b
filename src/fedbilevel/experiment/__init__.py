"""Running, recording and diagnosing: what ties problems, algorithms and engines together."""

from fedbilevel.experiment.diagnose import Diagnosis, diagnose
from fedbilevel.experiment.record import History, Result, load
from fedbilevel.experiment.run import AdjointWarning, Evaluation, solve

__all__ = ["AdjointWarning", "Diagnosis", "Evaluation", "History", "Result", "diagnose", "load", "solve"]
