"""Options for reading a file: the column of the class, columns that are not features, and the task."""

from __future__ import annotations

import csv
import operator
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from attune.common.errors import SettingError, ShardError, nearest
from attune.common.schema import ROLES, Schema
from attune.common.schema_file import read_schema
from attune.common.task import TASKS, TIME_AND_EVENT, TaskName

Array = npt.NDArray[Any]
_THRESHOLD = re.compile(r"\s*(?P<name>[^<>]+?)\s*>\s*(?P<number>[-+]?\d+(?:\.\d+)?)\s*")
AUTO, NONE = "auto", "none"  # in --schema
_MISSING, _DECIMALS = ("refuse", "median"), ("point", "comma")
_SCALES = ("", "device", "federation", "none")


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading a file, checked by `of`."""

    label: str = ""  # "": the form's usual name; several of a table, with commas, where the task is not classes
    threshold: float | None = None  # two classes: label > threshold or not
    written: str = ""  # --label as it was typed, where it has a threshold: a column can be called so
    apart: tuple[str, ...] = ()  # columns that are no features, but may name clients or groups
    shape: tuple[int, ...] = ()  # of a sample; (): as in the file
    missing: Literal["refuse", "median", "keep"] = "refuse"  # keep: a finished model fills them in. No user says this
    missing_words: tuple[str, ...] = ()  # that mean a missing value, with `usual` for the usual ones; (): these alone
    columns: tuple[str, ...] = ()  # features of a table, in order; (): all that are left
    split: str = ""  # column that says of each sample whether it is for training or for testing; "": one called so, if any
    group: str = ""  # column: samples with the same value are held out together
    key: str = ""  # column: what tells one row from another, so that the same rows stay held out; "": their content
    task: TaskName = "classes"
    schema: Schema | None = None  # what the columns of a table are; None: all features are numbers
    gives_roles: bool = True  # the schema says which columns are label, group and split, where these options do not
    proposes: bool = False  # the sites' proposals are merged into one schema before the table is used
    mappings: tuple[str, ...] = ()  # of the site's names and values to those of the federation: fedclient.data.table_mapping
    decimal: Literal["point", "comma"] = "point"
    standardise: Literal["", "device", "federation", "none"] = ""  # how series and tables are scaled; "": as meta.json says

    @classmethod
    def of(
        cls,
        label: str = "",
        apart: Sequence[str] = (),
        shape: str = "",
        missing: str = "refuse",
        columns: str = "",
        split: str = "",
        group: str = "",
        task: str = "classes",
        missing_words: str = "",
        key: str = "",
        schema: str | Path | Schema = "",
        map: Sequence[str] = (),
        decimal: str = "point",
        standardise: str | None = None,
    ) -> ReadOptions:
        """Return the options that a user typed.

        Raises:
            SettingError: An option is wrong.
        """
        match = _THRESHOLD.fullmatch(label)
        if task not in TASKS:
            raise SettingError(f"unknown task {task!r}{nearest(task, TASKS)}")
        if match is not None and task != "classes":
            raise SettingError(f"--label {label!r} makes two classes of a number: leave the number or --task {task} out")
        if shape and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", shape):
            raise SettingError(f"--shape takes one to three sizes such as 28x28 or 32x32x3, not {shape!r}")
        if missing not in _MISSING:
            raise SettingError(f"unknown way {missing!r} to treat missing values{nearest(missing, _MISSING)}")
        if decimal not in _DECIMALS:
            raise SettingError(f"unknown mark {decimal!r} before a fraction{nearest(decimal, _DECIMALS)}")
        standardise = standardise or ""
        if standardise not in _SCALES:
            raise SettingError(f"unknown way {standardise!r} to scale columns{nearest(standardise, _SCALES)}")
        return cls(
            label=match["name"] if match else label.strip(),
            threshold=_number(match["number"]) if match else None,
            written=label.strip() if match else "",
            apart=tuple(apart),
            shape=tuple(int(size) for size in shape.split("x")) if shape else (),
            missing=cast(Literal["refuse", "median"], missing),
            missing_words=tuple(name.strip() for name in missing_words.split(",")) if missing_words else (),
            columns=tuple(name.strip() for name in next(csv.reader([columns]))) if columns else (),
            split=split,
            group=group,
            key=key,
            task=task,
            schema=None if schema in ("", AUTO, NONE) else schema if isinstance(schema, Schema) else read_schema(Path(schema)),
            proposes=schema == AUTO,
            mappings=tuple(map),
            decimal=cast(Literal["point", "comma"], decimal),
            standardise=cast(Literal["", "device", "federation", "none"], standardise),
        )

    @property
    def of_tables(self) -> ReadOptions:
        """The options without those that arrays have too."""
        return replace(self, task=PLAIN.task, missing=PLAIN.missing, missing_words=(), standardise="")

    def with_schema(self, schema: Schema, names: Collection[str]) -> ReadOptions:
        """Return the options to read a table with these columns by a schema.

        Columns whose role the options do not say have that of the schema, if the table has them. A schema with a time and an
        event is about survival.

        Raises:
            SettingError: The options and the schema have different outputs, and one of them is about survival.
        """
        given = {kind: schema.with_kind(kind) if self.gives_roles else [] for kind in ROLES}
        there = {kind: ",".join(name for name in given[kind] if name in names) for kind in ROLES}
        survival = schema.time_and_event
        self._check_survival(survival)
        return replace(
            self,
            schema=schema,
            proposes=False,
            task="survival" if survival else self.task,
            label=self.label or ",".join(survival) or there["label"],
            group=self.group or there["group"],
            split=self.split or there["split"],
        )

    def _check_survival(self, columns: Sequence[str]) -> None:
        if self.task == "survival" and not columns:
            raise SettingError(
                "the schema has no columns of the kinds time and event: give them to two columns, or make the proposals with "
                "--task survival --label TIME,EVENT"
            )
        if columns and (self.task not in (PLAIN.task, "survival") or (self.label and self.label_names != columns)):
            raise SettingError(
                f"the schema is about survival (time {columns[0]!r}, event {columns[1]!r}): leave --label and --task out"
            )

    def for_columns(self, names: Sequence[str]) -> ReadOptions:
        """Return the options for a table with these columns: `bp>140` is a column if one is called so."""
        return replace(self, label=self.written, threshold=None) if self.written in names else self

    @property
    def keeping_gaps(self) -> ReadOptions:
        """These options, but missing values stay NaN, for a finished model that fills them in."""
        return replace(self, missing="keep")

    def classes_of(self, y: Array, where: str) -> Array:
        """Return `y`, or 0 and 1 by the threshold.

        Raises:
            SettingError: There is a threshold, and the labels are no numbers.
            ShardError: There is a threshold, and a label is NaN.
        """
        if self.threshold is None:
            return y
        if y.dtype.kind not in "biuf":
            raise SettingError(f"--label has a number to compare with, but {self.label or 'the label'} of {where} is text")
        if y.dtype.kind == "f" and (gaps := int(np.isnan(y).sum())):
            raise ShardError(
                f"{gaps} labels of {where} are missing (NaN), so they are neither above nor below; leave these samples out"
            )
        return np.asarray(operator.gt(y, self.threshold)).astype(np.int64)

    def labels(self) -> list[str]:
        """Return the columns of y; "" is the usual one.

        Raises:
            SettingError: Survival has not two columns.
        """
        if self.task == "survival" and len(self.label_names) != len(TIME_AND_EVENT):
            raise SettingError(
                "--task survival needs two columns, first that of the time, then that of the event: --label TIME,EVENT"
            )
        return self.label_names if self.task != "classes" else [self.label]

    @property
    def label_names(self) -> list[str]:
        """The parts of `label` between commas."""
        return [name.strip() for name in self.label.split(",")]


def _number(text: str) -> int | float:
    return float(text) if "." in text else int(text)


PLAIN = ReadOptions()
