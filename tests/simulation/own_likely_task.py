"""The task of own_task.py with a measure that has a likelihood."""

from attune.tests.simulation.own_task import LikelyMeasure as Measure
from attune.tests.simulation.own_task import points

__all__ = ["Measure", "points"]
