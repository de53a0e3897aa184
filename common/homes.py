"""Default folders of the server and the devices, and places that users name."""

from __future__ import annotations

import hashlib
import importlib.resources
import os
import re
from pathlib import Path

import platformdirs

from attune.common.errors import SettingError

HOMELESS = (
    "this user has no home folder: HOME is not set, and the system knows no user of this number. Set ATTUNE_HOME (or HOME) to "
    "a folder for Attune's state, and write paths without ~"
)


JOINED = "joined"


def is_homeless(error: RuntimeError) -> bool:
    """Return whether the error is that of a path with ~ for a user without a home folder."""
    return "home directory" in str(error)


def root() -> Path:
    """Return $ATTUNE_HOME, or the user's state folder for Attune.

    Raises:
        SettingError: The user has no home folder, as in a container.
    """
    given = os.environ.get("ATTUNE_HOME")
    try:
        return Path(given).expanduser() if given else platformdirs.user_state_path("attune")
    except RuntimeError:
        raise SettingError(HOMELESS) from None


def server_home() -> Path:
    """Return the default home of `fedserver`."""
    return root() / "server"


def devices_home() -> Path:
    """Return the folder of the default homes of all devices of this user."""
    return root() / "devices"


def shard_folder(shard: Path, foreign: str = r"[^\w.-]") -> str:
    """Return a readable folder name for a shard, different for every absolute path, without the characters of a pattern."""
    absolute = shard.expanduser().resolve()
    digest = hashlib.sha256(str(absolute).encode()).hexdigest()[:8]
    return f"{re.sub(foreign, '_', absolute.stem) or 'shard'}-{digest}"


def address_folder(host: str, port: int) -> str:
    """Return a folder name for a server's address."""
    return f"{re.sub(r'[^A-Za-z0-9.-]', '_', host)}_{port}"


def device_home(host: str, port: int, shard: Path) -> Path:
    """Return the default home of the device that trains on `shard` for the server at host:port."""
    place = devices_home() / address_folder(host, port)
    before = place / shard_folder(shard, "[^A-Za-z0-9._-]")  # as releases up to 0.2 called it
    return before if before.exists() else place / shard_folder(shard)


def joined_home(host: str, port: int) -> Path:
    """Return the folder in which `fedclient join` leaves an identity until a device with a shard takes it."""
    return devices_home() / address_folder(host, port) / JOINED


def place_of(where: str) -> Path:
    """Return the path for a text: a path, or "package:file" for a file of an installed package.

    Raises:
        ModuleNotFoundError: There is no such package.
    """
    package, _, name = where.partition(":")
    if name and not Path(where).exists():
        return Path(str(importlib.resources.files(package) / name))
    return Path(where).expanduser()
