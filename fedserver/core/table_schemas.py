"""One schema for the tables of all sites, merged from their proposals. Conflicts are named, and never decided by chance."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from attune.common.classes import look, look_alikes
from attune.common.errors import SettingError, ShapeMismatch
from attune.common.plan import FEWEST_DEVICES, Profile
from attune.common.schema import EMBEDDED_FROM, MAX_VALUES, OUTPUTS, ROLES, Column, Missing, Schema, name_and_unit
from attune.common.text import clean, listed

if TYPE_CHECKING:
    from attune.fedserver.surveys.fleet_statistics import FleetStatistics

_SHOWN = 5
COMMON = "a site lacks it"
OPTION = "--schema auto"
_COLUMN = "Leave it out (--columns common), or map it if it has another name elsewhere (--map THEIRS=OURS)"


def merge_proposals(proposals: Mapping[str, Schema], edits: Mapping[str, Column] | None = None, common: bool = False) -> Schema:
    """Return one schema of the sites' proposals: all columns, all values of categories.

    Args:
        proposals: By site.
        edits: Columns that the operator describes; they are taken as they are.
        common: Leave out a column that a site lacks, in place of filling it there like missing values.

    Raises:
        SettingError: Proposals contradict each other. The message has a line for each conflict: sites, column, remedy.
    """
    edits, conflicts = edits or {}, list(_conflicts_of_names(proposals, edits or {}))
    columns = {}
    for name in sorted({name for schema in proposals.values() for name in schema.columns} | edits.keys()):
        if name in edits:
            columns[name] = edits[name]
            continue
        sites = holders_of(name, proposals)
        if not sites:
            continue
        if conflict := conflict_in(name, sites):
            conflicts.append(conflict)
        else:
            columns[name] = merged(list(sites.values()), len(sites) < len(proposals), common)
    outputs = {name: column.kind for name, column in columns.items() if column.kind in OUTPUTS}
    for kind in OUTPUTS:
        names = {site: schema.with_kind(kind) for site, schema in proposals.items()}
        if len({*map(tuple, names.values())}) > 1 and all(len(of) == 1 for of in names.values()):
            groups = _by_value({site: name for site, (name,) in sorted(names.items())})
            first, *others = sorted(groups.items(), key=lambda group: -len(group[1]))
            ways = "; ".join(f"{name} in {listed(sites, _SHOWN)}" for name, sites in (first, *others))
            remedy = f"give it one name, such as by --map {others[0][0]}={first[0]} in {listed(others[0][1], _SHOWN)}"
            conflicts.append(f"the {kind} has several names, {ways}: {remedy}")
            outputs = {name: of for name, of in outputs.items() if of != kind}
    for site in sorted(proposals):
        lacking = [f"{name}, the {kind}" for name, kind in outputs.items() if name not in proposals[site].columns]
        conflicts += [f"{site}: no column {output}: add it, or leave this site out" for output in lacking]
    if conflicts:
        many = f"{len(conflicts)} conflicts" if len(conflicts) > 1 else "a conflict"
        raise SettingError(
            f"{many} between the sites' tables. Change the tables, or describe the columns in a TOML file with sections "
            "[data.columns.NAME]:\n" + "\n".join(clean(line) for line in conflicts)
        )
    return Schema.of(columns)


def telling(schema: Schema, proposals: Mapping[str, Schema]) -> dict[str, list[str]]:
    """Return, by site, which features tell it from all others: a model can learn a site by them, and who reads it sees that.

    Args:
        schema: The merged schema.
        proposals: By site.
    """
    said: dict[str, list[str]] = {name: [] for name in proposals}
    for name in schema.used if len(proposals) > 1 else ():
        holders = holders_of(name, proposals)
        lacking = proposals.keys() - holders.keys()
        sites_with = Counter(value for column in holders.values() for value in set(column.values))
        are_known = all(column.values for column in holders.values())
        for site, column in holders.items():
            if len(holders) == 1:
                said[site].append(f"{name} tells this site: no other site has the column. {_COLUMN}")
            elif column.kind == "category" and are_known and all(sites_with[value] == 1 for value in column.values):
                said[site].append(f"{name} tells this site: no other site has its values. Leave it out, or map the values")
        if len(lacking) == 1 and len(holders) > 1:
            said[min(lacking)].append(f"{name} tells this site: it alone lacks the column. {_COLUMN}")
    return said


def with_ranges(schema: Schema, statistics: FleetStatistics) -> Schema:
    """Return the schema with the usual range of each number that has none, by quantiles of at least FEWEST_DEVICES devices."""
    columns = dict(schema.columns)
    for name, column in schema.columns.items():
        given = statistics.columns.get(name)
        if column.kind != "number" or column.range is not None or given is None or given.devices < FEWEST_DEVICES:
            continue
        values = (given.quantiles or {}).values()
        if values and min(values) < max(values):
            columns[name] = msgspec.structs.replace(column, range=(min(values), max(values)))
    return Schema.of(columns)


def without_schema(name: str) -> ShapeMismatch:
    """Return the error for a device whose table is in no schema, although this federation has one."""
    return ShapeMismatch(f"{name} reads its table without a schema, and this federation has one: start it with {OPTION}")


def in_schema(profile: Profile, schema: Schema) -> Profile:
    """Return a profile with the features of a schema if the device proposes one; other profiles as they are."""
    if profile.proposal is msgspec.UNSET:
        return profile
    names = schema.feature_names
    return msgspec.structs.replace(
        profile, shape=(len(names),), column_names=names, columns=None, schema=schema, proposal=msgspec.UNSET
    )


def holders_of(name: str, proposals: Mapping[str, Schema]) -> dict[str, Column]:
    """Return how each site describes a column, without sites that lack it or leave it out."""
    columns = {site: proposals[site].columns[name] for site in sorted(proposals) if name in proposals[site].columns}
    return {site: column for site, column in columns.items() if not (column.kind == "text" and column.left_out)}


def _by_value(sites: Mapping[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for site, value in sites.items():
        groups[value].append(site)
    return groups


def conflict_in(name: str, sites: Mapping[str, Column]) -> str:
    """Describe how sites contradict each other about a column; empty if they do not."""
    kinds = _by_value({site: column.kind for site, column in sites.items()})
    if not _is_compatible(sites):
        ways = "; ".join(f"{kind} in {listed(names, _SHOWN)}" for kind, names in kinds.items())
        return f"{name}: {ways}: write it in one way, or say its `kind`"
    if kinds.keys() == {"yes/no"} and (opposed := _opposed_words(sites)):
        ways = "; ".join(f"{words} in {listed(names, _SHOWN)}" for words, names in opposed.items())
        return f"{name}: a word means no at one site and yes at another, {ways}: list its `values`, the word for no first"
    units = _by_value({site: column.unit for site, column in sites.items() if column.unit})
    if len(units) > 1:
        ways = "; ".join(f"{unit} in {listed(names, _SHOWN)}" for unit, names in units.items())
        return f"{name}: the units differ, {ways}: convert the column at one side, and say its `unit`"
    strokes = {site: column.form for site, column in sites.items() if column.form != "year-month-day"}
    forms = _by_value(strokes)
    if len(forms) > 1:
        ways = "; ".join(f"{form} in {listed(names, _SHOWN)}" for form, names in forms.items())
        return f"{name}: dates are written in different orders, {ways}: write them as 2024-12-31 at one side"
    values = {value for column in sites.values() for value in column.values}
    if len(values) > MAX_VALUES:
        return f"{name}: {len(values)} values in {listed(list(sites), _SHOWN)}, more than {MAX_VALUES}: leave it out"
    if "category" in kinds and (alike := look_alikes(values)):
        having = {value: [site for site, column in sites.items() if value in column.values] for value in values}
        groups = [" and ".join(f"{value!r} ({listed(having[value], _SHOWN)})" for value in group) for group in alike]
        remedy = f"write or map each in one way (--map {name}:THEIRS=OURS), or list its `values`"
        return f"{name}: values look alike, {listed(groups, _SHOWN)}: {remedy}"
    return ""


def _is_compatible(sites: Mapping[str, Column]) -> bool:
    kinds = {column.kind for column in sites.values()}
    if kinds == {"number", "yes/no"}:
        return all(column.values == ["0", "1"] for column in sites.values() if column.kind == "yes/no")
    return len(kinds) == 1 or kinds == {"category", "yes/no"}


def _opposed_words(sites: Mapping[str, Column]) -> dict[str, list[str]]:
    """Return the sites by their words for no and yes if a word has both meanings; nothing otherwise."""
    no, yes = ({column.values[at].casefold() for column in sites.values()} for at in (0, 1))
    return _by_value({site: " and ".join(column.values) for site, column in sites.items()}) if no & yes else {}


def merged(columns: Sequence[Column], is_lacking: bool, common: bool) -> Column:
    """Return one column of those of several sites, which do not contradict each other."""
    kinds = {column.kind for column in columns}
    kind = "number" if kinds == {"number", "yes/no"} else "category" if "category" in kinds else columns[0].kind
    if kind in ROLES:
        return columns[0]
    values = sorted({value for column in columns for value in column.values}) if kind == "category" else []
    if kind == "yes/no":
        values = list(Counter(tuple(column.values) for column in columns).most_common(1)[0][0])
    left_out = COMMON if is_lacking and common else ""
    if all(column.left_out for column in columns):
        left_out = columns[0].left_out
    policies = {column.missing for column in columns}
    missing: Missing = "refuse" if "refuse" in policies else "indicator" if "indicator" in policies or is_lacking else "fill"
    return Column(
        kind,
        unit=next((column.unit for column in columns if column.unit), ""),
        missing=missing if kind not in ("text", "identifier") else "fill",
        values=values,
        encoding="embedding" if len(values) >= EMBEDDED_FROM else "one-hot",
        range=next((column.range for column in columns if column.range is not None), None),
        origin=columns[0].origin,
        form=next((column.form for column in columns if column.form != "year-month-day"), "year-month-day"),
        left_out=left_out,
    )


def _conflicts_of_names(proposals: Mapping[str, Schema], edits: Mapping[str, Column]) -> list[str]:
    """Return a line for each two columns that seem to be one: no site has both, and only the unit or the writing differs."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted({name for schema in proposals.values() for name in schema.columns} - edits.keys()):
        groups[look(name_and_unit(name)[0]).replace("_", " ")].append(name)
    lines = []
    for names in groups.values():
        sites = {name: [site for site in sorted(proposals) if name in proposals[site].columns] for name in names}
        if len(names) > 1 and len({site for there in sites.values() for site in there}) == sum(map(len, sites.values())):
            ways = " and ".join(f"{name} ({listed(there, _SHOWN)})" for name, there in sites.items())
            lines.append(f"{ways} seem to be one column: convert its unit and rename it (--map THEIRS=OURS), or describe both")
    return lines
