"""Tokens of the page: the home's own, one that only reads /metrics, and those of viewers and operators by name."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import filelock
import msgspec

from attune.common.durable import write_file
from attune.common.errors import HomeMismatch, SettingError, nearest
from attune.common.identity.names import check_name
from attune.common.text import from_json, newer_format
from attune.fedserver.home import ServerHome

LOG = logging.getLogger("fedserver")
OWN_FILE, FILE, METRICS_FILE = "dashboard-token", "dashboard-tokens.json", "metrics-token"
VERSION = 1
MOST = 200  # named tokens of a home; each is compared with every request
SHORTEST = 24  # characters of a token for metrics that somebody else has written

Role = Literal["metrics", "viewer", "operator"]


@dataclass(frozen=True)
class PageCaller:
    """Holder of a token. `name`: empty for the home's own token and for that of /metrics."""

    name: str
    role: Role

    @property
    def by(self) -> str:
        """Words of the audit log for what this caller does."""
        return f"operator {self.name} on the dashboard" if self.name else "operator on the dashboard"


class NamedToken(msgspec.Struct, frozen=True):
    """Token of a viewer or an operator, as the home keeps it."""

    name: str
    role: Literal["viewer", "operator"]
    sha256: str
    made_at: float  # unix time


class _TokenFile(msgspec.Struct, frozen=True):
    version: int
    tokens: tuple[NamedToken, ...]


def new_token() -> str:
    """Return a new random token of 192 bits."""
    return secrets.token_urlsafe(24)


def own_token(home: ServerHome) -> str:
    """Return the home's own token. A new home gets one, and so does a home whose token is damaged: the operator sees it."""
    path = home.path / OWN_FILE
    there = path.exists()
    token = path.read_text(encoding="ascii", errors="replace").strip() if there else ""
    if not _is_token(token):
        if there:
            LOG.warning("%s was damaged: the dashboard has a new token", path)
        token = new_token()
        write_file(path, token.encode())
    return token


def _is_token(text: str) -> bool:
    return len(text) >= SHORTEST and text.isascii() and text.isprintable() and " " not in text


def metrics_token(path: Path, mode: str) -> str:
    """Return the token that only reads /metrics, from its file; a missing file is made.

    Args:
        path: The file.
        mode: Its permissions, such as "0640".

    Raises:
        SettingError: The file cannot be read or made, or holds no token.
    """
    try:
        if not path.exists():
            if not path.parent.is_dir():
                raise SettingError(f"setting server.metrics_token_file: there is no folder {path.parent}: make it first")
            write_file(path, new_token().encode())
        if path.stat().st_mode & 0o777 != int(mode, 8):
            path.chmod(int(mode, 8))
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"setting server.metrics_token_file: {path} cannot be used ({error})") from None
    if not _is_token(token):
        raise SettingError(
            f"setting server.metrics_token_file: {path} holds no token: remove it, and the server makes a new one"
        )
    return token


def listed(home: ServerHome) -> tuple[NamedToken, ...]:
    """Return the tokens of viewers and operators, the oldest first.

    Raises:
        HomeMismatch: Their file is damaged, or of a later release.
    """
    path = home.path / FILE
    try:
        text = path.read_bytes()
        if newer := newer_format(text, path, "fedserver"):
            raise HomeMismatch(newer)
        return from_json(text, _TokenFile).tokens
    except FileNotFoundError:
        return ()
    except (msgspec.DecodeError, OSError) as error:
        raise HomeMismatch(f"{path} is damaged ({error}): remove it, and give out new tokens") from None


def add(home: ServerHome, name: str, role: Literal["viewer", "operator"], by: str) -> str:
    """Make a token for somebody, and return it. The running server admits it at once; the audit log says who made it: `by`.

    Raises:
        SettingError: The name cannot be, or it has a token.
        HomeMismatch: As for `listed`.
    """
    check_name(name)
    with _alone(home):
        before = listed(home)
        if any(token.name == name for token in before):
            raise SettingError(f"{name!r} has a token: `fedserver dashboard-token remove {name}` first")
        if len(before) >= MOST:
            raise SettingError(f"there are {MOST} tokens, and no more can be: remove one first")
        token = new_token()
        home.note("dashboard token made", by, name=name, role=role)
        _write(home, (*before, NamedToken(name, role, _digest(token), time.time())))
    return token


def remove(home: ServerHome, name: str, by: str) -> None:
    """Remove somebody's token. The running server refuses it at once, and ends the pages that are open with it.

    Raises:
        SettingError: Nobody of this name has a token.
        HomeMismatch: As for `listed`.
    """
    with _alone(home):
        before = listed(home)
        names = [token.name for token in before]
        if name not in names:
            raise SettingError(f"{name!r} has no token{nearest(name, names)}: `fedserver dashboard-token list` shows who has")
        home.note("dashboard token removed", by, name=name)
        _write(home, (token for token in before if token.name != name))


def _alone(home: ServerHome) -> filelock.BaseFileLock:
    return filelock.FileLock(home.path / f"{FILE}.lock", mode=0o600)


def _write(home: ServerHome, tokens: Iterable[NamedToken]) -> None:
    write_file(home.path / FILE, msgspec.json.encode(_TokenFile(VERSION, tuple(tokens))))


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


class Keyring:
    """All tokens that admit to one page. The tokens by name are read again when their file has changed.

    Args:
        token: The token of the page's operator.
        metrics: The token that only reads /metrics; empty: there is none.
        home: The home with tokens by name, if any.
    """

    def __init__(self, token: str, metrics: str = "", home: ServerHome | None = None) -> None:
        self._fixed = [(_digest(token), PageCaller("", "operator"))]
        if metrics:
            self._fixed.append((_digest(metrics), PageCaller("", "metrics")))
        self._home, self._named = home, list[tuple[str, PageCaller]]()
        self._read: tuple[int, int, int] | None = None  # state of the file as it was read last
        self.files_key = token.encode()

    def caller_of(self, given: str) -> PageCaller | None:
        """Return who holds this token; None: nobody. The time does not tell which token was nearest."""
        digest, holder = _digest(given), None
        for known, caller in (*self._fixed, *self._by_name()):
            if hmac.compare_digest(digest, known):
                holder = caller
        return holder

    def knows(self, caller: PageCaller) -> bool:
        """Return whether this caller still has a token."""
        return any(known == caller for _, known in (*self._fixed, *self._by_name()))

    def _by_name(self) -> list[tuple[str, PageCaller]]:
        if self._home is None:
            return []
        try:
            stat = (self._home.path / FILE).stat()
        except OSError:
            state = None
        else:
            state = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        if state != self._read:
            try:
                self._named = [(token.sha256, PageCaller(token.name, token.role)) for token in listed(self._home)]
            except HomeMismatch as error:
                self._named = []
                LOG.error("dashboard: nobody is admitted by name: %s", error)
            self._read = state
        return self._named
