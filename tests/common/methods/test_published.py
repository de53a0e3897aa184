"""The settings of the paper's runs on a method's page are accepted, and agree with the page."""

import re
from pathlib import Path

import pytest

from attune.common.config import load_settings
from attune.fedserver.core import planning

PAGES = Path(__file__).parents[3] / "docs" / "methods"
SNIPPET = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WITH_SNIPPETS = sorted(page.name for page in PAGES.glob("*.md") if SNIPPET.search(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", WITH_SNIPPETS)
def test_every_snippet_is_accepted(name, tmp_path):
    for snippet in SNIPPET.findall((PAGES / name).read_text(encoding="utf-8")):
        (tmp_path / "federation.toml").write_text(snippet, encoding="utf-8")
        settings = planning.resolve(load_settings(tmp_path / "federation.toml", [], {}))
        assert settings.method.name in (name.removesuffix(".md"), "custom")


def test_papers_are_among_them():
    assert {"fedtp.md", "fedmcsa.md"} <= set(WITH_SNIPPETS)
