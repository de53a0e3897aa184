"""Attune: personalized federated learning over a real network. Every device gets weights of its own.

Names are imported when they are first used: torch alone takes more than a second.
"""

from __future__ import annotations

from typing import Any

DISTRIBUTION = "attune-fl"  # on PyPI the name "attune" belongs to somebody else


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version(DISTRIBUTION)
    raise AttributeError(f"module 'attune' has no attribute {name!r}")
