"""Making of a shard on disk from a site's own files, among them Hugging Face datasets as `save_to_disk` writes them."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec

from attune.common.classes import label_of_text
from attune.common.durable import NO_SPACE, PUBLIC, check_folder, write_file
from attune.common.errors import DiskFull, SettingError, ShardError
from attune.common.plan import Label
from attune.common.text import from_json
from attune.fedclient.data.arrays import MAX_BINARY_BYTES, plain_suffix, read_text, write_arrays
from attune.fedclient.data.binary_tables import cells_of
from attune.fedclient.data.cells import is_missing
from attune.fedclient.data.csv_file import is_index, looks_like_table
from attune.fedclient.data.makers import images
from attune.fedclient.data.makers.alphabets import alphabet_of, lost_characters
from attune.fedclient.data.makers.make_options import LENGTH, MakeOptions
from attune.fedclient.data.makers.pixels import DecodedImages, decode_images, same_depth
from attune.fedclient.data.meta import Meta
from attune.fedclient.data.samples import SPLIT, mapped, missing_words, outputs_of, table_of, training_and_test
from attune.fedclient.data.shard import Shard, make_shard
from attune.fedclient.data.source import DataSource, source_of_table, with_outputs
from attune.fedclient.data.table import DataTable, is_table, may_be_table
from attune.fedclient.read_options import PLAIN, ReadOptions

_TRAIN = ("train", "training")
_TEST = ("test", "testing", "validation", "valid", "val")


def read_dataset(path: Path, options: ReadOptions = PLAIN) -> tuple[DataTable, DataTable | None]:
    """Return the training part and the test part, if there is one with labels. Numbers of named classes become the names.

    Splits that are not used are named in the notes of the training part.

    Raises:
        ShardError: The files cannot be read, or no split is for training.
        SettingError: pyarrow is not installed, or the training part has no label.
    """
    if not (path / "dataset_dict.json").is_file():
        return mapped(_table(path), options), None
    splits: list[str] = _json(path / "dataset_dict.json").get("splits", [])
    train = next((name for name in _TRAIN if name in splits), None)
    if train is None:
        raise ShardError(f"{path} has the splits {', '.join(splits)}, and none is called train; save one of them by itself")
    training, test, notes = mapped(_table(path / train), options), None, []
    for name in [*(name for name in _TEST if name in splits), *(name for name in splits if name not in (*_TEST, train))]:
        split = mapped(_table(path / name), options) if name in _TEST else _table(path / name)
        without = _has_no_labels(split, training, options)
        if name in _TEST and test is None and not without:
            test = split
            continue
        why = ", which has no labels" if without else " (save it as train or test to use it)"
        notes.append(f"left out: the split {name} of {len(split)} samples{why}")
    return replace(training, notes=(*training.notes, *notes)), test


def _has_no_labels(split: DataTable, training: DataTable, options: ReadOptions) -> bool:
    """Return whether the samples of a split have no label, or -1 where no training sample has it."""
    label = training.label_column(options.label_names[0])
    cells, known = split.cells.get(label, ()), set(map(str, training.cells[label]))
    return all(is_missing(cell) or (str(cell) == "-1" and "-1" not in known) for cell in cells)


def _table(path: Path) -> DataTable:
    try:
        import pyarrow
    except ImportError:
        raise SettingError(f"{path} is a Hugging Face dataset, which pyarrow reads: pip install 'attune-fl[tables]'") from None
    files = [path / Path(str(file["filename"])).name for file in _json(path / "state.json").get("_data_files", [])]
    try:
        if sum(file.stat().st_size for file in files) > MAX_BINARY_BYTES:
            raise ShardError(f"{path} holds more than {MAX_BINARY_BYTES >> 30} GiB, the limit; save a part of it")
        parts = []
        for file in files:
            with pyarrow.memory_map(str(file)) as source:
                parts.append(pyarrow.ipc.open_stream(source).read_all())
        table = pyarrow.concat_tables(parts)
    except (OSError, pyarrow.ArrowException, ValueError) as error:
        raise ShardError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    features: dict[str, Any] = _json(path / "dataset_info.json").get("features") or {}
    cells = {name: _named(cells_of(table.column(name)), features.get(name)) for name in table.column_names}
    return DataTable(path, cells, index=tuple(name for name in cells if is_index(name, cells[name])))


def _named(cells: list[Any], feature: Any) -> list[Any]:
    names = feature.get("names") if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" else None
    if not names:
        return cells
    return [None if cell is None or cell < 0 else names[cell] for cell in cells]


def _json(path: Path) -> dict[str, Any]:
    try:
        return from_json(path.read_bytes(), dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ShardError(f"cannot read {path}: {error}") from None


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


FORMS = "a table (.csv, .tsv, .parquet), a folder of images, a .txt file, or a Hugging Face dataset on disk"


def make(path: Path, options: MakeOptions, out: Path) -> Shard:
    """Make a shard from the files at `path`, write it to the folder `out`, and return it.

    Raises:
        ShardError: The files cannot be read or used, or `out` is not empty. Subclasses of ShardError as in `load_shard`.
        SettingError: The options do not fit the files, or a package that reads them is not installed.
        DiskFull: The disk has no space for the shard.
    """
    check_folder(out)
    source = _read(path, options)
    if options.table.missing_words:
        meta = msgspec.structs.replace(source.meta, missing_words=list(options.table.missing_words))
        source = replace(source, meta=meta)
    if options.classes:
        source = _with_classes(source, options)
    shard = make_shard(
        path,
        path.name,
        source.train,
        source.test,
        source.meta,
        source.groups,
        test_groups=source.test_groups,
        read_notes=source.notes,
    )
    _write(out, source)
    return shard


def _read(path: Path, options: MakeOptions) -> DataSource:
    if not path.exists():
        raise ShardError(f"there is nothing at {path}; give {FORMS}")
    if path.is_file() and (is_table(path) or (may_be_table(path) and _says_table(path, options))):
        table = table_of(path, options.table)
        if options.text:
            return _of_cells(table, None, options, options.text)
        check_applicable(path, "table", options)
        return source_of_table(table, options.table)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        train, test = read_dataset(path, options.table)
        return _of_dataset(train, test, options)
    if images.recognises(path):
        check_applicable(path, "images", options)
        return images.read(path, options)
    if path.is_file() and plain_suffix(path) == ".txt":
        check_applicable(path, "text", options)
        return _windows(path, options)
    raise ShardError(f"{path} has no form that a shard can be made from; give {FORMS}")


def _of_dataset(train: DataTable, test: DataTable | None, options: MakeOptions) -> DataSource:
    """Return the samples of a dataset's column with images or text, or of all its columns as numbers."""
    pictured = next((name for name, cells in train.cells.items() if _is_image(cells)), "")
    if options.text or pictured:
        return _of_cells(train, test, options, options.text or pictured)
    check_applicable(train.path, "table", options)
    train = replace(train, words=missing_words(options.table))
    if test is None:
        return source_of_table(train, options.table)
    names = [name for name in train.names if name in test.cells or name not in train.index]
    test.require(*names)
    outputs_of(test, options.table)  # what is wrong there is said with its name
    both = {name: [*train.cells[name], *test.cells[name]] for name in names}
    both[SPLIT] = ["train"] * len(train) + ["test"] * len(test)
    return source_of_table(replace(train, cells=both), options.table)


def _of_cells(train: DataTable, test: DataTable | None, options: MakeOptions, column: str) -> DataSource:
    """Return the samples of one column, text or images, with their labels."""
    check_applicable(train.path, "text column" if options.text else "image column", options)
    train = replace(train, words=missing_words(options.table))
    test = None if test is None else replace(test, words=missing_words(options.table))
    if test is None:
        train, test = training_and_test(train, options.table)
    both = [table for table in (train, test) if table is not None]
    for table in both:
        table.require(column)
    notes: list[str] = []
    if _is_image(train.cells[column]):
        decoded = [_images(table, column, options) for table in both]
        meta, values = Meta(kind="images", channels="last"), same_depth([images_.x for images_ in decoded])
        notes = [note for images_ in decoded for note in images_.notes]
    else:
        alphabet = alphabet_of(options.tokenizer)
        meta = Meta(kind="tokens", vocabulary=alphabet.size)
        texts = [table.text(column) for table in both]
        values = [alphabet.rows(part, options.length) for part in texts]
        notes += [] if options.tokenizer else lost_characters(chain.from_iterable(texts), f"column {column!r} of {train.path}")
    parts = [(x, outputs_of(table, options.table)) for x, table in zip(values, both, strict=True)]
    test_part = parts[1] if len(parts) > 1 else None
    return DataSource(parts[0], test_part, with_outputs(meta, train, options.table), notes=(*train.notes, *notes))


def _images(table: DataTable, column: str, options: MakeOptions) -> DecodedImages:
    cells = table.cells[column]
    where = [f"image {at + 1} of {table.path}" for at in range(len(cells))]
    return decode_images([cell["bytes"] or Path(str(cell["path"])) for cell in cells], where, options)


def _is_image(cells: Any) -> bool:
    return len(cells) > 0 and isinstance(cells[0], dict) and {"bytes", "path"} <= cells[0].keys()


def _with_classes(source: DataSource, options: MakeOptions) -> DataSource:
    if options.table.task != "classes":
        raise SettingError(f"--classes: the task is {options.table.task}; the columns of --label name what is predicted")
    if source.meta.classes is not None:
        raise SettingError("--classes: the classes of text without a label are its characters; leave it out")
    classes: list[Label] = [label_of_text(name) for name in options.classes]
    if not all(isinstance(label, int) for label in classes):
        classes = [str(label) for label in classes]
    return replace(source, meta=msgspec.structs.replace(source.meta, classes=classes))


def _write(out: Path, source: DataSource) -> None:
    meta = source.meta if source.groups is None else msgspec.structs.replace(source.meta, groups="group")
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ShardError(f"{out} is not empty; choose another --out, or remove what is there")
        # train.npz makes the folder a shard, so it comes last.
        parts = {"test": (source.test, source.test_groups), "train": (source.train, source.groups)}
        try:
            write_file(out / "meta.json", msgspec.json.encode(meta) + b"\n", PUBLIC, durable=False)
            for name, (part, groups) in parts.items():
                more: dict[str, Any] = {} if groups is None else {"group": groups}
                if part is not None:
                    write_arrays(out / f"{name}.npz", {"x": part[0], "y": part[1], **more})
        except BaseException:
            for written in ("meta.json", "test.npz", "train.npz"):
                (out / written).unlink(missing_ok=True)
            raise
    except (OSError, DiskFull) as error:
        if isinstance(error, DiskFull) or error.errno in NO_SPACE:
            raise DiskFull(f"no space left for the shard in {out}; free some, or choose another --out") from None
        raise ShardError(f"cannot write the shard to {out}: {error.strerror or error}") from None


def _says_table(path: Path, options: MakeOptions) -> bool:
    """Return whether a file that can be a table or a text is to be read as a table.

    Raises:
        ShardError: Nothing says so, but every line has the same number of cells.
    """
    if options.table != PLAIN or options.text or plain_suffix(path) != ".txt":
        return True
    if options.length == LENGTH and not options.tokenizer and looks_like_table(read_text(path, strict=True)):
        raise ShardError(
            f"{path} looks like a table, since all its lines have the same number of cells: say --label, the column of the "
            "class. To take it as a text, say its --length"
        )
    return False


def _windows(path: Path, options: MakeOptions) -> DataSource:
    """Return the windows of a text: tokens x, (N, T), and the tokens that follow each of them as y, (N, T).

    A rest that does not fill a window is left out.

    Raises:
        ShardError: The file cannot be read, or is shorter than one window.
        SettingError: The tokenizer cannot be used.
    """
    alphabet, length = alphabet_of(options.tokenizer), options.length
    text = read_text(path, strict=True)
    notes = [] if options.tokenizer else lost_characters([text], str(path))
    tokens_L = alphabet.stream(text)
    count = (len(tokens_L) - 1) // length
    if count < 1:
        what = "tokens" if options.tokenizer else "characters"
        raise ShardError(f"{path} holds {len(tokens_L)} {what}, fewer than a window of {length} and the one that follows")
    x = tokens_L[: count * length].reshape(count, length)
    y = tokens_L[1 : count * length + 1].reshape(count, length)
    meta = Meta(classes=list(range(alphabet.size)), kind="tokens", vocabulary=alphabet.size)
    if rest := len(tokens_L) - count * length - 1:
        notes.append(f"left out: the last {rest} tokens, which do not fill a window of {length}")
    return DataSource((x, y), None, meta, notes=tuple(notes))
