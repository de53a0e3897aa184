"""The arguments of a simulation as the settings of a federation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attune.common.config import Settings, by_section, convert, load_settings, merge

Method = str | Mapping[str, Any]


def overrides(
    devices: int,
    method: Method | None,
    model: str | None,
    rounds: int | None,
    seed: int | None,
    settings: Mapping[str, Any],
    config: str | Path | None = None,
) -> dict[str, Any]:
    """In the shape of a federation.toml; what was not given is absent, but for `min_clients`: all devices take part.

    settings: by section ({"round": {"clients": 5}}) or by dotted names ({"round.clients": 5}). config: a federation.toml; the
    `min_clients` in it is for its server. Errors: SettingError.
    """
    filed = load_settings(Path(config), (), {}) if config else {}
    found = merge(merge(filed, {"round": {"min_clients": devices}}), by_section(settings))
    given: dict[str, Any] = {"method": method if isinstance(method, Mapping) else {"name": method} if method else {}}
    given["model"] = {"name": model} if model else {}
    given["round"] = {"rounds": rounds} if rounds is not None else {}
    found = merge(found, given | ({} if seed is None else {"seed": seed}))
    convert(Settings, found, "")
    return found
