"""Every method has its page, every page has its method, and every setting is explained."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from attune.common.methods.method import configure
from attune.common.methods.registry import get, names

PAGES = Path(__file__).parents[3] / "docs" / "methods"


def test_one_page_a_method_and_all_in_the_index():
    assert {page.stem for page in PAGES.glob("*.md")} - {"README"} == set(names())
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    assert all(f"[{name}.md]({name}.md)" in index for name in names())


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


def test_the_guide_to_methods_begins_with_the_race_and_with_when_not_to_federate():
    lines = (PAGES.parent / "choosing.md").read_text(encoding="utf-8").splitlines()
    heads = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    assert heads[:2] == ["Let a race choose", "When not to federate"]
