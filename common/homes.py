"""The default folders of server and devices: one rule for both sides."""

from __future__ import annotations

import hashlib
import importlib.resources
import os
import re
from pathlib import Path

import platformdirs


def root() -> Path:
    """$ATTUNE_HOME, or the user's state folder for Attune."""
    given = os.environ.get("ATTUNE_HOME")
    return Path(given).expanduser() if given else platformdirs.user_state_path("attune")


def server_home() -> Path:
    """The default home of `fedserver`."""
    return root() / "server"


def devices_home() -> Path:
    """The folder that holds the default homes of all devices of this user."""
    return root() / "devices"


def shard_folder(shard: Path) -> str:
    """A folder name for a shard: readable, and different for every absolute path."""
    absolute = shard.expanduser().resolve()
    digest = hashlib.sha256(str(absolute).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', absolute.stem) or 'shard'}-{digest}"


def address_folder(host: str, port: int) -> str:
    """A folder name for a server's address."""
    return f"{re.sub(r'[^A-Za-z0-9.-]', '_', host)}_{port}"


def device_home(host: str, port: int, shard: Path) -> Path:
    """The default home of the device that trains on `shard` for the server at host:port."""
    return devices_home() / address_folder(host, port) / shard_folder(shard)


def joined_home(host: str, port: int) -> Path:
    """Where `fedclient join` leaves an identity until the first shard takes it."""
    return devices_home() / address_folder(host, port) / "joined"


def place_of(where: str) -> Path:
    """A path, or "package:file" for what an installed package carries. Errors: ModuleNotFoundError."""
    package, _, name = where.partition(":")
    if name and not Path(where).exists():
        return Path(str(importlib.resources.files(package) / name))
    return Path(where).expanduser()
