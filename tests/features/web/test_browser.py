"""The page in a real Chromium, of a real server with real devices: what people see, and the buttons' effects."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.harness import Federation, tabular_shard, until
from tests.features.web.conftest import Page
from tests.needs import Later

playwright = Later("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip
pytestmark = [pytest.mark.engines, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]
WAIT_MS = 60_000
SCRIPT = "<img src=x onerror=document.title='taken'>"


def status_of(federation):
    """Ask on another thread, because Playwright has an event loop on this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(federation.status).result()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def open_page(browser):
    """Return a function of address and width that opens a page, and returns it with its errors. Other hosts are blocked."""
    contexts = []

    def opened(address: str, width: int = 1280, dark: bool = False):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
        contexts.append(context)
        page, wrong = context.new_page(), []
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: message.type == "error" and wrong.append(message.text))
        page.on("request", lambda request: request.url.startswith("http://127.0.0.1:") or wrong.append(request.url))
        page.goto(address)
        return page, wrong

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Run a server with tables of two of three devices; it waits for the third before its first round."""
    folder = tmp_path_factory.mktemp("browser")
    found = Federation(folder)
    found.shards = [tabular_shard(folder / name, seed=seed, samples=40) for seed, name in enumerate(("anna", "ben", "cleo"))]
    flags = ("--method", "fedmcsa", "--rounds", "3", "--min-clients", "3")
    server = found.server(*flags, "--set", "round.evaluate_every=1", "--dashboard", "0")
    found.address = server.wait_for(r"^dashboard (\S+)")[1]
    yield found
    found.close()


def test_a_federation_from_its_first_device_to_its_end(federation, open_page):
    page, wrong = open_page(federation.address)
    assert "token" not in page.url, "the secret leaves the address"
    page.get_by_text("0 of at least 3 devices").wait_for()
    federation.devices(federation.shards[:2])
    page.get_by_text("2 of at least 3 devices").wait_for()
    waiting = page.locator("#timeline li").first
    assert "waiting" in waiting.inner_text()

    # A round opens only after "Resume".
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    page.locator(".tile", has_text="paused").wait_for()
    assert status_of(federation)["paused"]
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("button", name="Pause").wait_for()

    # A token by the button, with the keyboard only; the third device joins with it.
    page.get_by_role("button", name="New device").focus()
    page.keyboard.press("Enter")
    page.get_by_label("How many devices").fill("2")
    page.keyboard.press("Enter")
    line = page.locator("#join-line").inner_text().split()
    assert line[:3] == ["fedclient", "join", "--server"]
    page.keyboard.press("Escape")
    federation.device(federation.shards[2], "--token", line[-1])

    page.locator(".tile", has_text="done").wait_for()
    assert page.title().startswith("3/3 done")
    assert page.locator("#devices tbody tr").count() == 3
    dots = page.locator("#devices svg.dots").first.get_attribute("aria-label")
    said = {device["name"]: device for device in status_of(federation)["clients"]}
    first = page.locator("#devices tbody th").first.inner_text()
    assert f"own {said[first]['accuracy']:.3f}" in dots
    page.locator("#heat").wait_for()
    assert page.locator("#charts figure").count() == 4
    assert page.locator("#part tbody tr").count() == 3
    assert page.locator("#part i.trained").count() == 9
    assert wrong == []


def test_revoke_asks_first_and_shuts_the_device_out(federation, open_page):
    page, wrong = open_page(federation.address)
    button = page.get_by_role("button", name="Revoke ben")
    button.click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert not any(device["state"] == "revoked" for device in status_of(federation)["clients"])
    button.click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").get_by_text("ben is revoked").wait_for()
    assert [device["name"] for device in status_of(federation)["clients"] if device["state"] == "revoked"] == ["ben"]
    page.locator("#devices tr", has_text="ben").get_by_text("revoked by the operator").wait_for()
    assert wrong == []


@pytest.mark.parametrize("width", [360, 800, 1600])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_sticks_out_at_any_width(federation, open_page, width, dark):
    page, wrong = open_page(federation.address, width, dark)
    page.locator("#devices tbody tr").first.wait_for()
    page.locator("#heat").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert wrong == []


def test_every_control_has_a_name_and_headings_are_in_order(federation, open_page):
    page, _ = open_page(federation.address)
    page.locator("#devices tbody tr").first.wait_for()
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, select, input, [role=img]")].filter((each) => each.checkVisibility()
        && !(each.textContent.trim() || each.getAttribute("aria-label") || each.labels?.length)).map((e) => e.outerHTML)"""
    )
    assert nameless == []
    assert page.locator("h1").count() == 1
    assert page.locator("main").count() == 1
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"


def test_what_devices_say_is_text(served, open_page):
    """Use notes, faults and troubles, which are in a peer's words; names are checked when a device enrols."""
    from attune.features.web.facts import LoggedFault, PageFacts
    from attune.fedserver.core.messages import Record
    from attune.fedserver.core.records import DeviceRecord
    from attune.fedserver.federation.streams import DeviceStage, Span
    from attune.fedserver.ports.ledger import Snapshot
    from attune.fedserver.view.status import status
    from tests.features.web.conftest import TOKEN, Source

    device = DeviceRecord(SCRIPT, "key", connected=True, since=1.0, note=SCRIPT)
    said = status(Snapshot(None, None, Record(reason=SCRIPT), (device,), (), ()), set(), SCRIPT, [SCRIPT])
    spans = {SCRIPT: [Span(DeviceStage.WAITING, 1.0, SCRIPT)]}
    here = served(Source(PageFacts("server", said, [], spans=spans, faults=[LoggedFault(1.0, "error", SCRIPT)])))
    page, wrong = open_page(f"http://127.0.0.1:{here.port}/?token={TOKEN}")
    page.locator("#devices tbody tr").first.wait_for()
    assert page.get_by_text(SCRIPT).count() >= 4
    assert page.locator("img[src=x]").count() == 0
    assert "taken" not in page.title()
    assert wrong == []


def test_a_page_that_lost_its_server_says_so(served, open_page):
    """Check that the page also keeps its last facts."""
    from attune.features.web import serving
    from attune.features.web.page_tokens import Keyring
    from attune.features.web.serving import PageAddress
    from tests.features.web.conftest import TOKEN, Source
    from tests.features.web.test_guard import EMPTY

    listener = serving.bind(PageAddress())
    with serving.serving(listener, "127.0.0.1", Keyring(TOKEN), Source(EMPTY)):
        page, _ = open_page(f"http://127.0.0.1:{listener.getsockname()[1]}/?token={TOKEN}")
        page.get_by_text("no server runs").first.wait_for()
    page.get_by_text("The server does not answer").wait_for()


def test_the_view_for_programs_is_what_the_page_shows(federation):
    port, token = federation.address.removeprefix("http://127.0.0.1:").split("/?token=")
    shown = json.loads(Page(int(port)).ask("/api/view", token=token).text)
    assert shown["caller"]["actions"] == ["token", "revoke", "pause", "resume"]
    status = status_of(federation)
    assert [device["name"] for device in shown["devices"]] == [client["name"] for client in status["clients"]]
    assert until(lambda: Page(int(port)).ask("/readyz").status == 200, "it is ready")
    assert Path(federation.home / "dashboard-token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("task", "told", "interval"),
    [
        ("regression", "R2 (more is better: 1 is perfect, 0 no better than the mean). What is below 0 is drawn at 0.", False),
        ("multilabel", "Label accuracy (more is better: share of labels that are right).", True),
        ("classes", "a constant answer.", True),
    ],
)
def test_a_score_is_called_by_its_name_with_its_direction(tmp_path, served, open_page, task, told, interval):
    """Check at 390 points of width that no words of a figure are smaller than 9, and a curve's colour is beside its name."""
    import attune
    from attune.features.web.pages import of_home
    from attune.fedserver.home import ServerHome
    from tests.features.web.conftest import TOKEN

    x = np.random.default_rng(0).normal(size=(2, 60, 3)).astype("f4")
    y = {"regression": x[..., 0] * 5, "multilabel": (x > 0).astype(int), "classes": (x[..., 0] > 0).astype(int)}[task]
    shards = {name: (x[n], y[n]) for n, name in enumerate(("anna", "ben"))}
    said = {"round.evaluate_every": 1}
    home = tmp_path / "home"
    attune.simulate(shards, "fedavg", rounds=2, task=task, baseline="local", settings=said, home=home, progress=False)
    here = served(of_home(ServerHome(home / "server")))
    metric = {"regression": "R2", "multilabel": "Label accuracy", "classes": "Accuracy"}[task]
    page, wrong = open_page(f"http://127.0.0.1:{here.port}/?token={TOKEN}", width=390)
    page.locator("#devices tbody tr").first.wait_for()
    assert page.locator("#score-head").text_content() == f"{metric} on its own test part"
    key = page.locator("#key").text_content()
    assert key.endswith(told) and ("95 % interval" in key) == interval
    assert page.locator("#sort-score").text_content().lower() == metric.lower()
    heights = page.locator("#charts svg text").evaluate_all("all => all.map((each) => each.getBoundingClientRect().height)")
    assert len(heights) > 8 and min(heights) >= 9
    together = page.locator("#charts figcaption .together").evaluate_all(
        "all => all.map((each) => each.getClientRects().length)"
    )
    assert set(together) == {1}, "a name with its colour is one box, not broken between lines"
    assert wrong == []
