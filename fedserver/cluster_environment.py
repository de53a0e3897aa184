"""What Ray reads from the environment when it is imported, where the operator has not said it."""

from __future__ import annotations

import os
from pathlib import Path


def prepare() -> None:
    """Before Ray is imported: no statistics, workers that get their share of a busy machine, and this user's token."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # theirs is 15: on a busy machine a worker never begins
    given = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if given or (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # a cluster that asks for none takes it too
