"""`fedserver dashboard`: pages of a server's home or of a folder of results, and the address of a running server's page."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from attune.common.errors import SettingError
from attune.common.plan import run_name
from attune.fedserver.federation.streams import DeviceActivity
from attune.fedserver.home import ServerHome
from attune.fedserver.lab.arrays import ArrayFile
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.stores.inbox import Inbox
from attune.fedserver.view.summary import NOT_ONE, check_format, read_rows
from attune.fedserver.web import serving
from attune.fedserver.web.condensed import CondensedReports
from attune.fedserver.web.facts import AttentionMatrix, HomeFacts, PageFacts, PageSource
from attune.fedserver.web.live import remembered
from attune.fedserver.web.page_tokens import Keyring, new_token, own_token
from attune.fedserver.web.serving import PageAddress
from attune.fedserver.web.sources import FaultFeed, LedgerSource, no_attention, read_attention


class StoppedHome:
    """ProcessView of a home that this process does not serve."""

    troubles: Sequence[str] = ()

    def __init__(self, home: ServerHome) -> None:
        self.standby = home.standby()
        self._home, self.activity, self.feed = home, DeviceActivity(time.time), FaultFeed()

    @property
    def address(self) -> str | None:
        return self._home.served_at()

    def reported(self, snapshot: Snapshot) -> Collection[str]:
        return Inbox(self._home.open().blobs).names(*snapshot.record.open_orders)

    def stuck(self) -> str:
        return ""  # no step runs in this process

    def trouble(self) -> str:
        return "" if self.address else "no server runs on this home"


def of_home(home: ServerHome) -> LedgerSource:
    """Return the source of a home's page.

    Raises:
        HomeMismatch: There is no home.
    """
    home.require()
    return LedgerSource("home", home.open(), StoppedHome(home), home)


class FolderSource:
    """Source of the page of an exported or saved run; its constructor raises SettingError for another folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            check_format(folder)
            self._status: Mapping[str, Any] = msgspec.json.decode((folder / "status.json").read_bytes())
        except (OSError, msgspec.MsgspecError) as error:
            raise SettingError(NOT_ONE.format(folder, error)) from None
        self._condensed = CondensedReports()
        self._condensed.add(read_rows(folder))

    def look(self) -> PageFacts:
        home = HomeFacts(run=run_name(self._status.get("run") or ""))
        return PageFacts("folder", self._status, self._condensed.lines, self._condensed.totals, home=home)

    def attention(self, unit: str) -> AttentionMatrix:
        path = self._folder / "attention.safetensors"
        if not path.exists():
            return no_attention(self._status["method"])
        with ArrayFile(path) as file:
            return read_attention(file, unit)

    def stuck(self) -> str:
        return ""  # no step runs

    def trouble(self) -> str:
        return "this is a finished run: no device is served"

    def close(self) -> None:
        """No-op: no file is open."""


def running_page(home: ServerHome) -> str | None:
    """Return the address of the running server's page; None if no server runs, or it has no page."""
    place = remembered(home) if home.exists() and home.is_served() else None
    if place is None or not place.answers():
        return None
    return page_url(home, own_token(home))


def page_url(home: ServerHome, token: str) -> str | None:
    """Return the address of a home's page, where it was served last, with a token; None if it never was."""
    place = remembered(home)
    return place.url(token, home.snapshot().settings.server.advertise) if place else None


def source_of(folder: Path) -> PageSource:
    """Return the source for a home or for a folder of results.

    Raises:
        SettingError: The folder is neither.
    """
    home = ServerHome(folder)
    if home.exists():
        return of_home(home)
    if not folder.is_dir():
        raise SettingError(f"{folder} is no folder: name a server's home, or what `fedserver export` has written")
    return FolderSource(folder)


def show(folder: Path, place: PageAddress, say: Callable[[str], None]) -> None:
    """Serve the page of a folder until Ctrl-C.

    Raises:
        PortInUse: Another process listens on the port.
        SettingError: The folder is neither a home nor a folder of results.
        HomeMismatch: The home is damaged.
    """
    source = source_of(folder)
    listener, token = serving.bind(place), new_token()
    with serving.serving(listener, place.host, Keyring(token), source):
        say(f"dashboard {serving.url_of(listener, token)}")
        say("Ctrl-C ends it")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return
