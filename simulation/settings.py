"""The arguments of a simulation as the settings of a federation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attune.common.config import Settings, by_section, convert, merge

Method = str | Mapping[str, Any]


def overrides(
    devices: int, method: Method | None, model: str | None, rounds: int | None, seed: int | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """In the shape of a federation.toml; what was not given is absent, but for `min_clients`: all devices take part.

    settings: by section ({"round": {"clients": 5}}) or by dotted names ({"round.clients": 5}). Errors: SettingError.
    """
    found = merge({"round": {"min_clients": devices}}, by_section(settings))
    given: dict[str, Any] = {"method": method if isinstance(method, Mapping) else {"name": method} if method else {}}
    given["model"] = {"name": model} if model else {}
    given["round"] = {"rounds": rounds} if rounds is not None else {}
    found = merge(found, given | ({} if seed is None else {"seed": seed}))
    convert(Settings, found, "")
    return found
