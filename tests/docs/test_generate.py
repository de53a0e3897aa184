"""Generated regions of the documents agree with the code and the result files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attune.common.config import RoundSettings, ServerSettings, Settings, TrainSettings, load_settings
from attune.common.methods.method import CustomMethod
from attune.common.methods.settings.aggregators import SETTINGS as AGGREGATORS
from attune.common.methods.settings.objectives import OBJECTIVES, PREDICTORS
from attune.common.models import registry as models
from attune.common.plan import DataSettings
from attune.fedserver.core import planning
from benchmarks import measure
from docs import generate
from docs.settings_tables import meanings, type_words


@pytest.mark.parametrize("path", generate.pages(), ids=lambda path: str(path.relative_to(generate.ROOT)))
def test_generated_regions_are_current(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert generate.filled(text) == text, "run: python -m docs.generate"


def test_every_region_stands_in_one_page() -> None:
    named = [match["name"] for path in generate.pages() for match in generate.REGION.finditer(path.read_text(encoding="utf-8"))]
    assert sorted(named) == sorted(generate.REGIONS)


def test_a_region_is_replaced_and_the_text_around_it_stays() -> None:
    page = "before\n<!-- generated: packages -->\nthis is old\n<!-- end generated -->\nafter"
    made = generate.filled(page)
    assert made.startswith("before\n<!-- generated: packages -->\n\n| package | its job |")
    assert "| `common/wire` |" in made
    assert "this is old" not in made
    assert made.endswith("<!-- end generated -->\nafter")


# --- docs/settings.md: its examples are accepted, and every setting in the generated tables has a meaning


def structs() -> Iterator[type[msgspec.Struct]]:
    yield from (Settings, DataSettings, TrainSettings, RoundSettings, ServerSettings, CustomMethod)
    for registry in (AGGREGATORS, OBJECTIVES, PREDICTORS):
        yield from registry.shipped.values()
    yield from (entry.options for entry in models.MODELS.shipped.values())


@pytest.mark.parametrize("struct", list(structs()), ids=lambda struct: struct.__name__)
def test_every_setting_has_its_meaning_above_it(struct: type[msgspec.Struct]) -> None:
    said = meanings(struct)
    silent = [field.name for field in msgspec.structs.fields(struct) if not said[field.name]]
    assert not silent


def test_limits_are_part_of_a_type_as_the_page_writes_it() -> None:
    assert type_words(msgspec.structs.fields(TrainSettings)[1].type) == "float >= 0 and < 1"
    assert type_words(bool | None) == "bool or none"


def test_the_examples_are_accepted(page: Any, tmp_path: Any) -> None:
    blocks = page("docs/settings.md").blocks("toml")
    assert len(blocks) >= 2
    for block in blocks:
        (tmp_path / "federation.toml").write_text(block, encoding="utf-8")
        settings = planning.resolve(load_settings(tmp_path / "federation.toml", [], {}))
        models.default_spec("images", (28, 28, 1), 10, 0, settings.model_name, settings.model_options)


# --- words of the product: the first one of each docstring, one name for one thing, and files of a readable length


@pytest.fixture(scope="module")
def verbs(root: Path) -> frozenset[str]:
    return measure.read_verbs(root / measure.VERBS)


def test_the_verbs_are_sorted_and_imperative(root: Path, verbs: frozenset[str]) -> None:
    lines = (root / measure.VERBS).read_text(encoding="utf-8").splitlines()
    assert lines == sorted(set(lines))
    assert not verbs & measure.NO_FIRST_WORDS
    assert [verb for verb in verbs if f"{verb}s" in verbs or f"{verb}es" in verbs] == []
