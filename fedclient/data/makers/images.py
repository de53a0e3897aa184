"""Reader of folders of images, with a folder for each class."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np

from attune.common.errors import ShardError
from attune.common.text import listed
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.makers.make_options import MakeOptions
from attune.fedclient.data.makers.pixels import SUFFIXES, DecodedImages, decode_images, same_depth
from attune.fedclient.data.meta import Meta
from attune.fedclient.data.samples import TESTING, TRAINING
from attune.fedclient.data.source import DataSource

# Folders and files that systems put beside those of the user
PUT_THERE = frozenset({"__macosx", "thumbs.db", "desktop.ini", "@eadir", "$recycle.bin", "system volume information"})


@dataclass
class FolderContent:
    """Images below one folder, and what is left out there.

    Attributes:
        images: Each image and its class.
        deeper: Names of folders with images below a class's folder, by class.
        hidden: Files that are hidden, or lie in a hidden folder.
        others: Files whose suffix is not that of an image.
        unclassed: Images that lie in no folder of a class.
        empty: Folders without an image.
    """

    images: list[tuple[Path, str]] = field(default_factory=list)
    deeper: dict[str, set[str]] = field(default_factory=dict)
    hidden: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)
    unclassed: list[Path] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)


def is_hidden(path: Path) -> bool:
    """Return whether a part of a relative path is hidden, or was put there by a system."""
    return any(part.startswith(".") or part.lower() in PUT_THERE for part in path.parts)


def is_image(path: Path) -> bool:
    """Return whether the suffix is that of an image."""
    return path.suffix.lower() in SUFFIXES


def files_below(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder: those of a folder by name, then those of its folders. Links are followed.

    Raises:
        ShardError: A folder cannot be read.
    """
    seen: set[tuple[int, int]] = set()
    for place, folders, names in os.walk(folder, followlinks=True, onerror=_unreadable):
        status = Path(place).stat()
        if (status.st_dev, status.st_ino) in seen:  # a link to a folder around it
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders.sort()
        yield from (Path(place) / name for name in sorted(names))


def recognises(path: Path) -> bool:
    """Return whether `path` is a folder with images at any depth below it."""
    return path.is_dir() and any(is_image(file) and not is_hidden(file.relative_to(path)) for file in files_below(path))


def read(path: Path, options: MakeOptions) -> DataSource:
    """Read all images below `path`. The class of an image is the name of the folder below `path`, or below a part.

    Parts are folders such as `train`, `val` and `test` that hold folders with images. `val` counts as `train`.

    Raises:
        ShardError: A file is not a readable image, sizes differ and `options.size` is not given, or no class is seen.
        SettingError: Pillow is not installed.
    """
    folders = _visible_folders(path)
    parts = [folder for folder in folders if folder.name.lower() in TRAINING | TESTING and _is_part(folder)]
    if not any(folder.name.lower() in TRAINING for folder in parts):
        parts = []
    if not parts:
        content = _content(path, path)
        train, test = _decoded(path, content, options), None
        return _source(path, train, test, _notes(path, [content], []))
    beside = [folder for folder in folders if folder not in parts]
    training = [_content(folder, path) for folder in parts if folder.name.lower() in TRAINING]
    testing = [_content(folder, path) for folder in parts if folder.name.lower() in TESTING]
    train = _decoded(path, _joined(training), options)
    test = _decoded(path, _joined(testing), options) if testing else None
    notes = _notes(path, [*training, *testing], [file for folder in beside for file in files_below(folder)])
    extra = [folder.name for folder in parts if folder.name.lower() in TRAINING and not folder.name.lower().startswith("train")]
    if extra:
        notes = (*notes, f"{', '.join(extra)} counts as training: each device holds out its own samples for validation")
    return _source(path, train, test, notes)


def _source(
    path: Path, train: tuple[DecodedImages, Array], test: tuple[DecodedImages, Array] | None, notes: tuple[str, ...]
) -> DataSource:
    meta = Meta(kind="images", channels="last")
    if test is None:
        return DataSource((train[0].x, train[1]), None, meta, notes=(*notes, *train[0].notes))
    train_x, test_x = same_depth([train[0].x, test[0].x])
    of_test = [f"{note} (in the test part)" for note in test[0].notes]
    return DataSource((train_x, train[1]), (test_x, test[1]), meta, notes=(*notes, *train[0].notes, *of_test))


def _unreadable(error: OSError) -> NoReturn:
    raise ShardError(f"cannot read {error.filename}: {error.strerror}") from None


def _visible_folders(path: Path) -> list[Path]:
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_dir() and not is_hidden(Path(entry.name)))
    except OSError as error:
        raise ShardError(f"cannot read {path}: {error.strerror}") from None


def _is_part(folder: Path) -> bool:
    """Return whether a folder holds images in its subfolders alone, so that it is not a class."""
    images = [file for file in files_below(folder) if is_image(file) and not is_hidden(file.relative_to(folder))]
    return bool(images) and all(file.parent != folder for file in images)


def _content(folder: Path, root: Path) -> FolderContent:
    content = FolderContent()
    for file in files_below(folder):
        below = file.relative_to(folder)
        if is_hidden(below):
            content.hidden.append(file.relative_to(root))
        elif not is_image(file):
            content.others.append(file.relative_to(root))
        elif len(below.parts) == 1:
            content.unclassed.append(file.relative_to(root))
        else:
            name = unicodedata.normalize("NFC", below.parts[0]).strip()
            content.images.append((file, name))
            content.deeper.setdefault(name, set()).add("/".join(below.parts[1:-1]))
    with_images = {file.relative_to(folder).parts[0] for file, _ in content.images}
    content.empty = [entry.name for entry in _visible_folders(folder) if entry.name not in with_images]
    _check_depth(folder, content)
    return content


def _check_depth(folder: Path, content: FolderContent) -> None:
    """Check that the folders below `folder` can be the classes.

    Raises:
        ShardError: There are none, or the classes seem to lie one folder deeper.
    """
    if not content.images:
        raise ShardError(f"{folder} holds no folder with images; each class needs a folder of its own, named like it")
    deeper = list(content.deeper.values())
    if "" in set().union(*deeper) or len(deeper[0]) == 1 or any(names != deeper[0] for names in deeper):
        return
    names, inner = ", ".join(sorted(content.deeper)), listed(sorted(deeper[0]))
    raise ShardError(
        f"are the classes of {folder} {names}, or {inner}? All images lie in folders called {inner} below {names}. "
        "Give a folder whose folders are the classes, or move the images into the folders of their classes"
    )


def _joined(contents: Sequence[FolderContent]) -> FolderContent:
    return FolderContent(sorted((image for content in contents for image in content.images), key=lambda image: image[1]))


def _decoded(path: Path, content: FolderContent, options: MakeOptions) -> tuple[DecodedImages, Array]:
    files = [file for file, _ in content.images]
    return decode_images(files, [str(file) for file in files], options), np.array([name for _, name in content.images])


def _notes(path: Path, contents: Sequence[FolderContent], beside: Sequence[Path]) -> tuple[str, ...]:
    """Return what is left out, and which images lie deeper than their class's folder."""
    hidden = [file for content in contents for file in content.hidden]
    others = [file for content in contents for file in content.others]
    unclassed = [file for content in contents for file in content.unclassed]
    empty = [name for content in contents for name in content.empty]
    reasons = []
    if hidden:
        reasons.append(f"{len(hidden)} hidden files ({listed([str(file) for file in hidden])})")
    if others:
        suffixes = Counter(file.suffix.lower() or file.name for file in others)
        reasons.append(
            f"{len(others)} files that have no suffix of images ({listed([f'{name}: {n}' for name, n in suffixes.items()])})"
        )
    if unclassed:
        reasons.append(f"{len(unclassed)} images outside the folders of classes ({listed([str(file) for file in unclassed])})")
    if empty:
        reasons.append(f"folders without an image ({listed(empty)})")
    if beside:
        names = sorted({file.relative_to(path).parts[0] for file in beside})
        reasons.append(f"{len(beside)} files beside the parts for training and testing ({listed(names)})")
    notes = [f"left out: {'; '.join(reasons)}"] if reasons else []
    deeper = sorted(
        {f"{name}/{inner}" for content in contents for name, inners in content.deeper.items() for inner in inners if inner}
    )
    if deeper:
        notes.append(f"images in folders below the folder of a class belong to this class ({listed(deeper)})")
    return tuple(notes)
