"""Manifest of a result: what it was made with, so that it can be made again. It has no paths of this machine."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import msgspec

import attune
from attune.common.hardware import processor_name
from attune.fedclient.data.lazy_shard import LazyShard

GIT_S = 10.0  # seconds for git to answer
# A path that leaves the present folder: of the root, a home, a drive or "..", up to its last separator.
_FOLDERS = re.compile(r"""(?<![^=,:'"\[(])(?:~[^/\\=,:'"]*|[A-Za-z]:|\.\.)?[/\\](?:[^=,:'"]*[/\\])?""")


class ResultManifest(msgspec.Struct, frozen=True):
    """Circumstances of a result.

    Attributes:
        attune: Version of Attune.
        torch: Version of torch.
        numpy: Version of numpy.
        python: Version of Python.
        commit: Commit of Attune's source, with "+" if files differ from it; None if it does not run from a git checkout.
        processor: Model of the processor.
        cores: Number of cores.
        system: Name of the operating system.
        data: Digest of the names and the data of all devices.
        command: The program and its arguments. Paths outside the present folder are cut to their last name.
        method: Name of the method.
        seed: Seed of every random draw.
        executor: Name of the executor.
    """

    attune: str
    torch: str
    numpy: str
    python: str
    commit: str | None
    processor: str
    cores: int | None
    system: str
    data: str
    command: str
    method: str
    seed: int
    executor: str


def result_manifest(data: str, method: str, seed: int, executor: str) -> ResultManifest:
    """Return the manifest of a result of this process.

    Args:
        data: As `data_digest` returns it.
        method: Name of the method.
        seed: Seed of every random draw.
        executor: Name of the executor.
    """
    return ResultManifest(
        attune=version(attune.DISTRIBUTION),
        torch=version("torch"),
        numpy=version("numpy"),
        python=platform.python_version(),
        commit=commit_of(Path(attune.__file__).resolve().parent),
        processor=processor_name(),
        cores=os.cpu_count(),
        system=platform.system(),
        data=data,
        command=neutral(sys.argv),
        method=method,
        seed=seed,
        executor=executor,
    )


def data_digest(members: Mapping[str, LazyShard]) -> str:
    """Return a digest of the devices' names and data, which does not depend on their order."""
    whole = blake2b(digest_size=16)
    for name in sorted(members):
        whole.update(f"{name}\0{members[name].digest}\n".encode())
    return whole.hexdigest()


def neutral(words: Sequence[str]) -> str:
    """Return a command line in which every path outside the present folder is cut to its last name."""
    program, *arguments = words or [""]
    return shlex.join([Path(program).name, *(_FOLDERS.sub("", word) for word in arguments)])


def commit_of(folder: Path) -> str | None:
    """Return the commit of a git checkout, with "+" if its files differ; None if the folder is none, or git is missing."""
    if not (folder / ".git").exists():
        return None
    command = ("git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
