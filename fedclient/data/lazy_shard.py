"""Shards of which the profile is known at once, and the samples are read when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import Self

from attune.common.errors import NonFiniteFeatures, ShardError
from attune.common.plan import Plan, Profile
from attune.common.schema import Schema, difference, wrong_with
from attune.fedclient.data import kinds
from attune.fedclient.data.arrays import Array, plain_array
from attune.fedclient.data.cells import hidden_in, unmasked
from attune.fedclient.data.csv_file import plain_name
from attune.fedclient.data.describe import describe
from attune.fedclient.data.meta import Meta
from attune.fedclient.data.samples import table_of
from attune.fedclient.data.shard import Declared, Shard, load_shard, make_shard
from attune.fedclient.data.source import with_values
from attune.fedclient.read_options import PLAIN, ReadOptions


@dataclass(frozen=True)
class LazyShard:
    """Shard whose samples are read when they are needed. It can be sent to another process of this machine.

    Attributes:
        load: Returns the same samples every time, from memory or from disk.
        load_in: Returns the samples by the schema of the plan.
        declares: What of the profile meta.json declares; the rest is what occurs in the data.
    """

    name: str
    profile: Profile
    warnings: tuple[str, ...]
    load: Callable[[], Shard]
    read: str = ""  # what was read, on one line
    digest: str = ""
    held_hashes: tuple[str, ...] = ()  # of the rows of a table that the device holds out
    load_in: Callable[[Schema], Shard] | None = None  # of a table whose schema is made of all sites' proposals
    declares: frozenset[Declared] = frozenset()

    @classmethod
    def in_memory(cls, shard: Shard) -> Self:
        """Keep the samples in memory, for a device that has the process to itself."""
        return cls._of(shard, partial(_same, shard))

    @classmethod
    def on_disk(cls, path: Path, options: ReadOptions = PLAIN, held: Collection[str] = (), tokens: bool = False) -> Self:
        """Read the samples once to check them, and again for every use.

        Args:
            path: Same as in `load_shard`.
            options: Same as in `load_shard`.
            held: Hashes of the rows of a table that were held out before.
            tokens: Same as in `shard_of`.

        Raises:
            AttuneError: As in `load_shard`.
        """
        if options.proposes:
            return cls._proposing(path, options, held)
        load = partial(load_shard, path, options=options, held=frozenset(held), tokens=tokens)
        return cls._of(load(), load)

    @classmethod
    def _proposing(cls, path: Path, options: ReadOptions, held: Collection[str]) -> Self:
        """Propose a schema of a table, by which the samples are read until the plan has the schema of all sites."""
        table = table_of(path, options)
        proposal = describe(table, options)
        # The server makes the plan's schema. It must not choose another label or split here: errors quote such columns.
        roles = replace(options.with_schema(proposal.schema, table.names), gives_roles=False)
        load_in = partial(_load_in, path, roles, frozenset(held))
        load = partial(load_in, proposal.schema)
        shard = load()
        profile = msgspec.structs.replace(shard.profile(), columns=None, schema=msgspec.UNSET, proposal=proposal.schema)
        warnings = tuple(dict.fromkeys([*proposal.warnings, *shard.warnings]))
        return replace(cls._of(shard, load), profile=profile, warnings=warnings, load_in=load_in)

    def load_for(self, plan: Plan) -> Shard:
        """Return the samples by the plan's schema, if the device has only proposed one.

        Raises:
            ShardError: Training has noise, and the schema may be made of what the devices have proposed.
        """
        if plan.is_private and self.load_in is not None:
            raise ShardError(
                f"{self.name} proposes a schema, which tells of its rows, and this federation trains with privacy.unit: give "
                "the schema of its operator (--schema FILE)"
            )
        return self.load() if self.load_in is None or plan.schema is None else self.load_in(plan.schema)

    @classmethod
    def _of(cls, shard: Shard, load: Callable[[], Shard]) -> Self:
        return cls(
            shard.name, shard.profile(), shard.warnings, load, shard.read, shard.digest, shard.held_hashes,
            declares=shard.declares,
        )  # fmt: skip


def _load_in(path: Path, options: ReadOptions, held: Collection[str], schema: Schema) -> Shard:
    return load_shard(path, options=replace(options, schema=schema, proposes=False), held=held)


def _same(shard: Shard) -> Shard:
    return shard


FORMS = (
    "a folder or a file, arrays (x, y) or (train_x, train_y, test_x, test_y), a torch Dataset, or two of them: (train, test)"
)


def shard_of(name: str, given: Any, table: ReadOptions = PLAIN, tokens: bool = False) -> LazyShard:
    """Return the shard of the device `name`.

    Args:
        name: Name of the device.
        given: One of FORMS.
        table: The task, and how a table is read.
        tokens: Whole numbers (N, T) are declared to be tokens.

    Raises:
        ShardError: `given` has none of the forms.
        AttuneError: As in `load_shard`.
    """
    if isinstance(given, (str, Path)):
        return LazyShard.on_disk(Path(given), table, tokens=tokens)
    _check_masks(name, given, table.missing)
    train, test = _parts(name, given, table.task == "classes")
    columns = None if tokens else _columns_of(name, given)
    meta = with_values(Meta(task=table.task, columns=columns), table)
    return LazyShard.in_memory(make_shard(Path(name), name, train, test, meta, tokens=tokens))


def _columns_of(name: str, given: Any) -> list[str] | None:
    """Return the names of the columns of x if it is a frame that names them; None otherwise.

    Raises:
        ShardError: The frame with the test part has other columns, or has them in another order.
    """
    parts = [_names_in(part) for part in given[::2]] if isinstance(given, Sequence) else [[]]
    if unlike := difference(parts[-1], parts[0]):
        raise ShardError(f"the test part of {name} {unlike}")
    return parts[0] or None


def _names_in(x: Any) -> list[str]:
    """Return the names of a frame's columns; none if they are numbers, or not all different."""
    names = list(getattr(x, "columns", ()))
    plain = [plain_name(column) for column in names if isinstance(column, str)]
    return [] if len(plain) < len(names) or wrong_with(plain, len(names)) else plain


def _check_masks(name: str, given: Any, missing: str) -> None:
    """Refuse masked arrays that hide values, unless medians stand for hidden features.

    Raises:
        ShardError: One hides labels.
        NonFiniteFeatures: One hides features.
    """
    for at, values in enumerate(given if isinstance(given, list | tuple) else ()):
        hidden, size = hidden_in(values)
        if hidden and (at % 2 or missing != "median"):
            remedy = "" if at % 2 else """; of a table, table={"missing": "median"} puts the median of a column there"""
            kind = ShardError if at % 2 else NonFiniteFeatures
            raise kind(
                f"{'xy'[at % 2]} of {name} is a masked array that hides {hidden} of {size} values: leave these samples "
                f"out{remedy}"
            )


def _parts(name: str, given: Any, classes: bool) -> tuple[tuple[Array, Array], tuple[Array, Array] | None]:
    if _is_dataset(given):
        return _read_dataset(name, given, classes), None
    if isinstance(given, Sequence) and len(given) == 2 and all(map(_is_dataset, given)):
        return _read_dataset(name, given[0], classes), _read_dataset(name, given[1], classes)
    if isinstance(given, Sequence) and len(given) in (2, 4):
        parts = ("x", "y") if len(given) == 2 else ("train_x", "train_y", "test_x", "test_y")
        arrays = [
            plain_array(unmasked(values), f"{part} of {name}", classes and part.endswith("y"))
            for part, values in zip(parts, given, strict=True)
        ]
        return (arrays[0], arrays[1]), (arrays[2], arrays[3]) if len(arrays) == 4 else None
    raise ShardError(f"the data of {name} are a {type(given).__name__}; give {FORMS}")


def _is_dataset(given: Any) -> bool:
    """Return whether `given` looks like a torch Dataset: it has items and a length, and is no array, list or mapping."""
    known = hasattr(given, "__getitem__") and hasattr(given, "__len__") and not hasattr(given, "shape")
    return known and not isinstance(given, (Sequence, Mapping))


def _read_dataset(name: str, dataset: Any, classes: bool) -> tuple[Array, Array]:
    """Return x and y of all samples of a torch data set.

    Its images are taken as (C, H, W), unless their sizes say otherwise, and become (H, W, C).
    """
    pairs = [dataset[index] for index in range(len(dataset))]
    if not pairs or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
        raise ShardError(f"the data set of {name} must hold pairs (x, y), at least one")
    x, y = (plain_array([pair[side] for pair in pairs], f"{'xy'[side]} of {name}", classes and bool(side)) for side in (0, 1))
    first = x.shape[-1] not in kinds.CHANNELS or x.shape[1:2] in [(channels,) for channels in kinds.CHANNELS]
    return (kinds.channels_last(x) if first else x), y
