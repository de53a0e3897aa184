"""The file of a site's owner, site.toml: options of `fedclient` that the command line may not override."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from attune.common.config import read_toml
from attune.common.errors import SettingError, nearest

# The options that may stand in the file: the owner's decisions. A key is the option's name without the dashes before it.
KEYS = (
    "columns", "map", "decimal", "disclose", "metrics", "schema", "units",
    "max-epsilon", "max-delta", "min-samples", "min-devices", "authority", "signer",
    "only-model", "only-run", "allow-model", "allow-plugin", "max-epochs", "max-model-bytes", "max-order", "max-orders",
    "direct-host", "proxy", "proxy-credentials", "only-when", "nice", "max-memory", "max-disk", "max-rate",
)  # fmt: skip
NOT_EMPTY = ("columns", "only-model", "only-run")  # without a name such an option allows everything


def decided(path: Path, ctx: click.Context) -> dict[str, Any]:
    """Return the options that a site's file decides, by the names of the command's parameters.

    Raises:
        SettingError: The file cannot be read, a key is unknown, a value is not one of the option's, or the command line has the
            same option.
    """
    values, parameters = read_toml(path), _parameters(ctx.command)
    if unknown := sorted(set(values) - set(KEYS)):
        raise SettingError(f"{path}: unknown key {unknown[0]!r}{nearest(unknown[0].replace('_', '-'), KEYS)}")
    options = {}
    for key, value in values.items():
        option = parameters[key]
        name = str(option.name)
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise SettingError(f"{path} decides {key}: leave --{key} out")
        options[name] = _converted(path, key, value, option, ctx)
    return options


def _parameters(command: click.Command) -> dict[str, click.Option]:
    return {
        name.removeprefix("--"): parameter
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in parameter.opts
    }


def _converted(path: Path, key: str, value: Any, option: click.Option, ctx: click.Context) -> Any:
    """Return a value of the file as the option has it."""
    option_value: Any  # None: it is of another type
    if key == "columns":  # a list in the file, which is easier to read
        option_value, wanted = ",".join(map(_quoted, value)) if _is_texts(value) else None, "a list with at least one name"
    elif option.multiple:
        option_value, wanted = (
            value if _is_texts(value) else None,
            "a list with at least one text" if key in NOT_EMPTY else "a list of texts",
        )
    elif isinstance(option.type, click.types.IntParamType):
        option_value, wanted = value if type(value) is int else None, "a whole number"
    elif isinstance(option.type, click.types.FloatParamType):
        option_value, wanted = value if type(value) in (int, float) and math.isfinite(value) else None, "a finite number"
    else:
        option_value, wanted = value if isinstance(value, str) else None, "a text"
    if option_value is None or (key in NOT_EMPTY and not value):
        raise SettingError(f"{path}: {key} is {wanted}, not {value!r}")
    try:
        return option.type_cast_value(ctx, option_value)
    except click.BadParameter as error:
        raise SettingError(f"{path}: {key}: {error.message}") from None


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _quoted(name: str) -> str:
    """Return a name as a cell of CSV, as --columns reads it."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"'
