"""The address of a home's page is known only where the page was served."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from attune.fedserver.home import ServerHome
from attune.fedserver.web import pages


def test_a_page_has_an_address_once_it_was_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = ServerHome(tmp_path)
    home.create()
    assert pages.page_url(home, "secret") is None
    settings = SimpleNamespace(server=SimpleNamespace(advertise="here:1"))
    monkeypatch.setattr(ServerHome, "snapshot", lambda _: SimpleNamespace(settings=settings))
    place = SimpleNamespace(url=lambda token, advertise: f"https://there/{advertise}#{token}")
    monkeypatch.setattr(pages, "remembered", lambda _: place)
    assert pages.page_url(home, "secret") == "https://there/here:1#secret"
