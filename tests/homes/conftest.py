"""Federations of real processes for homes of earlier versions."""

from tests.e2e.conftest import federation_at

__all__ = ["federation_at"]
