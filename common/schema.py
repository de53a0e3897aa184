"""Schema of a table: the meaning of each column, and the features that follow from it. One schema counts for all sites.

Also the checks of names of columns or channels, and the difference between two lists of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from hashlib import sha256
from typing import Any, Literal, get_args

import msgspec

from attune.common.errors import SettingError, nearest
from attune.common.text import converted, from_json, listed

LONGEST_NAME = 256  # characters
MAX_NAMES_BYTES = 1 << 20  # of all names together
_SHOWN = 3


def wrong_with(names: Sequence[str], width: int) -> str:
    """Describe what is wrong with the names of `width` columns; empty if they are right. The text is always short."""
    if len(names) != width:
        return f"{len(names)} column names for {width} columns"
    if sum(map(len, names)) > MAX_NAMES_BYTES:
        return f"column names of more than {MAX_NAMES_BYTES} characters together"
    if any(not name or len(name) > LONGEST_NAME or not name.isprintable() for name in names):
        return f"a column name that is empty, has more than {LONGEST_NAME} characters, or cannot be printed"
    if len(set(names)) < len(names):
        return "a column name twice"
    return ""


def difference(names: Sequence[str], expected: Sequence[str]) -> str:
    """Describe how names differ from the expected ones, as a clause about their owner; empty if either list is empty."""
    if not names or not expected or list(names) == list(expected):
        return ""
    lacking = [name for name in expected if name not in set(names)]
    more = [name for name in names if name not in set(expected)]
    if lacking or more:
        clauses = [f"lacks the columns {listed([repr(name) for name in lacking], _SHOWN)}"] if lacking else []
        if more:
            clauses.append(f"has {listed([repr(name) for name in more], _SHOWN)} {'instead' if lacking else 'besides'}")
        return " and ".join(clauses)
    at = next(place for place, (name, other) in enumerate(zip(names, expected, strict=True)) if name != other)
    return f"has the columns in another order: column {at + 1} is {names[at]!r}, and {expected[at]!r} is expected there"


def remedy(expected: Sequence[str]) -> str:
    """Return what the owner of the shard can do about a difference."""
    listed = ",".join(expected)
    what = f"--columns {listed}" if len(listed) <= LONGEST_NAME else "--columns with the federation's columns, in their order"
    return f"cut the shard again with fedclient shard FILE --label NAME {what}"


FORMAT = 1
ColumnKind = Literal["number", "category", "yes/no", "date", "text", "identifier", "label", "time", "event", "group", "split"]
Missing = Literal["fill", "indicator", "refuse"]
DateForm = Literal["year-month-day", "day/month/year", "month/day/year"]
UnitVerdict = Literal["fits", "factor 10", "factor 2.54", "differs"]
UNIT_VERDICTS: tuple[UnitVerdict, ...] = get_args(UnitVerdict)
FEATURES: tuple[ColumnKind, ...] = ("number", "category", "yes/no", "date")  # kinds that become features
OUTPUTS: tuple[ColumnKind, ...] = ("label", "time", "event")  # kinds of what is predicted
ROLES: tuple[ColumnKind, ...] = (*OUTPUTS, "group", "split")
REASONS: dict[ColumnKind, str] = {
    "identifier": "an identifier: a model would learn rows by heart",
    "text": "free text, which is no feature of a table",
}
OTHER, GAP = "other", "missing"  # ends of the names of features
EMBEDDED_FROM = 17  # a merged category with so many values is embedded; with fewer it is one-hot
ORIGIN = "2000-01-01"  # from which dates count unless a schema says another day
_UNITS = (
    "mm|cm|m|km|in|inch|ft|mg|g|kg|lb|lbs|oz|ml|dl|l|mmol|mol|mmhg|bpm|hz|ms|s|sec|min|h|hours|days|weeks|months|years|c|f|k|"
    "pct|percent|eur|usd|kg_m2|iu|[munp]?(?:g|mol|iu|u)_[dm]?l"
)
_UNIT_AT_THE_END = re.compile(rf"(?P<stem>.+?)\s*(?:_(?P<unit>{_UNITS})|[(\[](?P<marked>[^()\[\]]+)[)\]])", re.IGNORECASE)
MAX_COLUMNS, MAX_VALUES, MAX_ONE_HOT = 1 << 12, 1 << 12, 1 << 14  # the last of all columns together


class Column(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Description of one column."""

    # number, category, yes/no and date are features; text and identifier are left out; label, time and event (of survival),
    # group and split have a role.
    kind: ColumnKind
    # Unit of the numbers, such as cm. It is compared between sites, and nothing is converted.
    unit: str = ""
    # A missing value: fill (the median of the site's training part; a category has none of its values), indicator (the same,
    # and one more feature says that the value is missing), or refuse.
    missing: Missing = "fill"
    # Values of a category, or of yes/no the two words: no, then yes. Any other value of a category counts as `other`.
    values: list[str] = []
    # How a category enters the model: a feature for each value, or an index for which the model learns a vector.
    encoding: Literal["one-hot", "embedding"] = "one-hot"
    # Usual range of the numbers (of a date: of its days), low and high: devices compare their unit with it. Training with noise
    # scales by it, and its middle stands for a missing value.
    range: tuple[float, float] | None = None
    # Day from which the days of a date count.
    origin: str = ORIGIN
    # How dates are written with strokes, such as 31/12/2024. Other dates are read in any case: 2024-12-31 and 31.12.2024.
    form: DateForm = "year-month-day"
    # Why it is no feature although its kind is one; empty: it is.
    left_out: str = ""

    @property
    def why_left_out(self) -> str:
        """Why the column is no feature, for people; empty if it is one, or has a role."""
        return self.left_out or REASONS.get(self.kind, "")

    @property
    def is_feature(self) -> bool:
        """True if the column becomes features of the model."""
        return self.kind in FEATURES and not self.left_out


@dataclass(frozen=True)
class Feature:
    """One number of a sample, which follows from a column.

    Attributes:
        name: Its name among the columns of a shard.
        column: The column in the table.
        role: The column's number, 1 where a value stands or is missing, or the index of a category's value.
        value: The value that `value` stands for.
        neutral: What stands there if a site has no value at all, and under noise wherever a value is missing.
        bounds: Public range of a number, a date or yes/no; None: there is none.
    """

    name: str
    column: str
    role: Literal["number", "value", "other", "missing", "index"]
    value: str = ""
    neutral: float = 0.0
    bounds: tuple[float, float] | None = None


class Schema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Columns of the tables of all sites, by their names. The order of columns in a file does not matter.

    `Schema.of` and `read_schema` check one; a schema that was decoded otherwise is checked by `check`.
    """

    columns: dict[str, Column]
    format: int = FORMAT

    @classmethod
    def of(cls, columns: Mapping[str, Column], where: str = "the schema") -> Schema:
        """Return the schema of these columns, sorted by name.

        Raises:
            SettingError: A column is described wrongly. The message calls the schema `where`.
        """
        schema = cls({name: columns[name] for name in sorted(columns)})
        schema.check(where)
        return schema

    def check(self, where: str = "the schema") -> None:
        """Check the schema.

        Raises:
            SettingError: A column is described wrongly. The message names it, and calls the schema `where`.
        """
        if self.format > FORMAT:
            raise SettingError(f"{where} was written by a newer version of attune: update attune here")
        if not self.columns or len(self.columns) > MAX_COLUMNS:
            raise SettingError(f"{where} describes {len(self.columns)} columns; 1 to {MAX_COLUMNS} are possible")
        for name, column in self.columns.items():
            if wrong := _wrong_with(name, column):
                raise SettingError(f"{where}: column {name[:LONGEST_NAME]!r} {wrong}")
        for role in ROLES[1:]:
            if len(self.with_kind(role)) > 1:
                raise SettingError(f"{where} has several columns of the kind {role}: {listed(self.with_kind(role), _SHOWN)}")
        if wrong := self._wrong_with_survival():
            raise SettingError(f"{where} {wrong}")
        one_hot = [column for column in self.used.values() if (column.kind, column.encoding) == ("category", "one-hot")]
        if (count := sum(len(column.values) for column in one_hot)) > MAX_ONE_HOT:  # before so many features are made
            raise SettingError(
                f"{where} makes {count} features of values, more than {MAX_ONE_HOT}: embed or leave out categories"
            )
        features = [feature.name for feature in self.features()]
        if wrong := wrong_with(features, len(features)):
            raise SettingError(f"{where} makes features with {wrong}: rename a column or a value")
        if not features:
            raise SettingError(f"{where} leaves no column for features: give a column one of the kinds {', '.join(FEATURES)}")

    def with_kind(self, kind: ColumnKind) -> list[str]:
        """Return the names of the columns of this kind, sorted."""
        return sorted(name for name, column in self.columns.items() if column.kind == kind)

    @property
    def time_and_event(self) -> list[str]:
        """The columns of survival, the time first; empty if it is not about survival."""
        return [*self.with_kind("time"), *self.with_kind("event")]

    def _wrong_with_survival(self) -> str:
        there = self.time_and_event
        if len(there) == 1:
            kind, lacking = ("time", "event") if self.with_kind("time") else ("event", "time")
            return f"has the {kind} {there[0]!r} and no column of the kind {lacking}: survival needs both"
        if there and (labels := self.with_kind("label")):
            return f"has a time and an event, and the label {labels[0]!r}: give one of them another kind"
        return ""

    @property
    def used(self) -> dict[str, Column]:
        """The columns that become features, sorted by name."""
        return {name: self.columns[name] for name in sorted(self.columns) if self.columns[name].is_feature}

    def features(self) -> list[Feature]:
        """Return the features of a sample, in the order in which a model takes them."""
        return [feature for name, column in self.used.items() for feature in _features_of(name, column)]

    @property
    def feature_names(self) -> list[str]:
        """Names of the features."""
        return [feature.name for feature in self.features()]

    @property
    def without_bounds(self) -> list[str]:
        """Names of the columns of numbers and dates without a `range`, which training with noise needs."""
        return [feature.column for feature in self.features() if feature.role == "number" and feature.bounds is None]

    @property
    def embedded(self) -> dict[str, int]:
        """For each feature that is an index, the number of its values, with `other` and `missing`, by the feature's place."""
        return {
            str(at): len(self.columns[feature.column].values) + 2
            for at, feature in enumerate(self.features())
            if feature.role == "index"
        }

    @property
    def left_out(self) -> dict[str, str]:
        """The columns that are no features, with the reason. Columns with a role are not among them."""
        return {
            name: self.columns[name].why_left_out
            for name in sorted(self.columns)
            if not self.columns[name].is_feature and self.columns[name].kind not in ROLES
        }

    def to_json(self) -> bytes:
        """Return the canonical JSON: keys are sorted and defaults are left out, so equal schemas have equal bytes."""
        columns = {name: _plain(column) for name, column in self.columns.items()}
        return msgspec.json.encode({"columns": columns, "format": self.format}, order="sorted")

    @property
    def digest(self) -> str:
        """Digest of the canonical JSON."""
        return f"sha256:{sha256(self.to_json()).hexdigest()}"

    def to_toml(self) -> str:
        """Return the schema as an operator edits it, a section [data.columns.NAME] for each column."""
        return "\n\n".join(_section(name, self.columns[name]) for name in sorted(self.columns)) + "\n"


def name_and_unit(name: str) -> tuple[str, str]:
    """Return (the name without the unit at its end, the unit) of a column's name; the unit is empty if there is none."""
    match = _UNIT_AT_THE_END.fullmatch(name)
    if match is None:
        return name, ""
    return match["stem"].rstrip(" _"), (match["unit"] or match["marked"]).strip()


def schema_of_json(text: bytes | str, where: str) -> Schema:
    """Return the schema in a JSON text.

    Raises:
        SettingError: It holds none, or a wrong one. The message calls the text `where`.
    """
    try:
        schema = from_json(text, Schema)
    except msgspec.DecodeError as error:
        raise SettingError(f"{where} holds no schema: {error}") from None
    schema.check(where)
    return Schema.of(schema.columns)


def columns_of_table(values: Mapping[str, Any], where: str) -> dict[str, Column]:
    """Return the columns in a TOML table `[data.columns]`.

    Raises:
        SettingError: A key or a value is wrong.
    """
    columns = {}
    for name, fields in values.items():
        for key in fields if isinstance(fields, Mapping) else ():
            if key not in Column.__struct_fields__:
                raise SettingError(f"{where}: column {name!r} has no {key!r}{nearest(str(key), Column.__struct_fields__)}")
        try:
            columns[name] = converted(fields, Column)
        except msgspec.ValidationError as error:
            kinds = f"; the kinds are {', '.join(get_args(ColumnKind))}" if "$.kind" in str(error) else ""
            raise SettingError(f"{where}: column {name!r}: {error}{kinds}") from None
    return columns


def _wrong_with(name: str, column: Column) -> str:
    """Describe what is wrong with a column; empty if it is right."""
    if wrong := wrong_with([name], 1):
        return f"has {wrong}"
    texts = [*column.values, column.unit, column.left_out]
    if len(column.values) > MAX_VALUES or any(len(text) > LONGEST_NAME or not text.isprintable() for text in texts):
        return f"has more than {MAX_VALUES} values, or a text that is too long or cannot be printed"
    if len(set(column.values)) < len(column.values) or not all(column.values):
        return "names a value twice, or an empty one"
    if column.kind == "category" and column.is_feature and not column.values:
        return "is a category without `values`: list them, or set `left_out`"
    if column.kind == "yes/no" and len(column.values) != 2:
        return f"needs two `values`, the word for no and the word for yes, and has {len(column.values)}"
    if column.range is not None and not (all(map(math.isfinite, column.range)) and column.range[0] < column.range[1]):
        return "has a `range` that is not a low number and a higher one"
    try:
        date.fromisoformat(column.origin)
    except ValueError:
        return f"has the `origin` {column.origin[:LONGEST_NAME]!r}, which is no day such as {ORIGIN}"
    return ""


def _features_of(name: str, column: Column) -> Iterator[Feature]:
    if column.kind != "category":
        bounds = (0.0, 1.0) if column.kind == "yes/no" else column.range
        neutral = sum(bounds) / 2 if bounds is not None and column.kind != "yes/no" else 0.0
        yield Feature(name, name, "number", neutral=neutral, bounds=bounds)
    elif column.encoding == "embedding":
        yield Feature(name, name, "index")
        return  # an index has a value for what is missing
    else:
        yield from (Feature(f"{name}={value}", name, "value", value) for value in column.values)
        yield Feature(f"{name} {OTHER}", name, "other")
    if column.missing == "indicator":
        yield Feature(f"{name} {GAP}", name, "missing")


def _plain(column: Column) -> dict[str, Any]:
    """Return the fields that do not have their defaults. msgspec itself compares texts by identity."""
    same_types = converted(msgspec.to_builtins(column), Column)  # 18 becomes 18.0 in a range
    fields = {field.name: getattr(same_types, field.name) for field in msgspec.structs.fields(Column)}
    return {name: value for name, value in fields.items() if name == "kind" or value != getattr(_NUMBER_COLUMN, name)}


def _section(name: str, column: Column) -> str:
    lines = [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in sorted(_plain(column).items())]
    return "\n".join([f"[data.columns.{msgspec.json.encode(name).decode()}]", *lines])


_NUMBER_COLUMN = Column("number")
