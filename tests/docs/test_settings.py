"""docs/settings.md: its examples are accepted, and every setting in the generated tables has a meaning."""

from __future__ import annotations

from collections.abc import Iterator
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
from docs.settings_tables import meanings, type_words


def structs() -> Iterator[type[msgspec.Struct]]:
    yield from (Settings, DataSettings, TrainSettings, RoundSettings, ServerSettings, CustomMethod)
    for registry in (AGGREGATORS, OBJECTIVES, PREDICTORS):
        yield from registry.shipped.values()
    yield from (entry.options for entry in models.MODELS.shipped.values())


@pytest.mark.parametrize("struct", list(structs()), ids=lambda struct: struct.__name__)
def test_every_setting_has_its_meaning_above_it(struct: type[msgspec.Struct]) -> None:
    said = meanings(struct)
    assert [field.name for field in msgspec.structs.fields(struct) if not said[field.name]] == []


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
