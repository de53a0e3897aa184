"""Names of devices, for people. A name proves nothing; the identity is the certificate's fingerprint."""

from __future__ import annotations

import hashlib
import re

from attune.common.errors import SettingError

MAX_LENGTH = 64
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_FOREIGN = re.compile(r"[^A-Za-z0-9._-]+")


def check_name(name: str, what: str = "a device", remedy: str = "Choose another with --name.") -> str:
    """Return `name` if it is allowed. Names become file names and arguments of commands.

    Args:
        name: The name to check.
        what: The thing to be named, for the error.
        remedy: What to do about a refused name, for the error.

    Raises:
        SettingError: The name has other characters, or is too long.
    """
    if not _NAME.fullmatch(name):
        raise SettingError(
            f"{name!r} cannot name {what}: use 1 to {MAX_LENGTH} letters (a-z), digits, '.', '_' and '-', "
            f"starting with neither '.' nor '-'. {remedy}"
        )
    return name


def joined_name(first: str, shard_name: str) -> str:
    """Return FIRST-SHARD with all characters that names cannot have replaced by '-'.

    A name of more than 64 characters ends in a digest of the whole name, so that two long names with the same beginning
    stay different.
    """
    parts = [_FOREIGN.sub("-", part).strip(".-") for part in (first, shard_name)]
    name = "-".join(part for part in parts if part) or "device"
    if len(name) > MAX_LENGTH:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name[: MAX_LENGTH - 9]}-{digest}"
    return check_name(name)
