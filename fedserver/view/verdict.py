"""Whether the federation helps a device, by what the device has counted on its test samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attune.common.statistics import Finding, difference, finding, holm, mcnemar, overall

RIVALS = ("common", "local")


def gain_of(reported: Mapping[str, Any]) -> float | None:
    """What federation gives the device: by how much its own model is right more often than one that it trained alone.

    Where it trained none, than the common model. A difference of fractions of the same test samples; None: not compared.
    """
    found = _paired(reported)
    return None if found is None else (found[0] - found[1]) / found[2]


def gain_between(reported: Mapping[str, Any]) -> tuple[float, float] | None:
    """The 95 % interval of `gain_of`."""
    found = _paired(reported)
    return None if found is None else difference(*found)


def _paired(reported: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """(test samples won, lost, all) against the rival that `gain_of` names."""
    for rival in reversed(RIVALS):
        won, lost = reported.get(f"better_than_{rival}"), reported.get(f"worse_than_{rival}")
        if won is not None and lost is not None and reported.get("test_samples"):
            return won, lost, reported["test_samples"]
    return None


def verdict_of(reported: Mapping[str, Any]) -> Finding | None:
    """reported: metrics by name, as in the status. Its own model against its rivals; None where nothing was compared.

    The same test as on the device (fedclient.work.comparison).
    """
    counts = {rival: (reported.get(f"better_than_{rival}"), reported.get(f"worse_than_{rival}")) for rival in RIVALS}
    known = {rival: (won, lost) for rival, (won, lost) in counts.items() if won is not None and lost is not None}
    if not known:
        return None
    adjusted = holm({rival: mcnemar(won, lost) for rival, (won, lost) in known.items()})
    return overall({finding(won, lost, adjusted[rival]) for rival, (won, lost) in known.items()})
