"""Fixtures of the server's identity, for the halves of identity that both sides share."""

from tests.fedserver.identity.conftest import authority, call, device, home, live, refused, serve, stranger

__all__ = ["authority", "call", "device", "home", "live", "refused", "serve", "stranger"]
