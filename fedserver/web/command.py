"""`fedserver dashboard`: the address of a running server's page, or a page of what is finished."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from attune.common.errors import SettingError
from attune.fedserver.home import Home
from attune.fedserver.web import serving
from attune.fedserver.web.facts import Source
from attune.fedserver.web.finished import OfFolder, of_home
from attune.fedserver.web.live import remembered, token_of
from attune.fedserver.web.serving import Place


def running_page(home: Home) -> str | None:
    """The address of the page that the running server of this home serves; None if none runs, or it has no page."""
    place = remembered(home) if home.exists() and home.is_served() else None
    if place is None or not place.answers():
        return None
    return place.url(token_of(home))


def source_of(folder: Path) -> Source:
    """Of a home, or of a folder of results. Errors: SettingError for another folder."""
    home = Home(folder)
    if home.exists():
        return of_home(home)
    if not folder.is_dir():
        raise SettingError(f"{folder} is no folder: name a server's home, or what `fedserver export` has written")
    return OfFolder(folder)


def show(folder: Path, place: Place, say: Callable[[str], None]) -> None:
    """Serves a page of this folder until Ctrl-C. Errors: PortInUse, SettingError, HomeMismatch."""
    source = source_of(folder)
    listener, token = serving.bind(place), serving.new_token()
    with serving.serving(listener, place.host, token, source):
        say(f"dashboard {serving.url_of(listener, token)}")
        say("Ctrl-C ends it")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return
