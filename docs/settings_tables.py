"""The tables of docs/settings.md, from the typed settings: a setting's meaning is the comment above its field."""

from __future__ import annotations

import ast
import inspect
import io
import sys
import tokenize
import types
from collections.abc import Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from attune.common.config import PrivacySettings, RoundSettings, ServerSettings, Settings, TrainSettings
from attune.common.methods.method import DEFAULT_AGGREGATORS, CustomMethod, Method, PartKind
from attune.common.methods.registry import METHODS
from attune.common.methods.settings.aggregators import SETTINGS as AGGREGATORS
from attune.common.methods.settings.objectives import OBJECTIVES, PREDICTORS
from attune.common.models.registry import MODELS
from attune.common.plan import DataSettings
from attune.fedserver.choosing.candidates import AutoSettings
from docs.markdown import linked, table

Struct = type[msgspec.Struct]
LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
HEADS = ("setting", "type", "default", "meaning and limit cases")


def type_words(kind: Any) -> str:
    """Return a type as the page writes it: `float > 0`, `"a" or "b"`, `list of int >= 1`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        metas = [meta for meta in arguments[1:] if isinstance(meta, msgspec.Meta)]
        limits = [
            f"{sign} {getattr(m, name):g}" for m in metas for name, sign in LIMITS.items() if getattr(m, name) is not None
        ]
        lengths = {meta.min_length for meta in metas} - {None}
        size = "".join(", not empty" if least == 1 else f", {least} of them" for least in lengths)
        return f"{type_words(arguments[0])} {' and '.join(limits)}".strip() + size
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
    """Return a default as TOML would have it; `none`, `empty` or `required` where TOML has no word for it."""
    value = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
    if value is msgspec.NODEFAULT:
        return "required"
    if value is None or value is msgspec.UNSET:
        return "none"
    if isinstance(value, dict):
        return "empty"
    return f"{value:g}" if isinstance(value, float) else msgspec.json.encode(value).decode()


@cache
def _comments(module: ModuleType) -> dict[int, str]:
    """Return the comments that have a line of their own, by line."""
    source = inspect.getsource(module)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT and t.line.strip() == t.string}


def meanings(struct: Struct) -> dict[str, str]:
    """Return the comment above each field of a struct and of its bases, by the field's name."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if not issubclass(base, msgspec.Struct) or base is msgspec.Struct:
            continue
        module = sys.modules[base.__module__]
        comments, tree = _comments(module), ast.parse(inspect.getsource(module))
        [definition] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == base.__name__]
        for node in definition.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = _above(comments, node.lineno)
    return found


def _above(comments: Mapping[int, str], line: int) -> str:
    lines: list[str] = []
    while (line := line - 1) in comments:
        lines.insert(0, comments[line])
    return " ".join(lines)


def struct_table(struct: Struct, section: str = "") -> Iterator[str]:
    """Yield the table of a struct's settings; a sentence if it has none."""
    fields, said, hints = msgspec.structs.fields(struct), meanings(struct), get_type_hints(struct, include_extras=True)
    if not fields:
        yield "It has no settings."
        return
    rows = (
        (
            f"`{f'{section}.{field.encode_name}'.lstrip('.')}`",
            type_words(hints[field.name]),
            f"`{default_words(field)}`",
            linked(said[field.name].rstrip(".")),
        )
        for field in fields
    )
    yield from table(HEADS, rows)


def components(kind: str, structs: Mapping[str, Struct], section: str) -> Iterator[str]:
    """Yield a section for each component: its name, the first line of its docstring, and its settings."""
    for name, struct in structs.items():
        yield f"### {kind} {name}"
        yield ""
        yield linked((inspect.getdoc(struct) or "").partition("\n")[0])
        yield ""
        yield from struct_table(struct, section)
        yield ""


def built_in_methods() -> Iterator[str]:
    """Yield the table of methods: parts, components, and defaults that differ from the general ones."""
    rows = []
    for name, method in sorted(METHODS.shipped.items()):
        parts = ", ".join(f"`{selector}` {kind}{_other_aggregator(method, kind)}" for selector, kind in method.parts)
        defaults = ", ".join(f"`{key} = {value}`" for key, value in flat(method.defaults).items())
        rows.append((f"`{name}`", parts, f"{method.objective}, {method.predictor}", defaults or "none"))
    yield from table(("method", "parts", "objective, predictor", "defaults that differ from the general ones"), rows)


def _other_aggregator(method: Method, kind: PartKind) -> str:
    """Return the name of a part's aggregator, if it is not the usual one of its kind."""
    name = method.aggregators.get(kind)
    return f" (aggregator {name})" if name != DEFAULT_AGGREGATORS.get(kind) else ""


def presets() -> Iterator[str]:
    """Yield what `preset = "published"` sets, a list for each method that has it."""
    for name, method in sorted(METHODS.shipped.items()):
        if method.published:
            yield f"- `{name}`: {', '.join(f'`{key} = {value}`' for key, value in flat(method.published).items())}"
            for model, more in method.published_with.items():
                yield f"  (with `{model}` also {', '.join(f'`{key} = {value}`' for key, value in flat(more).items())})"


def flat(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return sections of settings as dotted names, each with its value in TOML."""
    return {f"{s}.{k}": msgspec.json.encode(v).decode() for s, values in settings.items() for k, v in values.items()}


REGIONS = {
    "settings": lambda: struct_table(Settings),
    "settings-data": lambda: struct_table(DataSettings, "data"),
    "settings-train": lambda: struct_table(TrainSettings, "train"),
    "settings-round": lambda: struct_table(RoundSettings, "round"),
    "settings-auto": lambda: struct_table(AutoSettings, "auto"),
    "settings-privacy": lambda: struct_table(PrivacySettings, "privacy"),
    "settings-server": lambda: struct_table(ServerSettings, "server"),
    "settings-methods": built_in_methods,
    "settings-presets": presets,
    "settings-custom": lambda: struct_table(CustomMethod, "method"),
    "settings-aggregators": lambda: components("Aggregator", AGGREGATORS.shipped, "method"),
    "settings-objectives": lambda: components("Objective", OBJECTIVES.shipped, "method"),
    "settings-predictors": lambda: components("Predictor", PREDICTORS.shipped, "method"),
    "settings-models": lambda: components("Model", {n: entry.options for n, entry in MODELS.shipped.items()}, "model"),
}
