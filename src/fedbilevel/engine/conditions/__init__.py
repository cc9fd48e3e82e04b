"""Real conditions in a simulation: who is there, how fast, over which link, and how long the server waits.

All of it is drawn from keys inside the compiled program.
"""

from fedbilevel.engine.conditions.availability import Availability, Bernoulli, DayNight, OnOff, Trace
from fedbilevel.engine.conditions.clock import Clock, Conditions
from fedbilevel.engine.conditions.per_client import LogNormal
from fedbilevel.engine.conditions.timing import Link, Speed

__all__ = [
    "Availability",
    "Bernoulli",
    "Clock",
    "Conditions",
    "DayNight",
    "Link",
    "LogNormal",
    "OnOff",
    "Speed",
    "Trace",
]
