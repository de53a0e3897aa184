"""docs/settings.md against the typed settings: every key, with its type and default, and nothing else."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

from attune.common.config import RoundSettings, ServerSettings, Settings, TrainSettings, load_settings
from attune.common.methods import registry as methods
from attune.common.methods.method import CustomMethod
from attune.common.methods.settings.aggregators import SETTINGS as AGGREGATORS
from attune.common.methods.settings.objectives import SETTINGS as OBJECTIVES
from attune.common.methods.settings.predictors import SETTINGS as PREDICTORS
from attune.common.models import registry as models
from attune.common.plan import DataSettings
from attune.fedserver.core import planning

SECTIONS: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "## Top level": ("", Settings),
    "## [data]": ("data", DataSettings),
    "## [train]": ("train", TrainSettings),
    "## [round]": ("round", RoundSettings),
    "## [server]": ("server", ServerSettings),
    **{f"### Aggregator {name}": ("method", struct) for name, struct in AGGREGATORS.items()},
    **{f"### Objective {name}": ("method", struct) for name, struct in OBJECTIVES.items()},
    **{f"### Predictor {name}": ("method", struct) for name, struct in PREDICTORS.items()},
    "### A method of your own": ("method", CustomMethod),
    **{f"### Model {name}": ("model", entry.options) for name, entry in models.MODELS.items()},
}
WORDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def type_words(kind: Any) -> str:
    """A type as the document writes it: `float > 0`, `"a" or "b"`, `list of int >= 1`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        limits = [m for m in arguments[1:] if isinstance(m, msgspec.Meta)]
        said = [f"{sign} {getattr(m, name):g}" for m in limits for name, sign in WORDS.items() if getattr(m, name) is not None]
        lengths = {m.min_length for m in limits} - {None}
        empty = "".join(", not empty" if least == 1 else f", {least} of them" for least in lengths)
        return f"{type_words(arguments[0])} {' and '.join(said)}".strip() + empty
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join("none" if part in (type(None), msgspec.UnsetType) else type_words(part) for part in arguments)
    if origin in (list, tuple):
        return f"list of {type_words(arguments[0])}"
    if origin is dict:
        return "table"
    return {int: "int", float: "float", bool: "bool", str: "string"}[kind]


def default_words(field: msgspec.structs.FieldInfo) -> str:
    """A default as TOML would have it; `none` and `required` where it has no word for it."""
    value = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
    if value is msgspec.NODEFAULT:
        return "required"
    if value is None or value is msgspec.UNSET:
        return "none"
    if isinstance(value, dict):
        return "empty"
    return msgspec.json.encode(value).decode() if not isinstance(value, float) else f"{value:g}"


def expected(section: str, struct: type[msgspec.Struct]) -> list[tuple[str, str, str]]:
    hints = get_type_hints(struct, include_extras=True)
    return [
        (f"{section}.{field.encode_name}".lstrip("."), type_words(hints[field.name]), default_words(field))
        for field in msgspec.structs.fields(struct)
    ]


@pytest.mark.parametrize("heading", SECTIONS)
def test_each_table_is_its_struct(heading: str, page: Any) -> None:
    section, struct = SECTIONS[heading]
    rows = [(row[0].strip("`"), row[1], row[2].strip("`")) for row in page("docs/settings.md").table(heading)]
    assert rows == expected(section, struct)


def test_no_section_is_undescribed(page: Any) -> None:
    described = [
        h for h in page("docs/settings.md").headings() if h.startswith(("## [", "### Agg", "### Obj", "### Pre", "### Mod"))
    ]
    unknown = set(described) - set(SECTIONS) - {"## [method]", "## [model]", "### Presets"}
    assert not unknown


def test_the_table_of_methods_is_the_registry(page: Any) -> None:
    rows = page("docs/settings.md").table("### Built-in methods")
    found = {row[0].strip("`"): (set(_keys(row[1])), dict(_pairs(row[2]))) for row in rows}
    wanted = {}
    for name in methods.names():
        method = methods.get(name)
        structs = [AGGREGATORS[method.aggregators[kind]] for kind in method.kinds if kind != "private"]
        structs += [OBJECTIVES[method.objective], PREDICTORS[method.predictor]]
        keys = set(itertools.chain.from_iterable(struct.__struct_fields__ for struct in structs))
        wanted[name] = (keys, _flat(method.defaults))
    assert found == wanted


def test_the_table_of_presets_is_the_registry(page: Any) -> None:
    rows = page("docs/settings.md").table("### Presets")
    found = {row[0].strip("`"): (dict(_pairs(row[1])), {"mlr": dict(_pairs(row[2]))}) for row in rows}
    every = {name: methods.get(name) for name in methods.names()}
    assert found == {
        name: (_flat(method.published), {model: _flat(more) for model, more in method.published_with.items()})
        for name, method in every.items()
        if method.published
    }


def _flat(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Sections of settings as the tables write them: a.b -> a value in TOML."""
    return {f"{s}.{k}": msgspec.json.encode(v).decode() for s, values in settings.items() for k, v in values.items()}


def test_the_examples_are_accepted(page: Any, tmp_path: Any) -> None:
    blocks = page("docs/settings.md").blocks("toml")
    assert len(blocks) >= 2
    for block in blocks:
        (tmp_path / "federation.toml").write_text(block, encoding="utf-8")
        settings = planning.resolve(load_settings(tmp_path / "federation.toml", [], {}))
        models.default_spec("images", (28, 28, 1), 10, 0, settings.model_name, settings.model_options)


def _keys(cell: str) -> Iterator[str]:
    return (word.strip("` ") for word in cell.split(",") if word.strip("` ") not in ("", "none"))


def _pairs(cell: str) -> Iterator[tuple[str, str]]:
    for word in _keys(cell):
        key, _, value = word.partition(" = ")
        yield key, value
