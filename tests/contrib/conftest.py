"""Tasks on small models for tests of objectives."""

from tests.fedclient.work.objectives.conftest import make_task

__all__ = ["make_task"]
