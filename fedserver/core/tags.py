"""Tags of devices, by which rounds are limited and views are grouped. That of the operator's token wins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from attune.common.plan import Profile, check_tag
from attune.fedserver.core.records import DeviceRecord

OF_TAG = "tag:"  # how `round.devices` names one
NO_TAG = "without a tag"


def of_token(token: str) -> str:
    """Return the ledger's name of the tag that a token gives."""
    return f"token {token}"


def of_device(name: str) -> str:
    """Return the ledger's name of the tag that a device has given itself."""
    return f"device {name}"


def tag_of(device: DeviceRecord, tags: Mapping[str, str]) -> str:
    """Return a device's tag; empty: it has none."""
    return tags.get(of_token(device.token), "") or tags.get(of_device(device.name), "")


def tags_told(profiles: Mapping[str, Profile], tags: Mapping[str, str]) -> dict[str, str]:
    """Return what devices say now of their tags, where it is not what the ledger has.

    Raises:
        SettingError: A peer's text is no tag.
    """
    said = {of_device(name): check_tag(profile.tag or "") for name, profile in profiles.items()}
    return {name: tag for name, tag in said.items() if tag != tags.get(name, "")}


def is_outside(devices: str, tag: str) -> bool:
    """Return whether rounds do without a device with this tag; devices: the setting `round.devices`."""
    return devices != "" and tag != devices.removeprefix(OF_TAG)


def by_tag(clients: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each tag its devices and the mean of their scores, for the status; empty if no device has a tag."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for client in clients:
        groups.setdefault(client.get("tag") or "", []).append(client)
    known = {tag: [one["accuracy"] for one in of if one["accuracy"] is not None] for tag, of in groups.items()}
    rows = [
        {"tag": tag or NO_TAG, "devices": len(groups[tag]), "accuracy": fmean(values) if values else None}
        for tag, values in sorted(known.items(), key=lambda group: (not group[0], group[0]))
    ]
    return rows if groups.keys() - {""} else []
