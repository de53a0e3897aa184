"""Whether the federation helps a device, by what the device has reported of its test samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attune.common.paired import Pair, findings_of, pairs_of
from attune.common.statistics import Finding, overall


def gain_of(reported: Mapping[str, Any]) -> float | None:
    """What federation gives the device: by how much its own model is right more often than one that it trained alone.

    Where it trained none, than the common model. A difference of scores on the same test samples; None: not compared.
    """
    pair = _last(reported)
    return None if pair is None else pair.difference


def gain_between(reported: Mapping[str, Any]) -> tuple[float, float] | None:
    """The 95 % interval of `gain_of`."""
    pair = _last(reported)
    return None if pair is None else pair.interval()


def _last(reported: Mapping[str, Any]) -> Pair | None:
    """Against the rival that `gain_of` names."""
    return next(reversed(pairs_of(reported)), None) if reported.get("test_samples") else None


def verdict_of(reported: Mapping[str, Any]) -> Finding | None:
    """reported: metrics by name, as in the status. Its own model against its rivals; None where nothing was compared.

    The same test as on the device (fedclient.work.comparison).
    """
    pairs = pairs_of(reported)
    return overall(findings_of(pairs).values()) if pairs else None
