"""Proposal of a schema for one site's table, with warnings. What it holds may leave the device: see `Proposal`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import msgspec

from attune.common.classes import NO, YES, look_alikes
from attune.common.errors import SettingError, ShardError
from attune.common.plan import FEWEST_ROWS
from attune.common.schema import LONGEST_NAME, MAX_VALUES, ORIGIN, OUTPUTS, Column, ColumnKind, DateForm, Schema, name_and_unit
from attune.common.text import listed
from attune.fedclient.data import cautions
from attune.fedclient.data import cells as cell_rules
from attune.fedclient.data.cells import is_missing
from attune.fedclient.data.samples import outputs_of, split_column
from attune.fedclient.data.stand_ins import days_of, has_strokes, is_compact
from attune.fedclient.data.table import USUAL_LABELS, DataTable
from attune.fedclient.data.table_encoder import value_of
from attune.fedclient.read_options import PLAIN, ReadOptions

FEW_VALUES, PER_VALUE = 20, 5  # text with so few different values, or so many rows for each, is a category
LONGEST_VALUE = 100  # characters
MOSTLY = 0.5  # share of missing values from which a column is mostly missing
RARE = f"none of its values occurs in {FEWEST_ROWS} rows"
CONSTANT = "it is constant at every site that has it"
_IDENTIFIER = re.compile(r"(^|[^a-z])(id|ids|key|uuid|guid|mrn|pid|nr|no|number|case|ssn|fallnummer|nummer)$", re.IGNORECASE)
_TWO_ORDERS = (
    "is read as text: some of its dates can only be day/month/year, and others only month/day/year. Write all as 2024-12-31"
)
_SAY_WORDS = "If such a word means a missing value, say --missing-words usual,WORD"
_LEADING_ZERO = re.compile(r"-?0[0-9]+")


@dataclass(frozen=True)
class Proposal:
    """Schema that one site proposes.

    The schema holds names, kinds and units of columns, values of categories that occur in at least FEWEST_ROWS rows, and
    whether so many rows lack a value. It may leave the device. The warnings stay here.
    """

    schema: Schema
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class DescribedColumn:
    """A column, and what a person should know about it."""

    column: Column
    warnings: tuple[str, ...] = ()


def describe(table: DataTable, options: ReadOptions = PLAIN) -> Proposal:
    """Return the schema that a site proposes for its table.

    Args:
        table: The table.
        options: Which columns have a role, which are left out, and which alone may be used.

    Raises:
        SettingError: A column that the options name does not exist, or no column is left for features.
    """
    roles = _roles(table, options)
    columns: dict[str, Column] = {}
    warnings: list[str] = []
    for name in table.names:
        if options.columns and name not in options.columns and name not in roles:
            continue
        present = [cell for cell in table.cells[name] if not is_missing(cell, table.words)]
        if name in roles:
            columns[name] = roles[name]
            continue
        if not present:
            warnings.append(f"{name} has no value at all: it counts as a column that this site lacks")
            continue
        described = _described(name, present, len(table))
        if name in table.index:
            described = DescribedColumn(Column("identifier"), (f"{name} only numbers the rows",))
        columns[name] = described.column
        warnings += described.warnings
    if not any(column.kind in OUTPUTS for column in columns.values()):
        warnings.append("no column is the label: say --label NAME")
    used = {name: column for name, column in columns.items() if column.is_feature}
    outputs = [name for name, column in columns.items() if column.kind in OUTPUTS]
    warnings = [*table.notes, *cautions.of_schema(table, used, outputs), *_of_outcomes(table, options), *warnings]
    return Proposal(Schema.of(columns, f"the schema of {table.path}"), tuple(warnings))


def _of_outcomes(table: DataTable, options: ReadOptions) -> list[str]:
    """Return what is strange about the columns to predict, or why they cannot be used; nothing if there are none."""
    try:
        y = outputs_of(table, options)
    except (ShardError, SettingError) as error:
        return [str(error)] if options.label else []
    options = options.for_columns(table.names)
    names = [table.label_column(name) for name in options.labels()]
    y = y if options.task == "classes" else y.reshape(len(y), -1)
    of_cells = cautions.of_labels(table, names[0], options.threshold) if options.task == "classes" else []
    return [*of_cells, *cautions.of_outcomes(y, y[:0], options.task, names, False)]


def _roles(table: DataTable, options: ReadOptions) -> dict[str, Column]:
    options = options.for_columns(table.names)
    outputs = [name for name in options.labels() if name] or [name for name in table.names if name.lower() in USUAL_LABELS][:1]
    kinds: Sequence[ColumnKind] = ("time", "event") if options.task == "survival" else ["label"] * len(outputs)
    table.require(*outputs, *filter(None, (options.group, options.key)), *options.apart)
    roles = {name: Column(kind) for name, kind in zip(outputs, kinds, strict=True)}
    if split := split_column(table, options):
        roles[split] = Column("split")
    if options.group:
        roles[options.group] = Column("group")
    if options.key:
        roles.setdefault(options.key, Column("identifier"))
    return {name: Column("text", left_out="left out by this site") for name in options.apart} | roles


def _described(name: str, present: Sequence[Any], rows: int) -> DescribedColumn:
    """Return the kind of a column by its cells that are not missing, at least one."""
    described = _kind_of(name, present)
    column, warnings = described.column, list(described.warnings)
    missing = rows - len(present)
    unit = name_and_unit(name)[1]
    if unit and column.kind == "number" and unit.isprintable() and len(unit) <= LONGEST_NAME:
        column = msgspec.structs.replace(column, unit=unit)
        warnings.append(f"{name} names its unit, {unit}: all sites must use it")
    if column.is_feature and len(set(map(str, present))) == 1 and missing < FEWEST_ROWS:
        warnings.append(f"{name} is constant: it says nothing here")
        if rows >= FEWEST_ROWS:  # its value may be the site's name
            column = msgspec.structs.replace(column, values=[], left_out=CONSTANT)
    if missing > MOSTLY * rows:
        warnings.append(f"{name} is mostly missing: {missing} of {rows} rows lack it")
    if column.is_feature and missing >= FEWEST_ROWS:
        column = msgspec.structs.replace(column, missing="indicator")
    return DescribedColumn(column, tuple(warnings))


def _kind_of(name: str, present: Sequence[Any]) -> DescribedColumn:
    try:
        texts = [value_of(cell) for cell in present]
    except ValueError as error:
        return DescribedColumn(Column("text"), (f"{name} is left out: it holds {error}",))
    spelled = {text.casefold(): text for text, _ in reversed(Counter(texts).most_common())}  # the most common spelling
    words = spelled.keys()
    if len(words) == 2 and len(words & NO) == 1 and len(words & YES) == 1:
        low, high = sorted(sorted(words), key=lambda word: word in YES)
        return DescribedColumn(Column("yes/no", values=[spelled[low], spelled[high]]))
    numbers = sum(_is_number(cell) for cell in present)
    compact = sum(map(is_compact, present))
    if numbers == len(present) > compact:
        described = _number(name, present, texts)
        others = [str(cell) for cell in present if not is_compact(cell)]
        return described if 2 * compact <= len(present) else _with_dates(described, name, present, compact, others)
    if (form := _date_form(present)) is not None:
        warnings = [f"{name} holds dates: days since {ORIGIN} are the feature"]
        if form != "year-month-day" and not _is_clear(present):
            warnings.append(f"{name} could be day/month/year or month/day/year: day/month/year is assumed; check `form`")
        return DescribedColumn(Column("date", form=form), tuple(warnings))
    if numbers and all(_is_number(cell) or _is(cell, cell_rules.limit_of) for cell in present):
        return DescribedColumn(Column("number"))
    if all(_is_number(cell) or cell_rules.has_decimal_comma(cell) for cell in present):
        return _of_texts(name, texts, [f"{name} {cell_rules.COMMAS}"])
    others = [str(cell) for cell in present if not (_is_date(cell, "day/month/year") or _is_date(cell, "month/day/year"))]
    if not others:
        return _of_texts(name, texts, (f"{name} {_TWO_ORDERS}",))
    if 2 * len(others) < len(present):
        return _with_dates(_of_texts(name, texts, ()), name, present, len(present) - len(others), others)
    mixed = () if not numbers else (f"{name} mixes kinds: {numbers} of {len(present)} cells are numbers, {_others(present)}",)
    return _of_texts(name, texts, mixed)


def _number(name: str, present: Sequence[Any], texts: Sequence[str]) -> DescribedColumn:
    values = [cell_rules.number_of(cell) for cell in present]
    whole = all(value.is_integer() for value in values)
    different = len(set(texts)) == len(texts) >= FEWEST_ROWS
    serial = whole and different and max(values) - min(values) < 2 * len(values)
    if different and whole and (serial or _IDENTIFIER.search(name)):
        return DescribedColumn(Column("identifier"), (_identifier_note(name),))
    return DescribedColumn(Column("number"))


def _of_texts(name: str, texts: Sequence[str], warnings: Sequence[str]) -> DescribedColumn:
    counts = Counter(texts)
    if len(counts) == len(texts) >= FEWEST_ROWS and not any(" " in text for text in texts):
        return DescribedColumn(Column("identifier"), (*warnings, _identifier_note(name)))
    few = len(counts) <= max(FEW_VALUES, len(texts) // PER_VALUE) and len(counts) <= MAX_VALUES
    if not few or max(map(len, counts)) > LONGEST_VALUE:
        coded = [text for text in counts if 2 * sum(map(str.isdigit, text)) >= sum(map(str.isalnum, text)) > 0]
        note = f"{name} holds free text, which is left out"
        if 2 * len(coded) > len(counts) and not warnings:
            note = f"{name} holds text such as {coded[0][:40]!r}, which is left out: docs/tables.md has the forms of numbers"
        return DescribedColumn(Column("text"), (*warnings, note))
    notes = list(warnings)
    common = sorted(text for text, count in counts.items() if count >= FEWEST_ROWS and text.isprintable())
    if rare := len(counts) - len(common):
        notes.append(f"{name} has {rare} values that fewer than {FEWEST_ROWS} rows have: they stay here, and count as `other`")
    if alike := [" and ".join(map(repr, group)) for group in look_alikes(counts)]:
        notes.append(f"values of {name} look alike: {listed(alike)}. Write each value in one way")
    return DescribedColumn(Column("category", values=common, left_out="" if common else RARE), tuple(notes))


def _with_dates(
    described: DescribedColumn, name: str, present: Sequence[Any], count: int, others: Sequence[str]
) -> DescribedColumn:
    """Return what is known of a column, and that most of its cells are dates."""
    such = f" such as {next(str(cell) for cell in present if is_compact(cell))}" if described.column.kind == "number" else ""
    note = (
        f"{name} mixes kinds: {count} of {len(present)} cells are dates{such}, others are "
        f"{listed(sorted({text[:40] for text in others}), 4)}. {_SAY_WORDS}"
    )
    return DescribedColumn(described.column, (note, *described.warnings))


def _is_number(cell: Any) -> bool:
    if isinstance(cell, str) and _LEADING_ZERO.fullmatch(cell.strip()):
        return False  # a code, whose zeros must stay
    return _is(cell, cell_rules.number_of)


def _is(cell: Any, parse: Callable[[Any], float]) -> bool:
    try:
        parse(cell)
    except (ValueError, OverflowError):
        return False
    return True


def _date_form(present: Sequence[Any]) -> DateForm | None:
    """Return the form in which all cells are dates, or None."""
    forms: tuple[DateForm, ...] = (
        ("day/month/year", "month/day/year") if any(map(has_strokes, present)) else ("year-month-day",)
    )
    return next((form for form in forms if all(_is_date(cell, form) for cell in present)), None)


def _is_date(cell: Any, form: DateForm) -> bool:
    return _is(cell, lambda cell: days_of(cell, date.fromisoformat(ORIGIN), form))


def _is_clear(present: Sequence[Any]) -> bool:
    """Return whether dates with strokes can be read in one order of day and month only."""
    return not all(_is_date(cell, "day/month/year") and _is_date(cell, "month/day/year") for cell in present)


def _others(present: Sequence[Any]) -> str:
    others = sorted({str(cell)[:40] for cell in present if not _is_number(cell)})
    return f"others are {listed(others, 4)}. {_SAY_WORDS}"


def _identifier_note(name: str) -> str:
    return f"{name} looks like an identifier, since every value is another one: it is left out"
