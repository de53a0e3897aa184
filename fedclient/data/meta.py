"""meta.json of a shard: facts that its arrays do not show."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from attune.common.durable import read_small
from attune.common.errors import ShardError, nearest
from attune.common.plan import Kind, Label
from attune.common.schema import Schema
from attune.common.task import TaskName
from attune.common.text import converted, from_json

MOST_BYTES = 64 << 20  # classes and columns may be many
Standardise = bool | Literal["federation"]


class Meta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The keys of meta.json, all optional."""

    classes: list[Label] | None = None  # all classes that may occur in the federation, in the order of the class indices;
    # in other tasks the names of the columns of y
    task: TaskName = "classes"
    kind: Kind | None = None
    vocabulary: int | None = None  # tokens only
    groups: str | None = None  # name of an array beside the samples. Samples with the same value are held out together, and
    # count as one where models are compared. The test part may lack the array
    columns: list[str] | None = None  # names of features (tabular) or channels (series, images), in order
    channels: Literal["first", "last"] | None = None  # images only: the axis of the channels, if the sizes leave a doubt
    missing: Literal["refuse", "median"] = "refuse"  # tabular only: what NaN in x becomes
    missing_words: list[str] | None = None  # that mean a missing label; `usual` stands for the usual ones. None: these alone
    schema: Schema | None = None  # tabular only: by which x was made from a table
    standardise: Standardise = True  # series and tabular: by this device's statistics, not at all, or by those of all devices


def read_meta(path: Path) -> Meta:
    """Return the content of the file at `path`, or the defaults if there is no file.

    Raises:
        ShardError: The file cannot be read, or a key or value in it is wrong.
    """
    if not path.exists():
        return Meta()
    try:
        declared: Any = from_json(read_small(path, MOST_BYTES), object)
        for key in declared if isinstance(declared, dict) else ():
            if key not in Meta.__struct_fields__:
                raise ShardError(f"unknown key {key!r} in {path}{nearest(key, Meta.__struct_fields__)}")
        meta = converted(declared, Meta)
    except OSError as error:
        raise ShardError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ShardError(f"{path} is wrong: {error}") from None
    if meta.classes is not None and not meta.classes:
        raise ShardError(f"`classes` in {path} is empty; list every label, or leave it out")
    if meta.classes is not None and len(set(meta.classes)) < len(meta.classes):
        raise ShardError(f"`classes` in {path} names a class twice")
    if meta.schema is not None:
        meta.schema.check(f"the schema in {path}")
        if meta.columns != meta.schema.feature_names:
            raise ShardError(f"`columns` in {path} are not the features of its schema: make the shard again from its table")
    if meta.vocabulary is not None and meta.vocabulary < 1:
        raise ShardError(f"`vocabulary` in {path} is {meta.vocabulary}; it must be at least 1")
    return meta
