"""The page behind a proxy that maps a path such as /fl/ to it: every address that it asks for lies below the path."""

from __future__ import annotations

import re
from urllib.parse import urljoin, urlsplit

import pytest

from attune.fedserver.core.messages import Record
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.view.status import status
from attune.fedserver.web.facts import PageFacts
from tests.fedserver.web.conftest import TOKEN, Source

LINK = re.compile(r'(?:href|src)="([^"#]+)"')
IMPORT = re.compile(r'from "([^"]+)"')
CALL = re.compile(r"""\b(?:ask|request|follow|fetch|EventSource)\(\s*["'`]([^"'`$?]*/[^"'`$?]*)""")


@pytest.mark.parametrize(
    "opened", ["https://fed.example/", "https://fed.example/fl/", "https://hub.example/user/ada/proxy/50052/"]
)
def test_every_address_of_the_page_lies_below_its_path(served, opened):
    page = served(Source(PageFacts("server", status(Snapshot(None, None, Record(), (), (), ()), set()), [])))
    prefix = urlsplit(opened).path

    def ask(address: str, **more: str):
        parts = urlsplit(address)
        assert parts.netloc == urlsplit(opened).netloc and parts.path.startswith(prefix), address
        query = f"?{parts.query}" if parts.query else ""
        return page.ask(f"/{parts.path.removeprefix(prefix)}{query}", **more)

    entered = ask(f"{opened}?token={TOKEN}&unit=a")
    assert entered.status == 303
    address = urljoin(opened, entered.headers["location"])
    assert address == f"{opened}?unit=a#token={TOKEN}"
    assert urljoin(opened, ask(f"{opened}?token={TOKEN}").headers["location"]) == f"{opened}#token={TOKEN}"
    links = [urljoin(address, link) for link in LINK.findall(ask(address, token=TOKEN).text)]
    scripts = {link for link in links if link.endswith(".js")}
    assert len(links) >= 4 and scripts
    seen: dict[str, str] = {}
    while more := scripts - seen.keys():
        for script in more:
            answer = ask(script, token=TOKEN)
            assert answer.status == 200, script
            seen[script] = answer.text
            scripts |= {urljoin(script, name) for name in IMPORT.findall(seen[script])}
    assert all(ask(link, token=TOKEN).status == 200 for link in links)
    called = {urljoin(address, path) for text in seen.values() for path in CALL.findall(text)}
    assert called == {f"{opened}api/{name}" for name in ("events", "attention", "actions/")}
