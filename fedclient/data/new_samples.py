"""New samples for a finished model: an .npz file, a table, or images as files, folders or a table's column.

N samples, F features, H height, W width, C channels.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attune.common.errors import SettingError, ShapeMismatch, ShardError
from attune.common.plan import ModelSpec
from attune.common.schema import Schema
from attune.common.text import listed
from attune.fedclient.data import cautions, stand_ins
from attune.fedclient.data.arrays import MAX_BINARY_BYTES, Array, read_arrays
from attune.fedclient.data.makers import images
from attune.fedclient.data.makers.make_options import MakeOptions
from attune.fedclient.data.makers.pixels import decode_images
from attune.fedclient.data.samples import features_of, table_of
from attune.fedclient.data.table import DataTable, is_table, may_be_table, read_table
from attune.fedclient.data.table_encoder import TableEncoder
from attune.fedclient.read_options import PLAIN, ReadOptions

FORMS = "image files, folders of them, a table (.csv, .parquet) with a column of their paths, or an .npz with x"


@dataclass(frozen=True)
class NewSamples:
    """Samples to predict.

    Attributes:
        x: Samples as in an .npz file, (N, ...).
        names: What tells the samples apart: of images their files, else the cells of the column that was asked for.
        named_by: What these are called; empty: there are none.
        notes: What the user should know about the reading.
    """

    x: Array
    names: tuple[Any, ...] = ()
    named_by: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ImageFile:
    """An image to read: its path or its content, and its name for the user."""

    content: Path | bytes
    name: str


def new_samples(
    given: Sequence[str],
    spec: ModelSpec,
    columns: Sequence[str] = (),
    missing_words: Sequence[str] = (),
    schema: Schema | None = None,
    options: ReadOptions = PLAIN,
    id_column: str = "",
) -> NewSamples:
    """Read the samples that a user gave, in the form that the model takes.

    Args:
        given: Paths, or quoted patterns. Several of them must be images.
        spec: The model.
        columns: Names of the model's columns, in order; empty if they are not known.
        missing_words: Words that mean a missing value; empty for the usual ones.
        schema: By which a table is read, as in the training.
        options: How the site's table is mapped.
        id_column: The table's column whose cells, as they stand in the file, tell the samples apart; empty: none does.

    Raises:
        ShardError: A file cannot be read or used.
        ShapeMismatch: Images were given to a model of other data, or the model takes other images than files hold.
        SettingError: A table lacks columns, there are several files that are no images, or a column was named of no table.
    """
    paths = [path for text in given for path in _expanded(text)]
    first = paths[0]
    if id_column and (spec.kind == "images" or not (first.is_file() and may_be_table(first))):
        raise SettingError(f"--id names a column of a table, and {first} is read as none: leave --id out")
    if spec.kind == "images" and first.suffix.lower() != ".npz":
        return _images(paths, spec)
    if first.is_dir() or images.is_image(first):
        what = "a folder" if first.is_dir() else "an image"
        raise ShapeMismatch(
            f"{first} is {what}, but the model takes {spec.kind}, and no images: give an .npz with x, or a table"
        )
    if len(paths) > 1:
        raise SettingError(f"several files were given with {first}: only images can be several; call predict for each file")
    if not may_be_table(first):
        return NewSamples(read_arrays(first, ("x",))[0])
    if schema is None and not columns:
        raise ShardError(f"the model does not know what its columns are called, so {first} cannot be used; give an .npz with x")
    table = table_of(first, replace(options, missing_words=tuple(missing_words)))
    names: Sequence[Any] = ()
    if id_column:
        plain = read_table(first)  # no word of an identifier is mapped, and no comma in it is a decimal one
        plain.require(id_column)
        names = plain.cells[id_column]
    if schema is not None:
        x, notes = TableEncoder(schema).encode(table)
        return NewSamples(x, tuple(names), id_column, (*table.notes, *cautions.of_schema(table, schema.used, ()), *notes))
    table.require(*columns)
    x = features_of(table, columns)
    return NewSamples(x, tuple(names), id_column, (*table.notes, *stand_ins.of_numbers(x, columns)))


def _expanded(text: str) -> list[Path]:
    path = Path(text).expanduser()
    if path.exists() or not glob.has_magic(text):
        return [path]
    paths = sorted(Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207 (absolute patterns too)
    if not paths:
        raise ShardError(f"no file matches {text!r}")
    return paths


def _images(paths: Sequence[Path], spec: ModelSpec) -> NewSamples:
    height, width, channels = spec.shape
    if channels not in (1, 3):
        raise ShapeMismatch(
            f"the model takes images with {channels} channels, and image files have 1 or 3: give an .npz with x"
        )
    files, left_out = [], []
    for path in paths:
        taken, other = _files_at(path, path.parent if path.is_file() or len(paths) > 1 else path)
        files += taken
        left_out += other
    if len(files) * height * width * channels > MAX_BINARY_BYTES:
        raise ShardError(f"{len(files)} images are more than {MAX_BINARY_BYTES >> 30} GiB, the limit; give fewer at a time")
    size = (height, width)
    options = MakeOptions(PLAIN, grey=channels == 1, size=size)
    decoded = decode_images([file.content for file in files], [file.name for file in files], options)
    resized = [f"{file.name} ({at[0]} x {at[1]})" for file, at in zip(files, decoded.sizes, strict=True) if at != size]
    notes = list(decoded.notes)
    if left_out:
        notes.append(f"left out: {len(left_out)} files that are hidden or no images ({listed(left_out)})")
    if resized:
        notes.append(
            f"{len(resized)} of {len(files)} images were resized to the model's {height} x {width} pixels: {listed(resized)}"
        )
    return NewSamples(decoded.x, tuple(file.name for file in files), "file", tuple(notes))


def _files_at(path: Path, base: Path) -> tuple[list[ImageFile], list[str]]:
    """Return the images at a path, and the names of files in a folder that are left out. Names in a folder are below `base`."""
    if path.is_dir():
        everything = sorted(images.files_below(path))
        taken = [entry for entry in everything if images.is_image(entry) and not images.is_hidden(entry.relative_to(path))]
        if not taken:
            raise ShardError(f"{path} holds no image: give {FORMS}")
        kept = set(taken)
        left_out = [entry.relative_to(base).as_posix() for entry in everything if entry not in kept]
        return [ImageFile(entry, entry.relative_to(base).as_posix()) for entry in taken], left_out
    if images.is_image(path):
        return [ImageFile(path, str(path))], []
    if path.is_file() and is_table(path):
        return list(_files_named_in(read_table(path))), []
    raise ShardError(f"{path} is no image{'' if path.exists() else ', and is not there'}: the model takes images; give {FORMS}")


def _files_named_in(table: DataTable) -> Iterator[ImageFile]:
    """Yield the images of the table's only column with images: paths beside the table, or encoded files (Parquet)."""
    candidates = [name for name, cells in table.cells.items() if all(map(_is_image, cells))]
    if len(candidates) != 1:
        several = (
            f"has several columns with images ({', '.join(candidates)})" if candidates else "has no column with image files"
        )
        raise ShardError(f"{table.path} {several}: one column must name an image file for every row")
    for number, cell in enumerate(table.cells[candidates[0]], 1):
        if isinstance(cell, dict):
            content = cell.get("bytes") or table.path.parent / str(cell["path"])
            yield ImageFile(content, str(cell.get("path") or f"image {number} of {table.path}"))
        else:
            yield ImageFile(table.path.parent / Path(cell).expanduser(), cell)


def _is_image(cell: object) -> bool:
    if isinstance(cell, dict):
        return {"bytes", "path"} <= cell.keys()
    return isinstance(cell, str) and images.is_image(Path(cell))
