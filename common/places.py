"""Where something lies that a user names: at a path, or in an installed package."""

from __future__ import annotations

import importlib.resources
from pathlib import Path


def place_of(where: str) -> Path:
    """A path, or "package:file" for what an installed package carries. Errors: ModuleNotFoundError."""
    package, _, name = where.partition(":")
    if name and not Path(where).exists():
        return Path(str(importlib.resources.files(package) / name))
    return Path(where).expanduser()
