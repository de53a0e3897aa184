"""Options of `fedclient shard` that do not apply to the given file are refused, so that none is ignored in silence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from attune.common.errors import SettingError
from attune.fedclient.data.makers.make_options import LENGTH, MakeOptions
from attune.fedclient.read_options import PLAIN

Form = Literal["table", "text column", "image column", "images", "text"]
_NAMES: dict[Form, str] = {
    "table": "a table of numbers",
    "text column": "a column with text",
    "image column": "a dataset of images",
    "images": "a folder of images",
    "text": "a text",
}
_TABLE = {"--label", "--split", "--task", "--missing-words"}
_APPLICABLE: dict[Form, set[str]] = {
    "table": {*_TABLE, "--columns", "--apart", "--group", "--key", "--missing", "--classes", "--schema"},
    "text column": {*_TABLE, "--text", "--length", "--tokenizer", "--classes"},
    "image column": {*_TABLE, "--size", "--grey", "--classes"},
    "images": {"--size", "--grey", "--classes", "--missing-words"},
    "text": {"--length", "--tokenizer", "--classes"},  # --classes has its own message there
}


def check_applicable(path: Path, form: Form, options: MakeOptions) -> None:
    """Check that every given option says something about data of this form.

    Raises:
        SettingError: Some do not. The message names all of them.
    """
    wrong = [name for name in _given(options) if name not in _APPLICABLE[form]]
    if wrong:
        raise SettingError(f"{path} is {_NAMES[form]}, and {', '.join(wrong)} does not apply to it: leave it out")


def _given(options: MakeOptions) -> list[str]:
    """Return the names of the options that do not have their defaults."""
    default = MakeOptions(PLAIN)
    table = options.table
    given = {
        "--label": replace(table, label="", threshold=None, written="") != table,
        **{f"--{name.replace('_', '-')}": getattr(table, name) != getattr(PLAIN, name) for name in _OF_TABLES},
        "--schema": table.schema is not None or table.proposes,
        "--text": options.text != default.text,
        "--length": options.length != LENGTH,
        "--tokenizer": options.tokenizer != default.tokenizer,
        "--size": options.size != default.size,
        "--grey": options.grey != default.grey,
        "--classes": options.classes != default.classes,
    }
    return [name for name, is_given in given.items() if is_given]


_OF_TABLES = ("columns", "apart", "split", "group", "key", "missing", "missing_words", "task")
