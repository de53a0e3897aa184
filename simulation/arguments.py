"""Settings and shards of a federation, from the arguments of a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

from attune.common.config import by_section, checked, load_settings, merge
from attune.common.errors import AttuneError, SettingError, ShapeMismatch, ShardError, together
from attune.common.identity.names import check_name
from attune.common.plan import DataSettings
from attune.fedclient import shards
from attune.fedclient.data import findings
from attune.fedclient.data.describe import Proposal, describe
from attune.fedclient.data.lazy_shard import LazyShard, shard_of
from attune.fedclient.data.samples import table_of
from attune.fedclient.read_options import PLAIN, ReadOptions
from attune.fedserver.core import data_form
from attune.fedserver.core.table_schemas import merge_proposals, telling

NOTHING = DataSettings()
MethodArgument = str | Mapping[str, Any]
Shards = str | Path | Sequence[str | Path] | Mapping[str, Any]


def overrides(
    devices: int,
    method: MethodArgument | None,
    model: str | None,
    rounds: int | str | None,
    seed: int | None,
    settings: Mapping[str, Any],
    config: str | Path | None = None,
) -> dict[str, Any]:
    """Return the given settings in the shape of a federation.toml.

    `min_clients` is the number of devices, unless `settings` has it. Other settings that were not given are absent.

    Args:
        devices: Number of devices.
        method: Name of the method, or its settings with its name.
        model: Name of the model.
        rounds: Number of rounds.
        seed: Seed of every random draw.
        settings: By section ({"round": {"clients": 5}}) or by dotted names ({"round.clients": 5}).
        config: Path of a federation.toml. All other arguments win over it; its `min_clients` is ignored.

    Raises:
        SettingError: A setting is unknown or wrong, or asks for a tag.
    """
    from_file = load_settings(Path(config), (), {}) if config else {}
    merged = merge(merge(from_file, {"round": {"min_clients": devices}}), by_section(settings))
    given: dict[str, Any] = {"method": method if isinstance(method, Mapping) else {"name": method} if method else {}}
    given["model"] = {"name": model} if model else {}
    given["round"] = {"rounds": rounds} if rounds is not None else {}
    merged = merge(merged, given | ({} if seed is None else {"seed": seed}))
    if merged["round"].get("devices"):
        raise SettingError(
            "round.devices is for enrolled devices, and those of a simulation have no tags: give their shards alone"
        )
    return checked(merged)


def data_by_name(given: Shards) -> dict[str, Any]:
    """Return the path or the data of each device, by the device's name, without reading them.

    Args:
        given: As in `attune.simulate`.

    Raises:
        ShardError: There are none.
        SettingError: A device cannot have this name.
    """
    if isinstance(given, Mapping):
        by_name = _named(given)
    else:
        paths = shards.expand([str(path) for path in ([given] if isinstance(given, (str, Path)) else given)])
        by_name = dict(zip(shards.labels(paths), paths, strict=True))
    if not by_name:
        raise ShardError("there are no shards: a federation needs the data of at least one device")
    return by_name


def warnings_of(members: Mapping[str, LazyShard]) -> list[str]:
    """Return a line for each thing that is strange about a shard, once with the devices that it is about.

    What is strange about all shards together is said when the plan is made, as over the network.
    """
    return findings.lines({name: shard.warnings for name, shard in members.items()})


def _named(given: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the data by checked names. A whole number is the name that its digits write.

    Raises:
        SettingError: A device cannot have this name, or two have the same one.
    """
    by_name: dict[str, Any] = {}
    for key, value in given.items():
        if not isinstance(key, str | Integral) or isinstance(key, bool):
            raise SettingError(f"a device is called {key!r}, a {type(key).__name__}; names are text or whole numbers")
        name = check_name(str(key))
        if name in by_name:
            raise SettingError(f"two devices are called {name}: a whole number and a text; rename one of them")
        by_name[name] = value
    return by_name


def read_shards(
    by_name: Mapping[str, Any], table: ReadOptions = PLAIN, declared: DataSettings = NOTHING
) -> dict[str, LazyShard]:
    """Read the shards of all devices, and check that they fit together.

    Args:
        by_name: As `data_by_name` returns them. A LazyShard stays as it is.
        table: The task, and how tables are read.
        declared: What the settings say about the data.

    Raises:
        AttuneError: Shards cannot be read or used, or do not fit together. One error names all problems of all shards.
    """
    tokens, warnings = declared.kind == "tokens" or declared.vocabulary > 0, dict[str, tuple[str, ...]]()
    if declared.schema is not None or table.proposes:
        proposals = {} if declared.schema is not None else _proposals_of(by_name, table)
        of_sites = {name: proposal.schema for name, proposal in proposals.items()}
        schema = declared.schema or merge_proposals(of_sites)
        table, of_one = replace(table, schema=schema, proposes=False), telling(schema, of_sites)
        warnings = {name: (*of_one[name], *proposal.warnings) for name, proposal in proposals.items()}
    members: dict[str, LazyShard] = {}
    problems: dict[str, Exception] = {}
    for name, value in by_name.items():
        try:
            shard = value if isinstance(value, LazyShard) else shard_of(name, value, table, tokens)
            members[name] = replace(shard, warnings=(*warnings.get(name, ()), *shard.warnings)) if name in warnings else shard
            data_form.check_possible(members[name].profile, name)
            data_form.check_declared(members[name].profile, declared, name)
        except AttuneError as error:
            problems[name] = error
    profiles = {name: shard.profile for name, shard in members.items() if name not in problems}
    agreement = data_form.agree(profiles, form=declared)
    problems |= agreement.odd
    if agreement.tie:
        problems["the shards"] = ShapeMismatch(agreement.tie)
    if problems:
        raise together(problems)
    return members


def _proposals_of(by_name: Mapping[str, Any], table: ReadOptions) -> dict[str, Proposal]:
    """Return the schema that each site's table proposes, with what is strange about the table.

    Raises:
        AttuneError: A table cannot be read.
    """
    proposals, problems = {}, dict[str, Exception]()
    for name, path in by_name.items():
        try:
            if not isinstance(path, str | Path):
                raise SettingError("a schema is made of files with tables, and these data are none")
            proposals[name] = describe(table_of(Path(path), table), table)
        except AttuneError as error:
            problems[name] = error
    if problems:
        raise together(problems)
    return proposals
