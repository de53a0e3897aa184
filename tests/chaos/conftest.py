"""Fixtures of the federations with real processes."""

from tests.e2e.conftest import federation_at

__all__ = ["federation_at"]
