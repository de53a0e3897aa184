"""Attune: personalized federated learning over a real network. Every device gets weights of its own.

Names are imported when they are first used: torch alone takes more than a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

DISTRIBUTION = "attune-fl"  # on PyPI the name "attune" belongs to somebody else


_PLACES = {
    "Client": "attune.fedclient.client",
    "evaluate": "attune.fedserver.evaluate",
    "register": "attune.common.plugins",
    "report": "attune.seams",
    "serve": "attune.fedserver.serve",
    "simulate": "attune.simulation.simulate",
}
__all__ = ["Client", "evaluate", "register", "report", "serve", "simulate"]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        try:
            return getattr(import_module(_PLACES[name]), name)
        except ModuleNotFoundError as missing:
            from attune.common.errors import needing

            raise needing(missing) from None
    if name == "__version__":
        from importlib.metadata import version

        return version(DISTRIBUTION)
    raise AttributeError(f"module 'attune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
