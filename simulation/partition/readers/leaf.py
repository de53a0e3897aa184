"""Reader of LEAF's JSON (Caldas et al., 'LEAF: A Benchmark for Federated Settings', 2018): numbers or text by user."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from attune.common.errors import ShardError
from attune.common.text import from_json
from attune.fedclient.data.arrays import MAX_TEXT_BYTES, Array, files_in, plain_suffix, read_bytes
from attune.fedclient.data.makers.alphabets import CHARACTERS, encode
from attune.fedclient.read_options import ReadOptions
from attune.simulation.partition.readers.assemble import Raw

CLIENT = "client"


class _User(msgspec.Struct):
    x: list[Any]
    y: list[int | float | str]


class _File(msgspec.Struct):
    """Content of a file."""

    users: list[str]
    user_data: dict[str, _User]
    num_samples: list[int] = []


def recognises(path: Path) -> bool:
    """Return whether this reader can read the path, by names or a first line."""
    if path.is_file():
        return plain_suffix(path) == ".json"
    return path.is_dir() and bool(_json(path) or _json(path / "train"))


def read(path: Path, options: ReadOptions) -> Raw:
    """Read a file, a folder of files, or a folder with folders train and test. The label array `client` names the user.

    Texts of one length become tokens. Labels that are single characters become tokens.

    Raises:
        ShardError: A file has another form, or its samples do not fit together.
    """
    if path.is_dir() and not _json(path):
        parts = [_part(_json(path / "train")), _part(_json(path / "test"))] if _json(path / "test") else []
        parts = parts or [_part(_json(path / "train"))]
    else:
        parts = [_part([path] if path.is_file() else _json(path))]
    name = path.resolve().name.partition(".")[0]
    client = np.concatenate([whose for _, _, whose in parts])
    arrays = [(_features(x, name), _labels(y, isinstance(x[0], str), name)) for x, y, _ in parts]
    text = isinstance(parts[0][0][0], str)
    return Raw(
        name,
        arrays[0],
        arrays[1] if len(arrays) == 2 else None,
        more={CLIENT: client},
        classes=list(range(len(CHARACTERS))) if text and arrays[0][1].dtype == np.uint8 else None,
        vocabulary=len(CHARACTERS) if text else 0,
    )


def _json(folder: Path) -> list[Path]:
    return [path for path in files_in(folder) if plain_suffix(path) == ".json"] if folder.is_dir() else []


def _part(paths: list[Path]) -> tuple[list[Any], list[Any], Array]:
    """Return x, y and the user of every sample. The size limit applies to all files together."""
    x: list[Any] = []
    y: list[Any] = []
    whose: list[str] = []
    left = MAX_TEXT_BYTES
    for path in paths:
        data = read_bytes(path, left)
        left -= len(data)
        try:
            content = from_json(data, _File)
        except msgspec.DecodeError as error:
            raise ShardError(f"{path} is not LEAF's JSON (users, user_data with x and y for each): {error}") from None
        if len(content.user_data) > len(content.users):
            raise ShardError(
                f"{path} is not whole: {len(content.user_data)} users have data, and {len(content.users)} are listed"
            )
        for user, said in zip_longest(content.users, content.num_samples[: len(content.users)]):
            mine = content.user_data.get(user)
            if mine is None or len(mine.x) != len(mine.y):
                raise ShardError(f"user {user!r} of {path} has no data, or not as many x as y")
            if said not in (None, len(mine.y)):
                raise ShardError(f"user {user!r} of {path} says that it has {said} samples, and {len(mine.y)} could be read")
            x += mine.x
            y += mine.y
            whose += [user] * len(mine.y)
    if not x:
        raise ShardError(f"no user of {', '.join(map(str, paths[:3])) or 'the folder'} has any samples")
    return x, y, np.array(whose)


def _features(x: list[Any], name: str) -> Array:
    if isinstance(x[0], str):
        lengths = {len(text) if isinstance(text, str) else -1 for text in x}
        if len(lengths) != 1 or min(lengths) < 1:
            raise ShardError(f"the texts of {name} have different lengths; only windows of one length can be tokens")
        return encode("".join(x)).reshape(len(x), -1)
    try:
        array = np.array(x)
    except ValueError:
        raise ShardError(f"the samples of {name} have different lengths; they need one shape") from None
    if array.dtype.kind not in "biuf" or array.ndim < 2:
        raise ShardError(f"the samples of {name} are neither lists of numbers nor text of one length")
    return array.astype(np.float32)


def _labels(y: list[Any], text: bool, name: str) -> Array:
    if text and all(isinstance(label, str) and len(label) == 1 for label in y):
        return encode("".join(y))
    if len({isinstance(label, str) for label in y}) != 1:
        raise ShardError(f"some labels of {name} are text and some are numbers; save them as one of both")
    return np.array(y)
