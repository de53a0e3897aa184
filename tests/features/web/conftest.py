"""A page of made-up facts, served for real, and one simulated federation for several tests."""

import asyncio
import http.client
import json
import threading
from dataclasses import dataclass, field

import pytest

from attune.features.web import serving
from attune.features.web.facts import AttentionMatrix, PageFacts
from attune.features.web.page_tokens import Keyring
from attune.features.web.pages import Actions
from attune.features.web.serving import PageAddress

TOKEN = "a-token-of-tests"


@dataclass
class Source:
    """Source with the facts that a test gives."""

    facts: PageFacts
    why: str = ""
    stands: str = ""
    shown: AttentionMatrix = field(default_factory=lambda: AttentionMatrix((), (), (), "", "none"))

    def look(self):
        return self.facts

    def attention(self, unit):
        return self.shown

    def stuck(self):
        return self.stands

    def trouble(self):
        return self.why

    def close(self):
        pass


class Page:
    """Client of a page that is served here. `ask` sends exactly the given request."""

    def __init__(self, port):
        self.port = port
        self.own = f"127.0.0.1:{port}"

    def ask(self, path, method="GET", body=None, token=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            sent["authorization"] = f"Bearer {token}"
        connection.putrequest(method, path, skip_host="host" in sent)
        data = json.dumps(body).encode() if body is not None else b""
        for name, value in ({"content-length": str(len(data))} | sent).items():
            connection.putheader(name, value)
        connection.endheaders(data)
        answer = connection.getresponse()
        answer.text = answer.read().decode()
        connection.close()
        return answer


@pytest.fixture
def loop():
    """Return an event loop that runs on another thread, for buttons."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


@pytest.fixture
def served():
    """Return a function that serves a source with actions as a Page; all end with the test."""
    import contextlib

    with contextlib.ExitStack() as stack:

        def serve(source, actions: Actions | None = None, keys: Keyring | None = None):
            listener = serving.bind(PageAddress())
            stack.enter_context(serving.serving(listener, "127.0.0.1", keys or Keyring(TOKEN), source, actions))
            return Page(listener.getsockname()[1])

        yield serve
