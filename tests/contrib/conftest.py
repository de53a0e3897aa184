"""The tasks on small models that tests of objectives use."""

from tests.objectives.conftest import make_task

__all__ = ["make_task"]
