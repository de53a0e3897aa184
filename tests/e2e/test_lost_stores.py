"""A store that is lost is a trouble of the server, whichever call met it, until a call of that store succeeds."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from attune.features.web.page_tokens import METRICS_FILE
from attune.fedserver.cli import cli
from tests import engines
from tests.chaos.site import Shape, Site
from tests.features.web.conftest import Page

pytestmark = pytest.mark.engines
PATIENCE_S = 180.0
SHAPE = Shape(
    "fedavg", 2,
    ("method.name=fedavg", "model.name=mlr", "round.rounds=1000", "train.local_steps=3", "server.inline_bytes=0"), hosted=True,
)  # fmt: skip


def kill() -> Callable[[], None]:
    """Kill the S3 store; return what starts it again."""
    engines.weed().kill()
    return engines.weed().start


def change_keys() -> Callable[[], None]:
    """Let the S3 store know other keys than the server's, as if these had expired; return what takes the old ones back."""
    store = engines.weed()
    keys = store.folder / "s3.json"
    before = keys.read_text()

    def restart(with_keys: str) -> None:
        store.kill()
        keys.write_text(with_keys)
        store.start()

    restart(before.replace(engines.SECRET, "another"))
    return lambda: restart(before)


def status(site: Site) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(CliRunner().invoke(cli, ["status", "--json", "--home", str(site.server_home)]).output)
    return answer


@pytest.mark.parametrize("lose", [kill, change_keys])
def test_a_lost_store_is_a_trouble_until_it_is_back(tmp_path: Path, lose: Callable[[], Callable[[], None]]) -> None:
    """Before, devices read of it, and the operator nothing: no trouble, and a server that said that it was ready."""
    words = [*engines.remote_words(), "--dashboard", "0"]
    with Site(tmp_path / "site", SHAPE, PATIENCE_S) as site:
        site.server_words = words
        site.start_server()
        found = re.search(r"dashboard http://127\.0\.0\.1:(\d+)/", site.server.text)
        assert found is not None
        page = Page(int(found[1]))
        site.start_device("fleet")
        site.until(lambda: site.snapshot().record.round > 0, "a round to close")
        assert page.ask("/readyz").status == 200
        bring_back = lose()
        try:
            site.until(lambda: status(site)["troubles"], "the trouble to be said")
            [trouble] = status(site)["troubles"]
            assert trouble.startswith(f"blobs: {words[3]} cannot be used now (")
            assert "<" not in trouble, "words for a person, and no XML"
            # The reason may change meanwhile, from a store that is not there to one that does not know the keys.
            site.until(lambda: [page.ask("/readyz").text.rstrip("\n")] == status(site)["troubles"], "both to say the same")
            assert page.ask("/readyz").status == 503
            token = (site.server_home / METRICS_FILE).read_text()
            assert "attune_troubles 1.0" in page.ask("/metrics", token=token).text
        finally:
            bring_back()
        closed = site.snapshot().record.round
        site.until(lambda: status(site)["troubles"] == [], "the trouble to be over")
        assert page.ask("/readyz").status == 200
        site.until(lambda: site.snapshot().record.round > closed, "rounds to close again")
        site.stop_server()
        assert not site.tracebacks(), site.server


def test_verify_beside_a_server_that_closes_rounds_finds_no_damage(tmp_path: Path) -> None:
    """Before, each run named blobs that a later round had replaced meanwhile as missing."""
    with Site(tmp_path / "site", SHAPE, PATIENCE_S) as site:
        site.server_words = engines.remote_words()
        site.start_server()
        site.start_device("fleet")
        site.until(lambda: site.snapshot().record.round > 0, "a round to close")
        closed = site.snapshot().record.round
        for _ in range(6):
            result = CliRunner().invoke(cli, ["verify", "--home", str(site.server_home)])
            assert result.output == f"{site.server_home} is whole\n", result.exception
        assert site.snapshot().record.round > closed, "the server went on meanwhile"
        site.stop_server()
        assert not site.tracebacks(), site.server
