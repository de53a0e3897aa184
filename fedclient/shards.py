"""Which shards --data means, and what the device of each is called when one process hosts several."""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from attune.common import homes
from attune.common.errors import ShardError
from attune.common.identity.names import check_name, joined_name
from attune.common.text import listed
from attune.fedclient.data.arrays import plain_suffix
from attune.fedclient.data.table import PERHAPS, is_table
from attune.fedclient.options import DeviceOptions


def is_fleet(given: Sequence[str]) -> bool:
    """Return whether one process hosts several devices: several --data, or a pattern, even if it matches one shard."""
    return len(given) > 1 or any(map(_is_pattern, given))


def expand(given: Sequence[str]) -> list[Path]:
    """Return the shards, each once, in the given order; those of a pattern by name, with numbers by their value.

    A pattern matches folders, .npz files and tables, and texts such as .txt if it names their suffix.

    Raises:
        ShardError: A pattern matches no shard.
    """
    shards: dict[Path, Path] = {}
    for text in given:
        for path in _matches(text) if _is_pattern(text) else [Path(text)]:
            shards.setdefault(path.expanduser().resolve(), path)
    return list(shards.values())


def members(paths: Iterable[Path], common: DeviceOptions) -> list[DeviceOptions]:
    """Return the options of each shard's device: `common` with the shard's data, home, name and label.

    --home DIR becomes DIR/LABEL, --name NAME becomes NAME-LABEL.

    Raises:
        SettingError: The name cannot be the beginning of names.
    """
    if common.name is not None:
        check_name(common.name)
    places = list(paths)
    options = []
    for path, label in zip(places, labels(places), strict=True):
        where = common.home / label if common.home else homes.device_home(common.server.host, common.server.port, path)
        name = joined_name(common.name, label) if common.name is not None else None
        options.append(replace(common, data=path, home=where, name=name, label=label))
    return options


def labels(paths: Iterable[Path]) -> list[str]:
    """Return a name for each shard: that of its folder or file. Equal names get a digest of the whole path."""
    places = list(paths)
    plain = [joined_name("", _stem(path)) for path in places]
    count = Counter(plain)
    return [
        label if count[label] == 1 else joined_name("", homes.shard_folder(path))
        for path, label in zip(places, plain, strict=True)
    ]


def _is_pattern(text: str) -> bool:
    return glob.has_magic(text) and not Path(text).exists()


def _matches(pattern: str) -> list[Path]:
    everything = glob.glob(str(Path(pattern).expanduser()), recursive=True)  # noqa: PTH207 (absolute patterns too)
    paths = [Path(text) for text in everything]
    shards = [path for path in paths if path.is_dir() or path.suffix.lower() == ".npz" or is_table(path)]
    if "." in Path(pattern).name:  # sites/*.txt means texts, and sites/* does not: a README.txt is no shard
        shards += [path for path in paths if plain_suffix(path) in PERHAPS]
    if not shards:
        others = f" ({len(paths)} others are not taken: {listed([path.name for path in paths])})" if paths else ""
        raise ShardError(
            f"no shard matches {pattern!r}{others}; --data takes folders with train.npz, .npz files and tables (.csv); say the "
            "suffix of tables that are called .txt, as in 'sites/*.txt'"
        )
    return sorted(shards, key=_by_numbers)


def _by_numbers(path: Path) -> list[tuple[int, str]]:
    """Return a key that orders numbers in paths by their value."""
    return [(len(part), part) if part.isdigit() else (0, part) for part in re.split(r"(\d+)", str(path))]


def _stem(path: Path) -> str:
    absolute = path.expanduser().resolve()
    return absolute.stem if absolute.is_file() else absolute.name
