"""Every method has its page, every page has its method, and every setting is explained."""

import re
from pathlib import Path

import msgspec
import pytest

from attune.common.methods.method import configure
from attune.common.methods.registry import get, names

PAGES = Path(__file__).parents[3] / "docs" / "methods"


def test_every_method_has_a_page_and_all_are_in_the_index():
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    pages = dict(re.findall(r"^\| `([^`]+)`.*\| \[[^]]+\]\(([^)]+)\) \|$", index, re.MULTILINE))
    assert set(pages) == set(names())
    assert {page.name for page in PAGES.glob("*.md")} - {"README.md"} == set(pages.values())
    assert all(f"`{name}`" in (PAGES / page).read_text(encoding="utf-8") for name, page in pages.items())
    assert all(page in (f"{name}.md", "ablations.md") for name, page in pages.items())


@pytest.mark.parametrize(
    "name", ["fedavg", "fedprox", "fedmcsa", "fedtp", "per-fedavg", "pfedme", "ditto", "fedrep", "fedavg+ft"]
)
def test_every_setting_is_in_the_table_of_its_page(name):
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    options = configure(get(name), {})
    for struct in (*options.aggregators.values(), options.objective, options.predictor):
        for field in msgspec.structs.fields(struct):
            assert f"`method.{field.encode_name}`" in page


def test_the_page_on_privacy_names_every_method_that_cannot_train_with_noise():
    lines = (PAGES.parent / "privacy.md").read_text(encoding="utf-8").splitlines()
    [row] = [line for line in lines if line.startswith("| per-fedavg")]
    named = {name.strip() for name in row.split("|")[1].split(",")}
    assert named == {name for name in names() if configure(get(name), {}).objective.not_private}


def test_the_guide_to_methods_begins_with_when_not_to_federate_and_with_the_race():
    lines = (PAGES.parent / "choosing.md").read_text(encoding="utf-8").splitlines()
    heads = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    assert heads[:2] == ["Alone, one round, or training together", "Let a race choose"]
